"""The files that the documentation shows, in an application: with the real FastAPI, Django and Sentry.

A block below ``<!-- file: PATH -->`` is written to PATH in an empty folder, beside what the page takes for granted. A
script then does what a user would do, in a process of its own, with an empty embedded store.
"""

import re
from pathlib import Path

import pytest

from tests.processes.project.forked import ROOT, run_scripts

_FILE = re.compile(r"^<!-- file: (\S+) -->\n+```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILES = {
    page.name: dict(_FILE.findall(page.read_text(encoding="utf-8"))) for page in sorted((ROOT / "docs").glob("*.md"))
}

#: What the recipes for Django take for granted.
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
    "shop/models.py": """
from django.db import models

class Order(models.Model):
    version = models.IntegerField(default=1)
    status = models.CharField(max_length=20, default="new")
""",
    "shop/urls.py": """
from django.http import HttpResponse
from django.urls import path

urlpatterns = [path("", lambda request: HttpResponse("the shop"))]
""",
}

#: Runs the tests that a page shows: all of them pass, and nothing is warned of.
_RUN_TESTS = """
import pathlib, sys, pytest

class Passed:
    count = 0
    def pytest_runtest_logreport(self, report):
        self.count += report.when == "call" and report.passed

if {without!r}:
    pathlib.Path({without!r}).unlink()
passed = Passed()
files = {files}
options = ["-q", "-W", "error", "-p", "no:cacheprovider", "-o", "asyncio_default_fixture_loop_scope=function"]
options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # the process has loaded some plugins already
assert pytest.main([*options, *files], plugins=[passed]) == 0
assert passed.count == {count}, passed.count
"""

#: page:name -> a script that uses the files of the page.
USES = {
    "recipes.md:FastAPI": """
from starlette.testclient import TestClient
from lowq.node.node import Node
import lowq.testing
from shop.api import app
from shop.workers import OrderSync

with TestClient(app) as client:
    answer = client.post("/orders/42", json={"version": 2, "status": "paid"})
    assert (answer.status_code, answer.json()) == (202, {"accepted": 1})
    assert client.post("/orders/42", json={"status": "paid"}).status_code == 422
assert OrderSync.queue.peek(42).payloads == [({"version": 2, "status": "paid"}, 2.0)]
assert lowq.testing.drain(OrderSync).performed == 1
""",
    "recipes.md:Django": """
import node  # as `lowq run node.py` loads it: sets Django up
import lowq.testing
from django.db import connection, transaction
from shop.models import Order
from shop.shipping import ship
from shop.workers import OrderSync

with connection.schema_editor() as schema:
    schema.create_model(Order)
order = Order.objects.create()
ship(order)
assert OrderSync.queue.peek(order.pk).payloads == [({"version": 2, "status": "shipped"}, 2.0)]
assert lowq.testing.drain(OrderSync).performed == 1

try:
    with transaction.atomic():
        ship(order)
        assert OrderSync.queue.stats().length == 0, "not before the commit"
        raise KeyError
except KeyError:
    pass
assert OrderSync.queue.stats().length == 0, "never, as it was rolled back"

order.refresh_from_db()
connection.close_at = 0     # as if CONN_MAX_AGE was over
stale = connection.connection
ship(order)
assert lowq.testing.drain(OrderSync).performed == 1
assert stale is not None and connection.connection is None, "the middleware has closed it"
connection.close()
""",
    "recipes.md:Sentry": """
import lowq
import lowq.testing
import sentry_sdk
from sentry_sdk.transport import Transport

events = []

class Memory(Transport):
    def capture_envelope(self, envelope):
        events.append(envelope.get_event())

sentry_sdk.init(dsn="http://key@localhost/1", transport=Memory, default_integrations=False)
import shop.reporting

@lowq.worker(batch_size=2)
class Broken(lowq.Worker):
    def perform(self, payloads_by_id):
        if "2" in payloads_by_id:
            raise ValueError("broken")

Broken.perform_async({"id": number} for number in (1, 2))
assert lowq.testing.drain(Broken).failed == 1
sentry_sdk.flush()
assert [event["exception"]["values"][0]["type"] for event in events] == ["ValueError"]
assert {event["tags"]["lowq.queue"] for event in events} == {"Broken"}
assert events[-1]["contexts"]["lowq"]["ids"] == ["2"]
""",
    "drivers.md:a package": """
import re, tomllib
from pathlib import Path
import lowq.testing

page = Path(lowq.__file__).parents[1] / "docs/drivers.md"
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
    "testing.md:FastAPI": _RUN_TESTS.format(files=["test_orders.py", "test_async.py"], without="conftest.py", count=5),
    "testing.md:Django": _RUN_TESTS.format(files=["test_shop.py"], without="", count=2),
    "django.md:Django": """
import os, pathlib, shutil, subprocess, sys
from django.core.management import execute_from_command_line

def manage(*arguments):
    execute_from_command_line(["manage.py", *arguments])

def begin(*arguments):
    subprocess.run([sys.executable, "-m", "django", *arguments], check=True)

added = {path: pathlib.Path(path).read_text() for path in ('shop/settings.py', 'shop/urls.py')}
shown = ('orders/models.py', 'orders/workers.py', 'orders/tasks.py', 'orders/views.py', 'orders/tests.py')
shown = {path: pathlib.Path(path).read_text() for path in shown}
shutil.rmtree("shop")
shutil.rmtree("orders")
begin("startproject", "shop", ".")
begin("startapp", "orders")
for path, text in {**added, **shown}.items():
    before = pathlib.Path(path).read_text() if path in added else ""
    pathlib.Path(path).write_text(before + text)
os.environ["DJANGO_SETTINGS_MODULE"] = "shop.settings"
manage("makemigrations", "--verbosity", "0")
manage("migrate", "--verbosity", "0")
manage("check", "--fail-level", "WARNING")
manage("test")
""",
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


def test_every_file_that_is_shown_is_used() -> None:
    for page, files in FILES.items():
        for path in files:
            module = path.removesuffix(".py").replace("/", ".")
            scripts = "".join(script for name, script in USES.items() if name.startswith(f"{page}:"))
            scripts += "".join(text for name, text in files.items() if name in scripts)  # tests that are run
            uses = (f"from {module} import", f"import {module}", f"{path}'")
            assert any(use in scripts for use in uses), f"{page} shows {path}"
