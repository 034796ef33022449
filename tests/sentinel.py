"""A Redis Sentinel of the tests' own, over servers that a test has started."""

import os
import signal
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import redis

from tests.redis_server import RedisServer, RedisServerError, executable, free_port
from tests.tls import Tls
from tests.waiting import NEVER, PATIENCE

#: Milliseconds without an answer after which a server is taken for gone.
DOWN_AFTER = 500


class Sentinel:
    """Watches a primary under the name "main", and when it is gone makes a replica of it the primary at once. Used as a
    context manager. With ``tls`` it speaks TLS with the primary, and with who uses its URL. ``watches``: False: before
    `watch` is called it takes nobody for gone, as a primary that has no time would be. ``password``: its own, and
    ``primary_password`` that of the primary (``requirepass``); its URL has neither.
    """

    def __init__(
        self,
        directory: Path,
        primary: RedisServer,
        tls: Tls | None = None,
        *,
        watches: bool = True,
        password: str = "",
        primary_password: str = "",
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._tls = tls
        self._password = password or None
        self.port = free_port()
        self._config = directory / "sentinel.conf"
        watched = primary.port if tls is None else tls.port(primary)
        lines = (
            f"bind 127.0.0.1\nport {self.port}\ndir {directory}\nsentinel monitor main 127.0.0.1 {watched} 1\n"
            f"sentinel down-after-milliseconds main {DOWN_AFTER if watches else int(1000 * NEVER)}\n"
            "sentinel failover-timeout main 2000\n"
        )
        if password:
            lines += f"requirepass {password}\n"
        if primary_password:
            lines += f"sentinel auth-pass main {primary_password}\n"
        if tls is not None:
            self._tls_port = free_port()
            options = {**tls.options, "tls_port": self._tls_port, "tls_replication": "yes"}
            lines += "".join(f"{name.replace('_', '-')} {value}\n" for name, value in options.items())
        self._config.write_text(lines)

    @property
    def url(self) -> str:
        if self._tls is not None:
            return f"rediss+sentinel://127.0.0.1:{self._tls_port}/main/0{self._tls.query}"
        return f"redis+sentinel://127.0.0.1:{self.port}/main/0"

    def _client(self) -> "redis.Redis":
        return redis.Redis(port=self.port, password=self._password, socket_timeout=PATIENCE)

    def primary_port(self) -> int:
        """The port of whom it calls the primary; 0: it does not answer."""
        with self._client() as client:
            try:
                address = client.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", "main")
            except redis.ConnectionError:
                return 0
        return int(address[1]) if address else 0

    def watch(self) -> None:
        """From now on it notices that a server is gone."""
        with self._client() as client:
            client.execute_command("SENTINEL", "SET", "main", "down-after-milliseconds", DOWN_AFTER)

    def replicas(self) -> int:
        """How many replicas it knows."""
        with self._client() as client:
            return len(client.execute_command("SENTINEL", "REPLICAS", "main"))

    def pause(self) -> None:
        """SIGSTOP: connections stay open and nothing answers."""
        os.kill(self._process.pid, signal.SIGSTOP)

    def cont(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def __enter__(self) -> Self:
        self._process = subprocess.Popen([executable(), self._config, "--sentinel"], stdout=subprocess.DEVNULL)
        give_up_at = time.monotonic() + PATIENCE
        while not self.primary_port():
            if time.monotonic() > give_up_at or self._process.poll() is not None:
                self._end()
                raise RedisServerError("the sentinel did not start")
            time.sleep(0.02)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
