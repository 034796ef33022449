"""The files that the documentation shows, in an application: with the real FastAPI and Django.

A block below ``<!-- file: PATH -->`` is written to PATH in an empty folder, beside what the page takes for granted. A
script then does what a user would do, in a process of its own, with an empty embedded store.
"""

import re
from pathlib import Path

import pytest

from tests.processes.project.forked import ROOT, run_scripts

_FILE = re.compile(r"^<!-- file: (\S+) -->\n+```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILES = {
    page.name: dict(_FILE.findall(page.read_text(encoding="utf-8")))
    for page in sorted((ROOT / "docs").glob("*.md"))
    # Tests of their own execute these.
    if page.name not in ("django-start.md", "production.md") and not page.name.startswith("from-")
}

#: What the page of the dashboard takes for granted of a Django project.
DJANGO = {
    "shop/settings.py": """
SECRET_KEY = "not secret"
INSTALLED_APPS = ["shop"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "shop.sqlite3", "CONN_MAX_AGE": 60}}
ROOT_URLCONF = "shop.urls"
ALLOWED_HOSTS = ["*"]
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
""",
    "shop/urls.py": """
from django.http import HttpResponse
from django.urls import path

urlpatterns = [path("", lambda request: HttpResponse("the shop"))]
""",
}

#: Runs the tests that a page shows: all of them pass, and nothing is warned of.
_RUN_TESTS = """
import sys, pytest

class Passed:
    count = 0
    def pytest_runtest_logreport(self, report):
        self.count += report.when == "call" and report.passed

passed = Passed()
options = ["-q", "-W", "error", "-p", "no:cacheprovider", "-o", "asyncio_default_fixture_loop_scope=function"]
options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # the process has loaded some plugins already
assert pytest.main([*options, 'test_orders.py', 'test_async.py'], plugins=[passed]) == 0
assert passed.count == 5, passed.count
"""

