"""The file of users: who is in it, what a login costs, what is wrong with it, and that it may change."""

import base64
import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from starlette.exceptions import HTTPException
from starlette.testclient import TestClient

import lowq
import lowq_web
from lowq.admin.passwords import PasswordHash
from lowq_web import passwords
from lowq_web.users import UserFile
from tests.rows import case
from tests.waiting import until
from tests.web.conftest import OWN, Open
from tests.web.served import connected, served

#: Cheap ones.
ANN, BOB = (f"{PasswordHash.of(password, log_n=4, r=1, p=1)}" for password in ("s3cret", "other"))


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
    monkeypatch.setenv("LOWQ_WEB_USERS", str(users))
    return browse("https://dash.example.com")


Counted = list[tuple[int, int, int]]


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


def test_users_of_the_file_may_what_their_role_says(client: TestClient, app: lowq.Lowq) -> None:
    app.register("Orders", 1)
    assert client.get("/").status_code == 401
    assert client.get("/", auth=("ann", "s3cret")).status_code == 200
    assert client.post("/queues/Orders/pause", auth=("ann", "s3cret"), headers=OWN).status_code == 303
    assert client.get("/", auth=("bob", "other")).status_code == 200
    assert client.post("/queues/Orders/resume", auth=("bob", "other"), headers=OWN).status_code == 403


@pytest.mark.parametrize(
    ("name", "password"), [("ann", "wrong"), ("ann", "other"), ("eve", "s3cret"), ("", ""), ("ann\0", "s3cret")]
)
def test_a_wrong_login_costs_the_same_whether_the_user_exists_or_not(
    client: TestClient, scrypts: Counted, name: str, password: str
) -> None:
    assert client.get("/", auth=(name, password)).status_code == 401
    assert scrypts == [(16, 1, 1)]


def test_a_right_password_is_hashed_once(client: TestClient, scrypts: Counted) -> None:
    for _ in range(5):
        assert client.get("/", auth=("ann", "s3cret")).status_code == 200
    assert len(scrypts) == 1


@pytest.mark.usefixtures("long_pauses")
def test_a_paused_login_is_not_hashed_nor_looked_up(client: TestClient, scrypts: Counted) -> None:
    assert client.get("/", auth=("ann", "s3cret")).status_code == 200  # remembered from now on
    other = TestClient(client.app, base_url="https://dash.example.com")
    assert other.get("/", auth=("ann", "wrong")).status_code == 401
    scrypts.clear()
    fresh = TestClient(client.app, base_url="https://dash.example.com")
    for password in ("s3cret", "wrong"):
        assert fresh.get("/", auth=("ann", password)).status_code == 429
    assert scrypts == []


