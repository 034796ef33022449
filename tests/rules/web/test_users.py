"""Logins: users of the settings and of a file, what a guess costs, what is remembered, and that the file may change."""

import base64
import hashlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from starlette.exceptions import HTTPException
from starlette.testclient import TestClient

import lowq
import lowq_web
from lowq.operate.logins import PasswordHash
from lowq_web import logins, passwords
from lowq_web.security import TOKEN
from tests.rows import case
from tests.rules.web.conftest import OWN, Open
from tests.waiting import PATIENCE, until

USERS: Any = {"ann": ("s3cret", "admin"), "bob": ("other", "read")}
AT = "https://dash.example.com"
#: Cheap ones.
ANN, BOB = (f"{PasswordHash.of(password, log_n=4, r=1, p=1)}" for password in ("s3cret", "other"))
Counted = list[tuple[int, int, int]]


def write(path: Path, *lines: str | bytes) -> Path:
    """The file anew, as an editor replaces it."""
    fresh = path.with_suffix(".new")
    fresh.write_bytes(b"".join((line if isinstance(line, bytes) else line.encode()) + b"\n" for line in lines))
    fresh.chmod(0o600)
    fresh.replace(path)
    return path


@pytest.fixture
def users(tmp_path: Path) -> Path:
    return write(tmp_path / "users", "# who may", "", f"ann:{ANN}:admin", f"bob:{BOB}")


@pytest.fixture
def client(browse: Open, users: Path, monkeypatch: pytest.MonkeyPatch) -> TestClient:
    """Asks for the users of the file."""
    monkeypatch.setenv("LOWQ_WEB_USERS", str(users))
    return browse(AT)


