"""A PostgreSQL of the tests' own: free port, own folder, gone with the process that started it.

with PostgresServer() as server:
    psycopg.connect(server.empty_database())
    server.kill()       # SIGKILL
    server.start()      # on the same port, with what was committed
"""

import atexit
import os
import pwd
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import psycopg

from tests.redis_server import free_port
from tests.waiting import PATIENCE


class PostgresUnavailable(Exception):
    """There is no PostgreSQL here, or nobody to run it; the message says what to do."""


def _program(name: str) -> str:
    found = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}")) or [Path(shutil.which(name) or "")]
    if not found[-1].is_file():
        raise PostgresUnavailable(f"no {name}: on Debian or Ubuntu install it with `sudo apt-get install postgresql`")
    return str(found[-1])


class PostgresServer:
    """A cluster on 127.0.0.1, used as a context manager. What was committed survives `kill`, not the machine: nothing
    is flushed to disk. It is run by the user ``postgres`` where the tests are root's, whom PostgreSQL refuses.
    """

    def __init__(self, **options: str | int) -> None:
        self._programs = {name: _program(name) for name in ("initdb", "postgres")}
        self._prefix, self._owner = _unprivileged()
        self.directory = Path(tempfile.mkdtemp(prefix="lowq-postgres-"))
        self._options: dict[str, str | int] = {
            "fsync": "off", "full_page_writes": "off", "max_connections": 50,
            "max_prepared_transactions": 5, "shared_buffers": "16MB", "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "", **options,
        }  # fmt: skip
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://lowq@127.0.0.1:{self.port}/{database}"

    @property
    def log(self) -> str:
        path = self.directory / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def empty_database(self) -> str:
        """The URL of the one database that tests use, emptied: it is always the same, as a new one has 300 files."""
        with psycopg.connect(self.url(), autocommit=True) as connection:
            sessions = "SELECT pid FROM pg_stat_activity WHERE datname = 'lowq'"
            connection.execute(f"SELECT pg_terminate_backend(pid, 10000) FROM ({sessions}) AS open_ones")
            if connection.execute("SELECT 1 FROM pg_database WHERE datname = 'lowq'").fetchone() is None:
                connection.execute("CREATE DATABASE lowq")
        with psycopg.connect(self.url("lowq"), autocommit=True) as connection:
            connection.execute("DROP SCHEMA public CASCADE")
            connection.execute("CREATE SCHEMA public")
        return self.url("lowq")

    def start(self) -> Self:
        """Returns when the server answers. A second start keeps the port and what was committed."""
        data = self.directory / "data"
        if not self.port:
            if self._owner is not None:
                os.chown(self.directory, *self._owner)
            command = [*self._prefix, self._programs["initdb"], "-D", str(data), "-U", "lowq", "-A", "trust", "-N"]
            locale = ["--no-locale", "-E", "UTF8"]
            subprocess.run([*command, *locale], check=True, capture_output=True, cwd="/", timeout=PATIENCE)
        give_up_at = time.monotonic() + PATIENCE
        is_first = not self.port
        while True:
            if is_first:
                self.port = free_port()
            self._launch(data)
            while self._process is not None and self._process.poll() is None:
                try:
                    psycopg.connect(self.url(), connect_timeout=5).close()
                except psycopg.OperationalError:
                    assert time.monotonic() < give_up_at, f"PostgreSQL does not answer:\n{self.log[-2000:]}"
                    time.sleep(0.02)
                else:
                    return self
            # It ended by itself: somebody may have taken the port, or what is left of the last one ends only now.
            assert time.monotonic() < give_up_at, f"PostgreSQL did not start:\n{self.log[-2000:]}"
            time.sleep(0.1)

    def _launch(self, data: Path) -> None:
        settings = [f"--{name}={value}" for name, value in self._options.items()]
        setpriv = shutil.which("setpriv")
        dying = [setpriv, "--pdeathsig", "KILL"] if setpriv else []
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*self._prefix, *dying, self._programs["postgres"], "-D", str(data), "-p", str(self.port), *settings],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", start_new_session=True,
            )  # fmt: skip
        atexit.register(self.kill)

    def kill(self) -> None:
        """SIGKILL: all sessions end with it, and what they had not committed is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
            atexit.unregister(self.kill)

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _unprivileged() -> tuple[list[str], tuple[int, int] | None]:
    """What runs a program as somebody who may run PostgreSQL, and who that is; None: whoever runs the tests."""
    if os.geteuid() != 0:
        return [], None
    try:
        user = pwd.getpwnam("postgres")
    except KeyError:
        raise PostgresUnavailable("the tests are run by root, and there is no user `postgres`") from None
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        raise PostgresUnavailable("the tests are run by root, and there is no setpriv to run PostgreSQL as `postgres`")
    ids = ["--reuid", str(user.pw_uid), "--regid", str(user.pw_gid), "--clear-groups"]
    return [setpriv, *ids], (user.pw_uid, user.pw_gid)