def test_of_guesses_that_come_together_one_is_looked_at(users: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    auth = lowq_web.BasicAuth(file=str(users), clock=lambda: 0.0)
    attempts = [passwords.Attempt("ann", f"guess-{number}", "192.0.2.1", "") for number in range(10)]
    looked_at: list[str] = []
    let_go = threading.Event()
    fits = PasswordHash.fits

    def slow(self: PasswordHash, password: str) -> bool:
        looked_at.append(password)
        assert let_go.wait(60)
        return fits(self, password)

    monkeypatch.setattr(PasswordHash, "fits", slow)
    refused: list[int] = []

    def guess(attempt: passwords.Attempt) -> None:
        try:
            assert auth.verify(attempt) is None
        except HTTPException as error:
            refused.append(error.status_code)

    threads = [threading.Thread(target=guess, args=(attempt,)) for attempt in attempts]
    for thread in threads:
        thread.start()
    until(lambda: looked_at, "one that is looked at")
    let_go.set()
    for thread in threads:
        thread.join()
    assert (len(looked_at), refused) == (1, [429] * 9)


def test_many_names_from_one_address_keep_nobody_else_waiting(
    browse: Open, users: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    auth = lowq_web.BasicAuth(file=str(users))
    let_go, looked_at = threading.Event(), threading.Event()
    fits = PasswordHash.fits

    def slow(self: PasswordHash, password: str) -> bool:
        looked_at.set()
        assert let_go.wait(60)
        return fits(self, password)

    monkeypatch.setattr(PasswordHash, "fits", slow)
    with served(browse(auth=auth, no_auth=False).app) as address:

        def status(name: str) -> int:
            given = {"authorization": "Basic " + base64.b64encode(f"{name}:x".encode()).decode()}
            with connected(address) as connection:
                connection.request("GET", "/api/v1/queues", headers=given)
                return connection.getresponse().status

        with ThreadPoolExecutor(20) as pool:
            guesses = [pool.submit(status, f"name-{number}") for number in range(20)]
            assert looked_at.wait(60)
            until(lambda: sum(guess.done() for guess in guesses) == 20 - passwords.WAITING, "those that are refused")
            assert {guess.result() for guess in guesses if guess.done()} == {429}
            with auth.waiting(passwords.Attempt("ann", "s3cret", "192.0.2.1", "")):
                pass  # from elsewhere there is room
            let_go.set()
            assert sorted(guess.result() for guess in guesses) == [401] * passwords.WAITING + [429] * 12
    assert not auth._waiting


def test_the_file_is_read_again_when_it_changes(client: TestClient, users: Path, app: lowq.Lowq) -> None:
    app.register("Orders", 1)
    for _ in range(2):  # known to the browser, too
        assert client.get("/", auth=("ann", "s3cret")).status_code == 200
    write(users, f"ann:{BOB}:admin", f"carl:{ANN}:read")
    assert client.get("/", auth=("carl", "s3cret")).status_code == 200
    assert client.get("/", auth=("ann", "other")).status_code == 200
    assert client.get("/", auth=("ann", "s3cret")).status_code == 401
    write(users, f"ann:{BOB}:read", f"carl:{ANN}:read")
    client.cookies.clear()
    other = TestClient(client.app, base_url="https://dash.example.com", client=("198.51.100.1", 5))
    assert other.post("/queues/Orders/pause", auth=("ann", "other"), headers=OWN).status_code == 403
    write(users, "")
    assert other.get("/", auth=("ann", "other")).status_code == 401


@pytest.mark.parametrize("what", ["gone", "a folder", "too large"])
def test_when_it_can_not_be_read_the_users_stay_and_the_log_says_so_once(
    client: TestClient, users: Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    users.unlink()
    if what == "a folder":
        users.mkdir()
    elif what == "too large":
        users.write_bytes(b"#" * (2**20 + 1))
    for _ in range(3):
        assert client.get("/", auth=("ann", "s3cret")).status_code == 200
    lines = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(lines) == 1
    assert str(users) in lines[0]
    if what == "gone":
        write(users, f"bob:{BOB}")
        assert client.get("/", auth=("ann", "s3cret")).status_code == 401


SECRET = "c2FsdHNhbHRzYWx0c2FsdA=="


def test_a_bad_line_is_left_out_and_named_by_its_number_alone(users: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows: list[tuple[str | bytes, str]] = [
        (f"scrypt$4$1$1${SECRET}${SECRET}", "name:hash"),
        (f"eve:scrypt$4$1$1${SECRET}${SECRET}:admin:more", "name:hash"),
        (f"eve:scrypt$4$1$1${SECRET}${SECRET}:boss", "role"),
        (f"eve:scrypt$4$1$1${SECRET}", "form"),
        (f"eve:scrypt$30$8$1${SECRET}${SECRET}", "MiB"),
        (f"eve:scrypt$4$1$0${SECRET}${SECRET}", "MiB"),
        (f"eve:scrypt$4$1$99${SECRET}${SECRET}", "MiB"),
        (f"eve:scrypt$4$1$1$====${SECRET}", "base64"),
        (f"eve:scrypt$4$1$1${SECRET}$YWJj", "short"),
        (f"eve:$2b$12${SECRET}", "form"),
        (f"eve:{SECRET}", "form"),  # a password in clear
        (f":scrypt$4$1$1${SECRET}${SECRET}", "name"),
        (f"e\x1bve:scrypt$4$1$1${SECRET}${SECRET}", "name"),
        (b"\xff\xfe:" + SECRET.encode(), "UTF-8"),
        (f"ann:scrypt$4$1$1${SECRET}${SECRET}:admin", "earlier"),
    ]
    for line, why in rows:
        with case(line, why):
            caplog.clear()
            write(users, f"ann:{ANN}:admin", line, f"bob:{BOB}:read")
            found = UserFile(str(users))
            assert found.check("ann", "s3cret") == lowq_web.User("ann", "admin")
            assert found.check("bob", "other") == lowq_web.User("bob", "read")
            assert found.check("eve", "s3cret") is None
            (record,) = caplog.records
            assert record.getMessage().startswith(f"line 2 of {users} is left out: ")
            assert why in record.getMessage()
            assert SECRET[:8] not in caplog.text


def test_permissions_that_show_it_to_others_are_warned_of(users: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows: list[tuple[int, bool]] = [(0o600, False), (0o640, False), (0o644, True), (0o660, True)]
    for mode, warned in rows:
        with case(mode, warned):
            caplog.clear()
            users.chmod(mode)
            UserFile(str(users))
            assert ("chmod 600" in caplog.text) is warned


def test_what_makes_no_sense_is_refused_at_the_start(
    browse: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOWQ_WEB_USERS", str(tmp_path / "none"))
    with pytest.raises(lowq.ConfigError, match=r"LOWQ_WEB_USERS.*none"):
        browse()
    empty = write(tmp_path / "empty", "# nobody", "nonsense")
    monkeypatch.setenv("LOWQ_WEB_USERS", str(empty))
    with pytest.raises(lowq.ConfigError, match=r"has no user.*web-user"):
        browse()
    monkeypatch.setenv("LOWQ_WEB_USER", "ann")
    monkeypatch.setenv("LOWQ_WEB_PASSWORD", "s3cret")
    with pytest.raises(lowq.ConfigError, match="leave"):
        browse()
    for arguments in ({}, {"users": {"ann": ("x", "admin")}, "file": str(empty)}):
        with pytest.raises(lowq.ConfigError, match="one of both"):
            lowq_web.BasicAuth(**arguments)  # type: ignore[arg-type]


def test_what_is_remembered_of_right_passwords_is_bounded(users: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passwords, "REMEMBERED", 3)
    auth = lowq_web.BasicAuth({f"user-{number}": ("x", "read") for number in range(10)})
    for number in range(10):
        assert auth.verify(passwords.Attempt(f"user-{number}", "x", "192.0.2.1", ""))
    assert len(auth._right) == 3
    assert "x" not in repr(passwords.Attempt("ann", "x", "192.0.2.1", "")).replace("Attempt", "")


def test_hashes_differ_for_equal_passwords_and_show_nothing() -> None:
    one, two = (PasswordHash.of("s3cret", log_n=4, r=1, p=1) for _ in range(2))
    assert str(one) != str(two)
    assert str(one) not in repr(one)
    for found in (one, two, PasswordHash.parse(str(one))):
        assert found.fits("s3cret")
        assert not found.fits("s3cre")
    assert PasswordHash.of("\udcff", log_n=4, r=1, p=1).fits("\udcff")
