"""A redis-server of the tests' own: free port, own folder, gone with the process that started it.

    with RedisServer(appendonly="yes") as server:
        client = redis.Redis.from_url(server.url)
        server.kill()       # SIGKILL, as the OOM killer would
        server.start()      # on the same port and folder: what was persisted is there again

Nothing here ever talks to a server that it did not start itself. The variable REDIS_SERVER names the program, when it
is not to be the one on PATH: `REDIS_SERVER=/opt/valkey/bin/valkey-server make test` (tests/debian.py has some).
REDIS_PROTOCOL=3 has all that connect to one by its URL speak RESP3.
"""

import atexit
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from itertools import cycle
from pathlib import Path
from random import SystemRandom
from types import TracebackType
from typing import Self

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.debian import installed
from tests.waiting import PATIENCE

#: Ports below the kernel's ephemeral range: a client that reconnects in a loop to an ephemeral port of this
#: machine may get that very port for its own end, connect to itself, and keep a restarting server from it.
PORTS = range(12_000, 32_000)

# Not the `random` module: pytest-randomly seeds that alike in every test process, and they would all pick the
# same ports.
_random = SystemRandom()


class RedisServerError(Exception):
    """redis-server is missing, or did not start or stop."""


class RedisServer:
    """A redis-server on 127.0.0.1, used as a context manager or by `start` and `close`.

    Options are lines of redis.conf, with `_` for `-`: `RedisServer(appendonly="yes", maxmemory="20mb")`.
    Nothing is persisted unless an option says so. The log is `directory / "redis.log"`; the folder is removed
    at the end unless it was given. Start it in the main thread: on Linux the kernel kills it with the thread
    that started it.
    """

    def __init__(self, directory: Path | None = None, **options: str | int) -> None:
        self._keeps_directory = directory is not None
        self.directory = directory or Path(tempfile.mkdtemp(prefix="lowq-redis-"))
        self.directory.mkdir(parents=True, exist_ok=True)
        self.options: dict[str, str | int] = {"save": "", "appendonly": "no", **options}
        #: Variables of its environment, besides those of this process.
        self.environment: dict[str, str] = {}
        self.port = 0  # chosen at the first start
        self._process: subprocess.Popen[bytes] | None = None
        self._is_paused = False

    @property
    def url(self) -> str:
        password = self.options.get("requirepass")
        protocol = os.environ.get("REDIS_PROTOCOL")
        options = f"?protocol={protocol}" if protocol else ""
        return f"redis://{f':{password}@' if password else ''}127.0.0.1:{self.port}/0{options}"

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RedisServerError("this redis-server is not running: start() it first")
        return self._process.pid

    @property
    def runs(self) -> bool:
        """Whether it was started, and neither stopped nor killed since."""
        return self._process is not None

    @property
    def answers(self) -> bool:
        """Whether it runs, and was not paused."""
        return self.runs and not self._is_paused

    @property
    def log(self) -> str:
        path = self.directory / "redis.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def start(self) -> Self:
        """Returns when the server answers, with its data loaded. A second start keeps the port.

        Raises:
            RedisServerError: redis-server is not installed, or did not start; the message ends with its log.
        """
        if self._process is not None:
            raise RedisServerError("this redis-server is already running")
        give_up_at = time.monotonic() + PATIENCE
        first_start = self.port == 0
        while True:
            if first_start:
                self.port = free_port()
            log_before = len(self.log)
            self._launch()
            if self._answers_before(give_up_at):
                return self
            # It ended by itself. Another process may have taken the port since it was looked at: a first
            # start tries another one; a restart has to wait, as clients know the old one.
            if "Address already in use" not in self.log[log_before:] or time.monotonic() > give_up_at:
                raise RedisServerError(f"redis-server did not start; its log ends with:\n{self.log[-2000:]}")
            time.sleep(0.05)

    def start_loading(self) -> None:
        """As `start`, on a port that was chosen before, and returns while it loads its data."""
        assert self.port
        assert self._process is None
        self._launch()
        give_up_at = time.monotonic() + PATIENCE
        with redis.Redis(port=self.port, retry=Retry(NoBackoff(), 0)) as client:
            while time.monotonic() < give_up_at:
                try:
                    client.ping()
                    break
                except redis.BusyLoadingError:
                    return
                except redis.ConnectionError:  # not there yet
                    time.sleep(0.005)
        self.kill()
        raise RedisServerError(f"redis-server did not load its data for long; its log ends with:\n{self.log[-2000:]}")

    def stop(self) -> None:
        """SIGTERM: an orderly end, persisting what the options say. Does nothing when it is not running."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGCONT)  # a paused process would not see the SIGTERM
        self._process.terminate()
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            log = self.log
            self.kill()
            raise RedisServerError(f"redis-server did not stop; its log ends with:\n{log[-2000:]}") from None
        self._ended()

    def kill(self) -> None:
        """SIGKILL: what is not on disk is lost. Does nothing when it is not running."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._ended()

    def pause(self) -> None:
        """SIGSTOP: connections stay open and nothing answers."""
        self._is_paused = True
        os.kill(self.pid, signal.SIGSTOP)

    def cont(self) -> None:
        """SIGCONT: goes on after `pause`."""
        os.kill(self.pid, signal.SIGCONT)
        self._is_paused = False

    def restart(self) -> None:
        """Stop and start, on the same port and folder."""
        self.stop()
        self.start()

    def close(self) -> None:
        """Kill it and remove its folder, unless that was given."""
        self.kill()
        if not self._keeps_directory:
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

    def _launch(self) -> None:
        config = self.directory / "redis.conf"
        lines: dict[str, object] = {
            "bind": "127.0.0.1",
            "port": self.port,
            "dir": self.directory,
            "logfile": "redis.log",
            **self.options,
        }
        config.write_text("".join(f"{name.replace('_', '-')} {_or_quotes(value)}\n" for name, value in lines.items()))
        with (self.directory / "redis.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*_dying_with_its_parent(), executable(), config],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,  # where it complains about its options
                env=os.environ | self.environment,
                start_new_session=True,  # or a Ctrl-C meant for the tests would stop it under their feet
            )
        atexit.register(self.kill)

    def _answers_before(self, give_up_at: float) -> bool:
        """True when it answers, False when the process ended.

        Raises:
            RedisServerError: neither by `give_up_at`, monotonic seconds.
        """
        process = self._process
        assert process is not None
        client = redis.Redis.from_url(self.url, socket_timeout=1, socket_connect_timeout=1, retry=Retry(NoBackoff(), 0))
        with client:
            while process.poll() is None:
                try:
                    # The process id, as on a port that was lost in a race somebody else's server answers.
                    if client.ping() and client.info("server")["process_id"] == process.pid:
                        return True
                except (redis.ConnectionError, redis.TimeoutError):  # not there yet, or loading its data
                    pass
                if time.monotonic() > give_up_at:
                    self.kill()
                    raise RedisServerError(f"redis-server does not answer; its log ends with:\n{self.log[-2000:]}")
                time.sleep(0.005)
        self._ended()
        return False

    def _ended(self) -> None:
        self._process = None
        self._is_paused = False
        atexit.unregister(self.kill)


