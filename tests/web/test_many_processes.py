"""Several processes of the dashboard behind one balancer, which gives each request to the next one."""

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import pytest
from starlette.exceptions import HTTPException
from starlette.testclient import TestClient

import lowq
import lowq_web
from lowq.admin import handover
from lowq.admin.logins import find_failures, record_failure
from lowq.store import Client
from lowq_web import confirmations, logins
from lowq_web.passwords import Attempt
from tests.waiting import NEVER, until
from tests.web.confirming import confirm, form_on
from tests.web.conftest import OWN
from tests.web.served import connected, served
from tests.web.shown import parse

#: Another process: a page that asks, whose answer goes elsewhere. With hashes of its own, as every Python has them.
ASKING = """
import sys

import lowq
import lowq_web
from starlette.exceptions import HTTPException
from starlette.testclient import TestClient

app = lowq.Lowq(redis_url=sys.argv[1])
client = TestClient(lowq_web.create_app(app), base_url="http://127.0.0.1", headers={"sec-fetch-site": "same-origin"})
sys.stdout.write(client.post("/queues/Orders/act", data={"do": "delete all"}).text)
app.close()
"""


@dataclass(frozen=True)
class Answer:
    status_code: int
    headers: Mapping[str, str]
    text: str


class Balanced:
    """A browser that reaches the dashboards by turns."""

    def __init__(self, *addresses: str) -> None:
        self._next = itertools.cycle(addresses)

    def get(self, path: str) -> Answer:
        return self._send("GET", path)

    def post(self, path: str, data: Mapping[str, Any] | None = None) -> Answer:
        return self._send("POST", path, urlencode(data or {}, doseq=True).encode())

    def _send(self, method: str, path: str, body: bytes | None = None) -> Answer:
        with connected(next(self._next)) as connection:
            connection.request(method, path, body, {**OWN, "accept-encoding": "identity"})
            answer = connection.getresponse()
            headers = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(answer.status, headers, answer.read().decode())


@pytest.fixture
def app(redis_url: str) -> Iterator[lowq.Lowq]:
    app = lowq.Lowq(redis_url=redis_url)
    app.queue("Orders", 3).push({"id": f"job-{n}", "delay": 3600.0} for n in range(40))
    yield app
    app.close()


@pytest.fixture
def browser(app: lowq.Lowq, redis_url: str) -> Iterator[Any]:
    with ExitStack() as stack:
        apps = [lowq.Lowq(redis_url=redis_url) for _ in range(2)]
        balanced = Balanced(*(stack.enter_context(served(lowq_web.create_app(one))) for one in apps))
        yield balanced
        for one in apps:
            one.close()


def test_what_was_done_on_one_is_said_by_the_other_once(browser: Any) -> None:
    address = browser.post("/queues/Orders/pause").headers["location"]
    assert "Paused." in parse(browser.get(address).text).text
    for _ in range(2):
        assert "Paused." not in parse(browser.get(address).text).text


def test_a_question_of_one_is_answered_on_the_other_as_it_was_shown(browser: Any, app: lowq.Lowq) -> None:
    page = browser.post("/queues/Orders/act", data={"do": "delete all"}).text
    app.queue("Orders").push({"id": "new", "delay": 3600.0})
    answer = confirm(browser, "/queues/Orders/act", page)
    address = answer.headers["location"]
    until(lambda: 'data-refresh="0"' in browser.get(address).text, "end of the task")
    shown = parse(browser.get(address).text).text
    assert "40 of 40" in shown
    assert "left alone" not in shown, "each job was known"
    assert [job.id for job in app.queue("Orders").jobs()] == ["new"]


def test_a_question_of_a_process_that_is_gone_is_answered_too(browser: Any, app: lowq.Lowq, redis_url: str) -> None:
    asked = subprocess.run([sys.executable, "-c", ASKING, redis_url], capture_output=True, text=True, check=True)
    app.queue("Orders").push({"id": "new", "delay": 3600.0})
    address = confirm(browser, "/queues/Orders/act", asked.stdout).headers["location"]
    until(lambda: 'data-refresh="0"' in browser.get(address).text, "end of the task")
    assert [job.id for job in app.queue("Orders").jobs()] == ["new"]


