"""A Redis Sentinel of the tests' own, over servers that a test has started."""

import shutil
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import redis

from tests.redis_server import RedisServer, RedisServerError
from tests.waiting import PATIENCE


class Sentinel:
    """Watches a primary under the name "main", and when it is gone makes a replica of it the primary at once. Used as a
    context manager.
    """

    def __init__(self, directory: Path, primary: RedisServer) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self._config = directory / "sentinel.conf"
        self._config.write_text(
            f"bind 127.0.0.1\nport {self.port}\ndir {directory}\nsentinel monitor main 127.0.0.1 {primary.port} 1\n"
            "sentinel down-after-milliseconds main 500\nsentinel failover-timeout main 2000\n"
        )

    @property
    def url(self) -> str:
        return f"redis+sentinel://127.0.0.1:{self.port}/main/0"

    def primary_port(self) -> int:
        """The port of whom it calls the primary; 0: it does not answer."""
        with redis.Redis(port=self.port, socket_timeout=PATIENCE) as client:
            try:
                address = client.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", "main")
            except redis.ConnectionError:
                return 0
        return int(address[1]) if address else 0

    def replicas(self) -> int:
        """How many replicas it knows."""
        with redis.Redis(port=self.port, socket_timeout=PATIENCE) as client:
            return len(client.execute_command("SENTINEL", "REPLICAS", "main"))

    def __enter__(self) -> Self:
        executable = shutil.which("redis-server") or shutil.which("valkey-server")
        if executable is None:
            raise RedisServerError("redis-server is missing")
        self._process = subprocess.Popen([executable, self._config, "--sentinel"], stdout=subprocess.DEVNULL)
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
