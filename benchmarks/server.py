"""A fresh redis-server, and what it says of itself: processor time, memory, commands, reads."""

from types import TracebackType
from typing import Self

import redis

from tests.redis_server import RedisServer


class Server:
    """A redis-server of our own on a free port, without persistence; gone at the end of the block."""

    def __init__(self, **options: str | int) -> None:
        self._server = RedisServer(**options)

    def __enter__(self) -> Self:
        self._server.start()
        self.url = self._server.url
        self.client = redis.Redis.from_url(self.url, decode_responses=True)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.client.close()
        self._server.close()

    def cpu(self) -> float:
        """Seconds of processor time that it has used."""
        info = self.client.info("cpu")
        return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])

    def memory(self) -> int:
        """Bytes in use."""
        return int(self.client.info("memory")["used_memory"])

    def reads(self) -> int:
        """How often it read from a connection: what was sent in one write is one read, or two when it is long."""
        return int(self.client.info("stats")["total_reads_processed"])

    @property
    def version(self) -> str:
        return str(self.client.info("server")["redis_version"])
