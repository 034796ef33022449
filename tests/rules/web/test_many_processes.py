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
from tests.rows import case
from tests.rules.web.confirming import confirm, form_on
from tests.rules.web.conftest import OWN
from tests.rules.web.served import connected, served
from tests.rules.web.shown import parse
from tests.waiting import until

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


def ended(browser: Any, answer: Any) -> str:
    """The page of the task that was started, when it has ended."""
    address = answer.headers["location"]
    until(lambda: 'data-refresh="0"' in browser.get(address).text, "end of the task")
    return parse(browser.get(address).text).text


def test_a_question_of_one_is_answered_on_the_other_as_it_was_shown(
    browser: Any, app: lowq.Lowq, redis_url: str
) -> None:
    for asked_by_one_that_is_gone in (False, True):
        with case(asked_by_one_that_is_gone):
            if asked_by_one_that_is_gone:
                command = [sys.executable, "-c", ASKING, redis_url]
                page = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            else:
                page = browser.post("/queues/Orders/act", data={"do": "delete all"}).text
            app.queue("Orders").push({"id": "new", "delay": 3600.0})
            shown = ended(browser, confirm(browser, "/queues/Orders/act", page))
            assert "left alone" not in shown, "each job was known"
            assert [job.id for job in app.queue("Orders").jobs()] == ["new"]
            app.queue("Orders").delete("new")
            app.queue("Orders").push({"id": f"job-{n}", "delay": 3600.0} for n in range(40))


def test_many_jobs_of_a_question_stay_with_its_process(
    browser: Any, app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere only the time bounds the action, and the page says so."""
    monkeypatch.setattr(confirmations, "MAX_SHARED", 39)
    page = browser.post("/queues/Orders/act", data={"do": "delete all"}).text
    app.queue("Orders").push({"id": "new", "delay": 3600.0})
    assert "left alone" in ended(browser, confirm(browser, "/queues/Orders/act", page))
    assert "new" in [job.id for job in app.queue("Orders").jobs()]


def test_what_somebody_has_written_over_a_snapshot_counts_for_nothing(browser: Any, app: lowq.Lowq) -> None:
    key = "lowq:v1:confirmations"
    for forged in (b"", b"nonsense", b'{"at": 1, "total": 40, "salt": ""}\n', b"\xff" * 100):
        with case(forged):
            page = browser.post("/queues/Orders/act", data={"do": "delete all"}).text
            slot, _, token = dict(form_on(page))["snapshot"].partition("-")
            app.client.command("HSET", key, slot, token.encode() + b" " + forged, key=key)
            answer = confirm(browser, "/queues/Orders/act", page)
            # By its time alone; or it is not what the page has shown, and nothing is done.
            if answer.status_code == 303:
                ended(browser, answer)
                app.queue("Orders").push({"id": f"job-{n}", "delay": 3600.0} for n in range(40))
            else:
                assert (answer.status_code, app.queue("Orders").stats().length) == (400, 40)


def test_a_notice_that_somebody_has_written_is_only_text(browser: Any, app: lowq.Lowq) -> None:
    key = "lowq:v1:notices"
    for forged in ("", "null", "[]", '{"text": 5}', json.dumps({"text": "<script>alert(1)</script>"})):
        with case(forged):
            address = browser.post("/queues/Orders/pause").headers["location"]
            slot, _, token = address.partition("said=")[2].partition("-")
            app.client.command("HSET", key, slot, f"{token} {forged}", key=key)
            page = browser.get(address)
            assert (page.status_code, "<script>alert" in page.text) == (200, False)


def test_without_redis_only_the_notice_is_missing(
    browser: Any, app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_args: object) -> str:
        raise lowq.RedisUnavailable("Redis does not answer")

    for verb in ("leave", "find", "take"):
        monkeypatch.setattr(handover.Handover, verb, away, raising=False)
    location = browser.post("/queues/Orders/pause").headers["location"]
    assert "said=" not in location
    assert app.queue("Orders").stats().paused
    assert browser.get(f"{location}?said=1-{'x' * 16}").status_code == 200


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


@pytest.fixture
def pair(redis_url: str) -> Iterator[list[TestClient]]:
    """Two processes that ask for a password."""
    apps = [lowq.Lowq(redis_url=redis_url) for _ in range(2)]
    made = [lowq_web.create_app(app, auth=lowq_web.BasicAuth(USERS)) for app in apps]
    yield [TestClient(application, base_url="http://127.0.0.1") for application in made]
    for app in apps:
        app.close()


def status(client: TestClient, password: str = "s3cret", path: str = "/") -> int:
    return client.get(path, auth=("ann", password)).status_code


def another(client: TestClient, address: str = "testclient") -> TestClient:
    """Another browser at the same process."""
    return TestClient(client.app, base_url="http://127.0.0.1", client=(address, 5))


@pytest.mark.usefixtures("long_pauses")
def test_a_guesser_waits_at_all_of_them(pair: list[TestClient], app: lowq.Lowq) -> None:
    one, other = pair
    assert status(other) == 200, "from now on it remembers the password, and this browser"
    assert record_failure(app, "testclient", "ann", 900) == 1
    for client in (another(one), another(other)):
        assert [status(client, password) for password in ("wrong", "s3cret")] == [429, 429]
    assert status(another(one, "192.0.2.7")) == 200
    assert record_failure(app, "testclient", "ann", 900) == 2, "what is refused is not counted"


def test_a_failure_at_one_counts_at_the_other(
    pair: list[TestClient], app: lowq.Lowq, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = pair
    assert status(one, "wrong") == 401
    until(lambda: status(other, "wrong") == 401, "the end of the pause")
    assert "2 in a row" in caplog.text
    found = find_failures(app, "testclient", "ann")
    assert found is not None
    assert found.count == 2


def test_a_browser_that_has_logged_in_asks_redis_for_no_failures(
    pair: list[TestClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, _ = pair
    for _ in range(2):  # is given the cookie, and shows it
        assert status(client) == 200

    def asked(*_args: object) -> None:
        raise AssertionError("Redis was asked")

    monkeypatch.setattr(logins, "find_failures", asked)
    assert [status(client, path=path) for path in ("/", "/tasks", "/api/v1/stats")] == [200] * 3


@pytest.mark.usefixtures("long_pauses")
def test_while_redis_is_away_each_counts_alone(pair: list[TestClient], monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_args: object) -> int:
        raise lowq.RedisUnavailable("Redis does not answer")

    monkeypatch.setattr(logins, "find_failures", away)
    monkeypatch.setattr(logins, "record_failure", away)
    one, other = pair
    assert (status(one, "wrong"), status(one), status(other)) == (401, 429, 200)


@pytest.mark.usefixtures("long_pauses")
def test_what_fails_elsewhere_while_a_login_waits_its_turn_counts(app: lowq.Lowq) -> None:
    auth = lowq_web.BasicAuth(USERS).shared(app)
    attempt = Attempt("ann", "s3cret", "192.0.2.1", "")
    assert auth.recall(attempt) is None
    record_failure(app, "192.0.2.1", "ann", 900)
    with pytest.raises(HTTPException) as refused:
        auth.verify(attempt)
    assert refused.value.status_code == 429