def _or_quotes(value: object) -> str:
    return str(value) or '""'


def executable() -> str:
    """The program of the servers that are started.

    Raises:
        RedisServerError: there is none.
    """
    found = installed()
    if found is None:
        raise RedisServerError(
            "the tests need redis-server 7.0 or newer (or valkey-server 7.2): on Debian or Ubuntu install it "
            "with `sudo apt-get install redis-server`, on macOS with `brew install redis`"
        )
    return found


def _dying_with_its_parent() -> list[str]:
    """A prefix for its command line, for a test process that is killed and runs no atexit: Linux only."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "KILL"] if setpriv else []


@cache
def _own_ports() -> Iterator[int]:
    """Those of `PORTS` that this process of the tests has for itself: a server that it starts anew finds its port as it
    left it. One after the other, from anywhere: what was picked to be used later is not picked again meanwhile.
    """
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    ports = PORTS[number :: int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))]
    first = _random.randrange(len(ports))
    return cycle([*ports[first:], *ports[:first]])


def free_port() -> int:
    """A port that nobody listens on, of those that this process of the tests has for itself."""
    ports = _own_ports()
    while True:
        port = next(ports)
        with socket.socket() as probe:
            # As redis-server does it, so that connections of an earlier server in TIME_WAIT don't count.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
