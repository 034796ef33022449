"""Several processes of the dashboard behind one balancer, which gives each request to the next one."""

import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from starlette.testclient import TestClient

import lowq
import lowq_web
from lowq_web import confirmations
from lowq_web.token_store import TokenStore
from tests.rows import case
from tests.rules.web.confirming import confirm
from tests.rules.web.conftest import OWN
from tests.rules.web.shown import parse
from tests.waiting import until

AT = "http://127.0.0.1"


class Balanced:
    """A browser that reaches the dashboards by turns."""

    def __init__(self, *clients: TestClient) -> None:
        self._next = itertools.cycle(clients)

    def get(self, path: str) -> Any:
        return next(self._next).get(path)

    def post(self, path: str, data: Mapping[str, Any] | None = None) -> Any:
        return next(self._next).post(path, data=data)


@pytest.fixture
def app(redis_url: str) -> Iterator[lowq.Lowq]:
    app = lowq.Lowq(redis_url=redis_url)
    app.queue("Orders", 3).push({"id": f"job-{n}", "delay": 3600.0} for n in range(40))
    yield app
    app.close()


@pytest.fixture
def browser(app: lowq.Lowq, redis_url: str) -> Iterator[Any]:
    apps = [lowq.Lowq(redis_url=redis_url) for _ in range(2)]
    made = [lowq_web.create_app(one) for one in apps]
    yield Balanced(*(TestClient(one, base_url=AT, headers=OWN, follow_redirects=False) for one in made))
    for one in apps:
        one.close()


def test_what_was_done_on_one_is_said_by_the_other_once(browser: Any) -> None:
    address = browser.post("/queues/Orders/pause").headers["location"]
    assert "Paused." in parse(browser.get(address).text).text
    for _ in range(2):
        assert "Paused." not in parse(browser.get(address).text).text


def ended(browser: Any, answer: Any) -> str:
    """The page of the task that was started, when it has ended."""
    address = answer.headers["location"]
    until(lambda: 'data-refresh="0"' in browser.get(address).text, "end of the task")
    return parse(browser.get(address).text).text


def test_a_question_of_one_is_answered_on_the_other_as_it_was_shown(
    browser: Any, app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Very many jobs stay with the process that asked. Elsewhere the time bounds the action, and the page says so."""
    for shared in (40, 39):
        with case(shared):
            monkeypatch.setattr(confirmations, "MAX_SHARED", shared)
            page = browser.post("/queues/Orders/act", data={"do": "delete all"}).text
            app.queue("Orders").push({"id": "new", "delay": 3600.0})
            shown = ended(browser, confirm(browser, "/queues/Orders/act", page))
            left = [job.id for job in app.queue("Orders").jobs()]
            assert ("left alone" in shown, "new" in left, len(left) == 1) == (shared == 39, True, shared == 40)
            app.queue("Orders").delete(left)
            app.queue("Orders").push({"id": f"job-{n}", "delay": 3600.0} for n in range(40))


def test_without_redis_only_the_notice_is_missing(
    browser: Any, app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_args: object) -> str:
        raise lowq.RedisUnavailable("Redis does not answer")

    for verb in ("leave", "find", "take"):
        monkeypatch.setattr(TokenStore, verb, away, raising=False)
    location = browser.post("/queues/Orders/pause").headers["location"]
    assert "said=" not in location
    assert app.queue("Orders").stats().paused
    assert browser.get(f"{location}?said=1-{'x' * 16}").status_code == 200


def test_a_notice_that_somebody_has_written_is_only_text(browser: Any, app: lowq.Lowq) -> None:
    key = "lowq:v1:notices"
    for forged in ("", "null", "[]", '{"text": 5}', json.dumps({"text": "<script>alert(1)</script>"})):
        with case(forged):
            address = browser.post("/queues/Orders/pause").headers["location"]
            slot, _, token = address.partition("said=")[2].partition("-")
            app.client.command("HSET", key, slot, f"{token} {forged}", key=key)
            page = browser.get(address)
            assert (page.status_code, "<script>alert" in page.text) == (200, False)