#: page:name -> a script that uses the files of the page.
USES = {
    "extending.md:a package": """
import re, tomllib
from pathlib import Path
import lowq.testing

page = Path(lowq.__file__).parents[1] / "docs/extending.md"
project = tomllib.loads(re.search("```toml\\n(.*?)```", page.read_text(), re.DOTALL)[1])["project"]
installed = Path("acme_drivers-1.0.dist-info")  # as pip would have it
installed.mkdir()
(installed / "METADATA").write_text(f"Metadata-Version: 2.1\\nName: {project['name']}\\nVersion: 1.0\\n")
(installed / "entry_points.txt").write_text("".join(
    f"[{group}]\\n" + "".join(f"{name} = {value}\\n" for name, value in points.items())
    for group, points in project["entry-points"].items()
))

import shop
import acme_drivers

assert type(shop.Mail.queue) is type(lowq.app.queue("Mail")) is acme_drivers.MailQueue
(job,) = lowq.app.queue("letters").jobs().jobs
assert job.payloads[0][0] == {"to": "bob@example.com", "text": "Hi"}
assert lowq.config.dump_payload is acme_drivers.compressed.dump_payload
assert lowq.testing.drain(shop.Mail).performed == 1
assert set(lowq.drivers.GROUPS.values()) == set(project["entry-points"])
for group, points in project["entry-points"].items():
    for name, value in points.items():
        driver = lowq.drivers.load(group.removeprefix("lowq.").removesuffix("s"), name)
        assert driver is getattr(acme_drivers, value.partition(":")[2])
pay = {"url": "/a", "n": 1}, {"url": "/b", "n": 2}, {"url": "/a", "n": 3}
assert acme_drivers.latest_of_each_url(pay) == [{"url": "/a", "n": 3}, {"url": "/b", "n": 2}]

import threading
from lowq.node.node import Node

performed = threading.Event()
shop.Mail.perform = lambda self, payloads_by_id: performed.set()
shop.Mail.queue.send("ann@example.com", "again")
node = Node(lowq.app)
node.start()
assert performed.wait(60)
node.stop()
""",
    "dashboard.md:FastAPI": """
from starlette.requests import Request
from starlette.testclient import TestClient
from mounted import app

@app.get("/login/{name}")
def login(name: str, request: Request) -> str:
    request.session["user"] = {"name": name, "boss": name == "ann"}
    return name

def get(path):
    # On a busy machine the store begins later than the dashboard waits for Redis.
    while (answer := client.get(path)).status_code == 503:
        pass
    return answer

with TestClient(app, follow_redirects=False) as client:
    answer = client.get("/ops/lowq/")
    assert (answer.status_code, answer.headers["location"]) == (303, "/login")
    client.get("/login/ann")
    assert get("/ops/lowq/").status_code == 200
    assert get("/ops/lowq/api/v1/queues").status_code == 200
    client.get("/login/bob")
    assert get("/ops/lowq/").status_code == 200
    assert client.post("/ops/lowq/api/v1/queues/Orders/pause", json={}).status_code == 403
""",
    "workers.md:shared": """
import os, sqlite3, threading
from http.server import BaseHTTPRequestHandler, HTTPServer
import lowq.testing

class Supplier(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"price": 7}')

    def log_message(self, *arguments): pass

server = HTTPServer(("127.0.0.1", 0), Supplier)
threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ["SUPPLIER_URL"] = f"http://127.0.0.1:{server.server_port}"
os.environ["DATABASE_URL"] = "sqlite+aiosqlite:///prices.db"
database = sqlite3.connect("prices.db")
database.execute("CREATE TABLE prices (article TEXT PRIMARY KEY, price INTEGER)")

from suppliers.workers import PriceSync

PriceSync.perform_async({"id": article} for article in ("nut", "screw"))
assert lowq.testing.drain(PriceSync, raises=True).performed == 2
assert dict(database.execute("SELECT article, price FROM prices")) == {"nut": 7, "screw": 7}
database.close()
server.shutdown()
server.server_close()
""",
    "testing.md:FastAPI": _RUN_TESTS,
    "dashboard.md:Django": """
import os
os.environ["DJANGO_SETTINGS_MODULE"] = "shop.settings"
from starlette.testclient import TestClient
from asgi import application

with TestClient(application, base_url="http://localhost", client=("127.0.0.1", 50000)) as client:
    assert client.get("/").text == "the shop"
    while (answer := client.get("/ops/lowq/api/v1/queues")).status_code == 503:
        pass  # on a busy machine the store begins later than the dashboard waits for Redis
    assert answer.status_code == 200, answer.text
""",
}


@pytest.mark.parametrize("part", range(2))
def test_a_recipe_works_in_an_application(tmp_path: Path, part: int) -> None:
    scripts = {}
    for number, (name, use) in enumerate([*USES.items()][part::2]):
        folder = tmp_path / str(number)
        for path, text in {**DJANGO, **FILES[name.partition(":")[0]]}.items():
            (folder / path).parent.mkdir(exist_ok=True, parents=True)
            (folder / path).write_text(text, encoding="utf-8")
        scripts[name] = folder, use
    run_scripts(scripts)


def test_the_parts_of_an_application_that_are_explained_are_those_that_init_writes() -> None:
    templates = ROOT / "lowq" / "cli" / "project" / "fastapi"
    _, _, explained = (ROOT / "docs" / "production.md").read_text(encoding="utf-8").partition("## The application,")
    shown = _FILE.findall(explained)
    assert {path for path, _ in shown} == {"workers.py", "api.py"}
    for path, text in shown:
        assert text in (templates / f"{path}-tpl").read_text(encoding="utf-8")


def test_every_file_that_is_shown_is_used() -> None:
    for page, files in FILES.items():
        for path in files:
            module = path.removesuffix(".py").replace("/", ".")
            scripts = "".join(script for name, script in USES.items() if name.startswith(f"{page}:"))
            scripts += "".join(text for name, text in files.items() if name in scripts)  # tests that are run
            uses = (f"from {module} import", f"import {module}", f"{path}'")
            assert any(use in scripts for use in uses), f"{page} shows {path}"
