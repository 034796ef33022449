"""Names and passwords: who may what, and what a wrong one costs."""

import base64
import hmac
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio.to_thread
import pytest
from starlette.testclient import TestClient

import lowq
import lowq_web
from lowq_web import auth
from tests.rows import case
from tests.rules.web.conftest import ANN, BOB, OWN, USERS, Open
from tests.rules.web.served import get, served
from tests.waiting import PATIENCE, until

AT = "https://dash.example.com"


@pytest.fixture
def protected(browse: Open) -> TestClient:
    """Asks for a name and a password."""
    return browse(AT, auth=lowq_web.BasicAuth(USERS))


def status(client: TestClient, name: str, password: str) -> int:
    return client.get("/", auth=(name, password)).status_code


class TestWho:
    def test_users_may_what_their_role_says(
        self, browse: Open, app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        of_ann = "s3cret:with colons"
        for name, value in (
            ("USER", "ann"), ("PASSWORD", of_ann), ("READ_USER", "bob"), ("READ_PASSWORD", BOB[1])
        ):  # fmt: skip
            monkeypatch.setenv(f"LOWQ_WEB_{name}", value)
        app.registrations.enter("Orders", 1)
        client = browse(AT)
        for login, may_act in (("ann", of_ann), True), (BOB, False):
            page = client.get("/", auth=login)
            assert (page.status_code, login[0] in page.text) == (200, True)
            done = client.post("/queues/Orders/pause", auth=login, headers=OWN)
            assert done.status_code == (303 if may_act else 403)

    def test_what_is_no_login_is_refused(self, protected: TestClient) -> None:
        logins = (b"ann", b"ann:" + BOB[1].encode(), b":", b"\xff:\xfe", b"ann\0:" + ANN[1].encode())
        given = [base64.b64encode(login).decode() for login in logins]
        for header in ("", "Basic", "Basic !!!", "Bearer abc", *(f"Basic {login}" for login in given)):
            with case(header):
                answer = protected.get("/", headers={"authorization": header})
                assert (answer.status_code, answer.headers["www-authenticate"][:6]) == (401, "Basic ")

    def test_settings_that_make_no_sense_are_refused_at_the_start(
        self, browse: Open, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ann = {"LOWQ_WEB_USER": "ann", "LOWQ_WEB_PASSWORD": ANN[1]}
        rows: list[tuple[dict[str, str], str]] = [
            ({"LOWQ_WEB_USER": "ann"}, "LOWQ_WEB_PASSWORD"),
            ({**ann, "LOWQ_WEB_PASSWORD": "x" * 11}, "LOWQ_WEB_PASSWORD must have 12 characters"),
            ({**ann, "LOWQ_WEB_READ_USER": "bob", "LOWQ_WEB_READ_PASSWORD": "x" * 11}, "LOWQ_WEB_READ_PASSWORD must"),
            ({**ann, "LOWQ_WEB_READ_USER": "ann", "LOWQ_WEB_READ_PASSWORD": "x" * 12}, "different"),
        ]
        for settings, why in rows:
            with case(settings), monkeypatch.context() as patch:
                for name, value in settings.items():
                    patch.setenv(name, value)
                with pytest.raises(lowq.ConfigError, match=why) as refused:
                    browse()
                assert "xxx" not in str(refused.value)
        users: list[Any] = [
            {}, {"": ("x" * 12, "admin")}, {"a:b": ("x" * 12, "admin")}, {"ann": ("x" * 11, "admin")},
            {"ann": ("x" * 12, "boss")},
        ]  # fmt: skip
        for found in users:
            with case(found), pytest.raises(lowq.ConfigError):
                lowq_web.BasicAuth(found)


class TestWrongPassword:
    def test_no_number_of_them_locks_anybody_out(self, protected: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
        """Behind one proxy all have one address."""
        monkeypatch.setattr(auth, "FAILED_DELAY", 0)
        for number in range(150):
            assert status(protected, "ann", f"guess-{number}") == 401
        assert [status(protected, *login) for login in (ANN, BOB)] == [200, 200]

    def test_its_answer_waits_and_no_other_request_does(self, app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch) -> None:
        waited, let_go = list[float](), threading.Event()

        async def held(seconds: float) -> None:
            waited.append(seconds)
            await anyio.to_thread.run_sync(let_go.wait, PATIENCE)

        monkeypatch.setattr(auth, "sleep", held)
        with served(lowq_web.create_app(app, auth=lowq_web.BasicAuth(USERS))) as address, ThreadPoolExecutor(5) as pool:
            guesses = [pool.submit(get, address, "/", PATIENCE, "GET", ("ann", "wrong")) for _ in range(5)]
            until(lambda: len(waited) == len(guesses), "wrong passwords")
            try:
                assert get(address, "/", auth=ANN)[0] == 200
                assert not any(guess.done() for guess in guesses)
            finally:
                let_go.set()
            assert [guess.result()[0] for guess in guesses] == [401] * 5
        assert waited == [auth.FAILED_DELAY] * 5, "a fixed time"

    def test_the_log_says_who_and_from_where_and_no_password(
        self, protected: TestClient, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(auth, "FAILED_DELAY", 0)
        for user in ("ann", "eve\nWARNING all is well", "x" * 5000):
            status(protected, user, "hunter2")
        protected.get("/")  # asks for nothing yet
        lines = [record.getMessage() for record in caplog.records if record.name == "lowq_web.auth"]
        assert lines[0] == "a login as 'ann' from testclient failed"
        assert len(lines) == 3
        assert all("\n" not in line and len(line) < 200 for line in lines)
        assert "hunter2" not in caplog.text

    def test_every_known_name_and_password_is_compared_in_constant_time(
        self, protected: TestClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(auth, "FAILED_DELAY", 0)
        compared: list[tuple[int, int]] = []
        compare = hmac.compare_digest

        def counted(one: bytes, other: bytes) -> bool:
            compared.append((len(one), len(other)))
            return compare(one, other)

        monkeypatch.setattr(hmac, "compare_digest", counted)
        for name, password in (ANN, BOB, ("ann", ""), ("eve", ANN[1]), ("ann", "x" * 5000)):
            with case(name, password):
                compared.clear()
                status(protected, name, password)
                assert compared == [(32, 32)] * 2