@pytest.fixture
def scrypts(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """What each hash has cost, as they are computed."""
    found: Counted = []
    scrypt = hashlib.scrypt

    def counted(password: bytes, **options: Any) -> bytes:
        found.append((options["n"], options["r"], options["p"]))
        return scrypt(password, **options)

    monkeypatch.setattr(hashlib, "scrypt", counted)
    return found


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def protected(browse: Open, clock: Clock) -> TestClient:
    """Asks for the users of the settings, by a clock of the test's."""
    return browse(AT, auth=lowq_web.BasicAuth(USERS, clock=clock))


def other(client: TestClient, address: str = "testclient") -> TestClient:
    """Another browser."""
    return TestClient(client.app, base_url=AT, client=(address, 5))


def status(client: TestClient, name: str, password: str, **headers: str) -> int:
    return client.get("/", auth=(name, password), headers=headers).status_code


class TestWho:
    @pytest.mark.parametrize("source", ["file", "pairs"])
    def test_users_may_what_their_role_says(
        self, browse: Open, app: lowq.Lowq, users: Path, monkeypatch: pytest.MonkeyPatch, source: str
    ) -> None:
        of_ann = "s3cret" if source == "file" else "s3:cret"
        found = {"LOWQ_WEB_USERS": str(users)} if source == "file" else {
            "LOWQ_WEB_USER": "ann", "LOWQ_WEB_PASSWORD": of_ann, "LOWQ_WEB_READ_USER": "bob",
            "LOWQ_WEB_READ_PASSWORD": "other",
        }  # fmt: skip
        for name, value in found.items():
            monkeypatch.setenv(name, value)
        app.register("Orders", 1)
        client = browse(AT)
        for name, password, may_act in (("ann", of_ann, True), ("bob", "other", False)):
            page = client.get("/", auth=(name, password))
            assert (page.status_code, name in page.text) == (200, True)
            done = client.post("/queues/Orders/pause", auth=(name, password), headers=OWN)
            assert done.status_code == (303 if may_act else 403)

    def test_what_is_no_login_is_refused(self, protected: TestClient) -> None:
        given = [base64.b64encode(login).decode() for login in (b"ann", b"ann:other", b":", b"\xff:\xfe")]
        for header in ("", "Basic", "Basic !!!", "Bearer abc", *(f"Basic {login}" for login in given)):
            with case(header):
                answer = other(protected, f"192.0.2.{len(header)}").get("/", headers={"authorization": header})
                assert (answer.status_code, answer.headers["www-authenticate"][:6]) == (401, "Basic ")

    def test_settings_that_make_no_sense_are_refused_at_the_start(
        self, browse: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        empty = write(tmp_path / "empty", "# nobody", "nonsense")
        rows: list[tuple[dict[str, str], str]] = [
            ({"LOWQ_WEB_USERS": str(tmp_path / "none")}, r"LOWQ_WEB_USERS.*none"),
            ({"LOWQ_WEB_USERS": str(empty)}, r"has no user.*web-user"),
            ({"LOWQ_WEB_USERS": str(empty), "LOWQ_WEB_USER": "ann", "LOWQ_WEB_PASSWORD": "x"}, "leave"),
            ({"LOWQ_WEB_USER": "ann"}, "LOWQ_WEB_PASSWORD"),
        ]
        for settings, why in rows:
            with case(settings), monkeypatch.context() as patch:
                for name, value in settings.items():
                    patch.setenv(name, value)
                with pytest.raises(lowq.ConfigError, match=why):
                    browse()
        users: list[Any] = [{}, {"": ("x", "admin")}, {"ann": ("", "admin")}, {"ann": ("x", "boss")}]
        for arguments in ({}, {"users": USERS, "file": str(empty)}, *({"users": found} for found in users)):
            with case(arguments), pytest.raises(lowq.ConfigError):
                lowq_web.BasicAuth(**arguments)


class TestGuesses:
    """Of passwords: they cost time, and are logged."""

    def test_each_makes_the_next_one_wait_longer(self, protected: TestClient, clock: Clock) -> None:
        def pauses(moments: int) -> list[float]:
            """Between the guesses that are looked at, of somebody who tries without end."""
            looked_at = []
            for _ in range(moments):
                answer = protected.get("/", auth=("ann", "wrong"))
                if answer.status_code == 401:
                    looked_at.append(clock.now)
                else:
                    assert answer.status_code == 429
                    assert 1 <= int(answer.headers["retry-after"]) <= 10
                clock.now += 0.125
            return [after - before for before, after in pairwise(looked_at)]

        assert pauses(400) == [0.25, 0.5, 1, 2, 4, 8, 10, 10, 10]
        assert status(protected, "ann", "s3cret") == 429, "a right one is not looked at either"
        clock.now += 1000
        assert pauses(10) == [0.25, 0.5]

    def test_who_shares_the_address_is_not_shut_out(self, protected: TestClient, clock: Clock) -> None:
        for _ in range(2):  # is given the cookie, and shows it
            assert status(protected, "ann", "s3cret") == 200
        guesser = other(protected)
        for _ in range(20):
            assert status(guesser, "ann", "wrong") in (401, 429)
        assert status(guesser, "bob", "other") == 200
        assert status(protected, "ann", "s3cret") == 200
        assert status(other(protected), "ann", "s3cret") == 429
        clock.now += 10
        assert status(other(protected), "ann", "s3cret") == 200

    def test_a_cookie_helps_only_who_has_logged_in_with_it_and_does_not_guess(self, protected: TestClient) -> None:
        own = {"cookie": f"{TOKEN}={'t' * 32}"}
        assert [status(protected, "ann", "wrong", **own) for _ in range(2)] == [401, 429]
        assert status(protected, "bob", "other", **own) == 200
        assert status(protected, "ann", "wrong", **own) == 429, "nor one of another user's login"
        assert [status(protected, "bob", "wrong", **own) for _ in range(2)] == [401, 429], "known no more"

    def test_the_log_says_who_and_from_where_and_no_password(
        self, protected: TestClient, caplog: pytest.LogCaptureFixture
    ) -> None:
        for user in ("ann", "eve\nWARNING all is well", "x" * 5000):
            status(protected, user, "hunter2")
        protected.get("/")  # asks for nothing yet
        lines = [record.getMessage() for record in caplog.records if record.name == "lowq_web.logins"]
        assert lines[0] == "a login as 'ann' from testclient failed, 1 in a row"
        assert len(lines) == 3
        assert all("\n" not in line and len(line) < 200 for line in lines)
        assert "hunter2" not in caplog.text
        assert "hunter2" not in repr(passwords.Attempt("ann", "hunter2", "192.0.2.1", ""))

    def test_what_is_remembered_is_bounded(self, protected: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(logins, "REMEMBERED", 3)
        browsers = [other(protected) for _ in range(4)]
        for browser in browsers:
            for _ in range(2):
                assert status(browser, "bob", "other") == 200
        for name in ("bob", "u1", "u2"):
            assert status(protected, name, "wrong") == 401
        assert [status(browser, "bob", "other") for browser in browsers] == [429, 200, 200, 200]
        assert status(protected, "u3", "wrong") == 401
        assert [status(protected, name, "wrong") for name in ("u3", "bob")] == [429, 401]

    def test_addresses_that_one_may_choose_from_are_one(self) -> None:
        for one, another, same in (
            ("2001:db8::1", "2001:db8::ffff:1%eth0", True), ("2001:db8:0:1::1", "2001:db8::1", False),
            ("::ffff:192.0.2.1", "::ffff:192.0.2.2", False), ("192.0.2.1", "192.0.2.2", False),
        ):  # fmt: skip
            assert (logins.network_of(one) == logins.network_of(another)) is same, (one, another)


class TestCost:
    """Of a hash, which takes long on purpose."""

    def test_a_wrong_login_costs_the_same_whether_the_user_exists_or_not(
        self, client: TestClient, scrypts: Counted
    ) -> None:
        for name, password in (("ann", "wrong"), ("bob", "s3cret"), ("eve", "s3cret"), ("", ""), ("ann\0", "s3cret")):
            with case(name, password):
                scrypts.clear()
                assert status(client, name, password) == 401
                assert scrypts == [(16, 1, 1)]

    @pytest.mark.usefixtures("long_pauses")
    def test_a_right_password_is_hashed_once_and_a_paused_login_neither_hashed_nor_looked_up(
        self, client: TestClient, scrypts: Counted
    ) -> None:
        for _ in range(5):
            assert status(client, "ann", "s3cret") == 200
        assert len(scrypts) == 1
        assert status(other(client), "ann", "wrong") == 401
        assert len(scrypts) == 2
        for password in ("s3cret", "wrong"):
            assert status(other(client), "ann", password) == 429
        assert len(scrypts) == 2

    def test_so_many_right_passwords_are_remembered(
        self, client: TestClient, scrypts: Counted, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(passwords, "REMEMBERED", 1)
        for name, password, hashes in (
            ("ann", "s3cret", 1),
            ("bob", "other", 2),
            ("bob", "other", 2),
            ("ann", "s3cret", 3),
        ):
            assert (status(other(client), name, password), len(scrypts)) == (200, hashes)

    def test_of_guesses_that_come_together_one_is_looked_at(self, users: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        looked_at, let_go, fits = list[str](), threading.Event(), PasswordHash.fits

        def held(found: PasswordHash, password: str) -> bool:
            looked_at.append(password)
            assert let_go.wait(PATIENCE)
            return fits(found, password)

        monkeypatch.setattr(PasswordHash, "fits", held)
        auth = lowq_web.BasicAuth(file=str(users), clock=lambda: 0.0)

        def guess(number: int) -> int:
            try:
                return 200 if auth.verify(passwords.Attempt("ann", f"guess-{number}", "192.0.2.1", "")) else 401
            except HTTPException as error:
                return error.status_code

        with ThreadPoolExecutor(10) as pool:
            guesses = [pool.submit(guess, number) for number in range(10)]
            until(lambda: looked_at, "one that is looked at")
            let_go.set()
        assert sorted(each.result() for each in guesses) == [401] + [429] * 9
        assert len(looked_at) == 1

    def test_many_names_from_one_address_keep_nobody_else_waiting(self) -> None:
        auth = lowq_web.BasicAuth(USERS)
        attempts = [passwords.Attempt(f"name-{n}", "x", "192.0.2.1", "") for n in range(passwords.WAITING)]
        with ExitStack() as stack:
            for attempt in attempts:
                stack.enter_context(auth.waiting(attempt))
            with pytest.raises(HTTPException) as refused, auth.waiting(attempts[0]):
                pass
            assert refused.value.status_code == 429
            with auth.waiting(passwords.Attempt("ann", "x", "192.0.2.2", "")):
                pass  # from elsewhere there is room
        with auth.waiting(attempts[0]):
            pass


SECRET = "c2FsdHNhbHRzYWx0c2FsdA=="


class TestFile:
    def test_it_is_read_again_when_it_changes(self, client: TestClient, users: Path, app: lowq.Lowq) -> None:
        app.register("Orders", 1)
        for _ in range(2):  # known to the browser, too
            assert status(client, "ann", "s3cret") == 200
        write(users, f"ann:{BOB}:admin", f"carl:{ANN}:read")
        for name, password, expected in (("carl", "s3cret", 200), ("ann", "other", 200), ("ann", "s3cret", 401)):
            assert status(client, name, password) == expected
        write(users, f"ann:{BOB}:read", f"carl:{ANN}:read")
        elsewhere = other(client, "198.51.100.1")
        pause = elsewhere.post("/queues/Orders/pause", auth=("ann", "other"), headers=OWN)
        assert pause.status_code == 403
        write(users, "")
        assert status(elsewhere, "ann", "other") == 401

    def test_when_it_can_not_be_read_the_users_stay_and_the_log_says_so_once(
        self, client: TestClient, users: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        ways: dict[str, Callable[[], object]] = {
            "too large": lambda: users.write_bytes(b"#" * (2**20 + 1)),
            "gone": users.unlink,
            "a folder": users.mkdir,
        }
        for what, spoil in ways.items():
            with case(what):
                caplog.clear()
                spoil()
                assert [status(client, "ann", "s3cret") for _ in range(3)] == [200] * 3
                (line,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
                assert str(users) in line
        users.rmdir()
        write(users, f"bob:{BOB}")
        assert status(client, "ann", "s3cret") == 401

    def test_a_bad_line_is_left_out_and_named_by_its_number_alone(
        self, users: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        rows: list[tuple[str | bytes, str]] = [
            (f"eve:scrypt$4$1$1${SECRET}${SECRET}:admin:more", "name:hash"),
            (f"eve:scrypt$4$1$1${SECRET}${SECRET}:boss", "role"),
            (f"eve:scrypt$30$8$1${SECRET}${SECRET}", "MiB"), (f"eve:scrypt$4$1$0${SECRET}${SECRET}", "MiB"),
            (f"eve:scrypt$4$1$1$====${SECRET}", "base64"), (f"eve:scrypt$4$1$1${SECRET}$YWJj", "short"),
            (f"eve:{SECRET}", "form"),  # a password in clear
            (f"e\x1bve:scrypt$4$1$1${SECRET}${SECRET}", "name"), (b"\xff\xfe:" + SECRET.encode(), "UTF-8"),
            (f"ann:scrypt$4$1$1${SECRET}${SECRET}:admin", "earlier"),
        ]  # fmt: skip
        for line, why in rows:
            with case(line, why):
                caplog.clear()
                auth = lowq_web.BasicAuth(file=str(write(users, f"ann:{ANN}:admin", line, f"bob:{BOB}:read")))
                logins = (("ann", "s3cret"), ("bob", "other"), ("eve", "s3cret"))
                found = [auth.verify(passwords.Attempt(*login, "192.0.2.1", "")) for login in logins]
                assert found == [lowq_web.User("ann", "admin"), lowq_web.User("bob", "read"), None]
                (said,) = [record.getMessage() for record in caplog.records if record.name == "lowq_web.users"]
                assert said.startswith(f"line 2 of {users} is left out: ")
                assert (why in said, SECRET[:8] in caplog.text) == (True, False)

    def test_permissions_that_show_it_to_others_are_warned_of(
        self, users: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        for mode, warned in ((0o600, False), (0o640, False), (0o644, True), (0o660, True)):
            with case(mode):
                caplog.clear()
                users.chmod(mode)
                lowq_web.BasicAuth(file=str(users))
                assert ("chmod 600" in caplog.text) is warned

    def test_hashes_differ_for_equal_passwords_and_show_nothing(self) -> None:
        one, two = (PasswordHash.of("s3cret", log_n=4, r=1, p=1) for _ in range(2))
        assert str(one) != str(two)
        assert str(one) not in repr(one)
        for found in (one, two, PasswordHash.parse(str(one))):
            assert (found.fits("s3cret"), found.fits("s3cre")) == (True, False)
