"""`make docs`: the site is built without a warning, and searched in a browser."""

import functools
import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Error

from tests import docs_site
from tests.browser.conftest import Watched
from tests.waiting import until

pytestmark = pytest.mark.slow


def test_the_address_without_a_version_leads_to_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docs_site, "SITE", tmp_path)
    for version in ("0.9.0", "0.10.0", "0.10.0rc1", "0.2.1"):
        (tmp_path / version).mkdir()
    docs_site.write_versions()
    assert "url=0.10.0/" in (tmp_path / "index.html").read_text()
    assert [each["version"] for each in json.loads((tmp_path / "versions.json").read_text())] == [
        "0.10.0",
        "0.10.0rc1",
        "0.9.0",
        "0.2.1",
    ]


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_args: Any) -> None: ...


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The site, served from this process."""
    for name, folder in (("BUILD", "."), ("PAGES", "docs"), ("SITE", "site")):
        monkeypatch.setattr(docs_site, name, tmp_path / folder)
    docs_site.build("1.2.3")
    handler = functools.partial(Quiet, directory=str(tmp_path / "site"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/1.2.3/"
        server.shutdown()


def test_a_reader_finds_a_page_by_a_word(site: str, watched: Watched) -> None:
    page = watched.page(site)
    search = page.get_by_role("combobox", name="Search")

    def opens() -> bool:
        page.keyboard.press("/")  # which counts once the page's script runs
        page.wait_for_timeout(100)
        return search.is_visible()

    until(opens, "the search")
    found = page.get_by_role("dialog", name="Search").get_by_text("Retries and the morgue").first

    def finds() -> bool:
        search.fill("")
        search.fill("morgue")  # which counts once the index is loaded
        with suppress(Error):
            found.wait_for(timeout=5000)
        return found.is_visible()

    until(finds, "the page that is looked for")
    found.click()
    page.wait_for_url("**/failures/**")
    page.goto(f"{site}reference/")
    assert page.locator("[id='lowq.Worker']").count() == 1
    assert "- [Workers](workers/): " in page.request.get(f"{site}llms.txt").text()