def test_many_jobs_of_a_question_stay_with_its_process(
    browser: Any, app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere only the time bounds the action, and the page says so."""
    monkeypatch.setattr(confirmations, "MAX_SHARED", 39)
    page = browser.post("/queues/Orders/act", data={"do": "delete all"}).text
    app.queue("Orders").push({"id": "new", "delay": 3600.0})
    address = confirm(browser, "/queues/Orders/act", page).headers["location"]
    until(lambda: 'data-refresh="0"' in browser.get(address).text, "end of the task")
    assert "left alone" in parse(browser.get(address).text).text
    assert "new" in [job.id for job in app.queue("Orders").jobs()]


@pytest.mark.parametrize("forged", [b"", b"nonsense", b'{"at": 1, "total": 40, "salt": ""}\n', b"\xff" * 100])
def test_what_somebody_has_written_over_a_snapshot_counts_for_nothing(
    browser: Any, app: lowq.Lowq, forged: bytes
) -> None:
    page = browser.post("/queues/Orders/act", data={"do": "delete all"}).text
    name = dict(form_on(page))["snapshot"]
    slot, _, token = name.partition("-")
    key = "lowq:v1:confirmations"
    app.client.command("HSET", key, slot, token.encode() + b" " + forged, key=key)
    answer = confirm(browser, "/queues/Orders/act", page)
    # By its time alone; or it is not what the page has shown, and nothing is done.
    assert answer.status_code == 303 or (answer.status_code, app.queue("Orders").stats().length) == (400, 40)


@pytest.mark.parametrize("forged", ["", "null", "[]", '{"text": 5}', json.dumps({"text": "<script>alert(1)</script>"})])
def test_a_notice_that_somebody_has_written_is_only_text(browser: Any, app: lowq.Lowq, forged: str) -> None:
    address = browser.post("/queues/Orders/pause").headers["location"]
    slot, _, token = address.partition("said=")[2].partition("-")
    app.client.command("HSET", "lowq:v1:notices", slot, f"{token} {forged}", key="lowq:v1:notices")
    page = browser.get(address)
    assert page.status_code == 200
    assert "<script>alert" not in page.text


def test_without_redis_only_the_notice_is_missing(
    browser: Any, app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_args: object) -> str:
        raise lowq.RedisUnavailable("Redis does not answer")

    monkeypatch.setattr(handover.Handover, "leave", away)
    answer = browser.post("/queues/Orders/pause")
    assert answer.status_code == 303
    assert "said=" not in answer.headers["location"]
    assert app.queue("Orders").stats().paused
    monkeypatch.setattr(handover.Handover, "find", away)
    assert browser.get(f"{answer.headers['location']}?said=1-{'x' * 16}").status_code == 200


def test_a_page_asks_redis_for_no_notice_that_its_address_does_not_name(
    browser: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    command = Client.command

    def noted(self: Client, *args: Any, **options: Any) -> Any:
        asked.append(args)
        return command(self, *args, **options)

    monkeypatch.setattr(Client, "command", noted)
    for path in ("/", "/queues/Orders", "/tasks", "/audit", "/nodes", "/queues/Orders?said=made-up"):
        assert browser.get(path).status_code == 200
    assert not [args for args in asked if "notices" in str(args) or "confirmations" in str(args)]


# --- failed logins ---

USERS: Any = {"ann": ("s3cret", "admin")}


def dashboards(redis_url: str) -> list[TestClient]:
    """Two processes that ask for a password."""
    return [
        TestClient(
            lowq_web.create_app(lowq.Lowq(redis_url=redis_url), auth=lowq_web.BasicAuth(USERS)),
            base_url="http://127.0.0.1",
        )
        for _ in range(2)
    ]


@pytest.mark.usefixtures("long_pauses")
def test_a_guesser_waits_at_all_of_them(redis_url: str, app: lowq.Lowq) -> None:
    one, other = dashboards(redis_url)
    assert record_failure(app, "testclient", "ann", 900) == 1
    for client in (one, other):
        for password in ("wrong", "s3cret"):
            answer = client.get("/", auth=("ann", password))
            assert answer.status_code == 429
            assert 1 <= int(answer.headers["retry-after"]) <= NEVER
    elsewhere = TestClient(one.app, base_url="http://127.0.0.1", client=("192.0.2.7", 5))
    assert elsewhere.get("/", auth=("ann", "s3cret")).status_code == 200
    assert record_failure(app, "testclient", "ann", 900) == 2, "what is refused is not counted"


def test_a_failure_at_one_counts_at_the_other(redis_url: str, app: lowq.Lowq, caplog: pytest.LogCaptureFixture) -> None:
    one, other = dashboards(redis_url)
    assert one.get("/", auth=("ann", "wrong")).status_code == 401
    until(lambda: other.get("/", auth=("ann", "wrong")).status_code == 401, "the end of the pause")
    assert "2 in a row" in caplog.text
    found = find_failures(app, "testclient", "ann")
    assert found is not None
    assert found.count == 2


@pytest.mark.usefixtures("long_pauses")
def test_a_password_that_one_of_them_remembers_is_refused_while_another_is_guessed_at(
    redis_url: str, app: lowq.Lowq
) -> None:
    one, other = dashboards(redis_url)
    assert other.get("/", auth=("ann", "s3cret")).status_code == 200
    record_failure(app, "testclient", "ann", 900)
    fresh = TestClient(other.app, base_url="http://127.0.0.1")
    assert fresh.get("/", auth=("ann", "s3cret")).status_code == 429
    assert one.get("/", auth=("ann", "s3cret")).status_code == 429


def test_a_browser_that_has_logged_in_asks_redis_for_no_failures(
    redis_url: str, app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, _ = dashboards(redis_url)
    for _ in range(2):  # is given the cookie, and shows it
        assert client.get("/", auth=("ann", "s3cret")).status_code == 200

    def asked(*_args: object) -> None:
        raise AssertionError("Redis was asked")

    monkeypatch.setattr(logins, "find_failures", asked)
    for path in ("/", "/queues/Orders", "/api/v1/stats"):
        assert client.get(path, auth=("ann", "s3cret")).status_code == 200


@pytest.mark.usefixtures("long_pauses")
def test_while_redis_is_away_each_counts_alone(redis_url: str, app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_args: object) -> int:
        raise lowq.RedisUnavailable("Redis does not answer")

    monkeypatch.setattr(logins, "find_failures", away)
    monkeypatch.setattr(logins, "record_failure", away)
    one, other = dashboards(redis_url)
    assert one.get("/", auth=("ann", "wrong")).status_code == 401
    assert one.get("/", auth=("ann", "s3cret")).status_code == 429
    assert other.get("/", auth=("ann", "s3cret")).status_code == 200


@pytest.mark.usefixtures("long_pauses")
def test_what_fails_elsewhere_while_a_login_waits_its_turn_counts(redis_url: str, app: lowq.Lowq) -> None:
    auth = lowq_web.BasicAuth(USERS).shared(app)
    attempt = Attempt("ann", "s3cret", "192.0.2.1", "")
    assert auth.recall(attempt) is None
    record_failure(app, "192.0.2.1", "ann", 900)
    with pytest.raises(HTTPException) as refused:
        auth.verify(attempt)
    assert refused.value.status_code == 429
