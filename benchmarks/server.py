"""A fresh redis-server, and what it says of itself: processor time, memory, commands, reads; and a cluster of them."""

import time
from contextlib import ExitStack
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

    def errors(self, code: str) -> int:
        """How many replies were this error."""
        found = self.client.info("errorstats").get(f"errorstat_{code}", {"count": 0})
        return int(found["count"])

    @property
    def version(self) -> str:
        return str(self.client.info("server")["redis_version"])


class Cluster:
    """A cluster of so many primaries without replicas, with equal stretches of the slots."""

    def __init__(self, primaries: int) -> None:
        self.servers = [Server(cluster_enabled="yes") for _ in range(primaries)]

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            clients = [stack.enter_context(server).client for server in self.servers]
            port = clients[0].connection_pool.connection_kwargs["port"]
            for number, client in enumerate(clients):
                first, last = (16384 * part // len(clients) for part in (number, number + 1))
                client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
                client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, last - 1)
                client.execute_command("CLUSTER", "MEET", "127.0.0.1", port)
            while any(client.execute_command("CLUSTER INFO")["cluster_state"] != "ok" for client in clients):
                time.sleep(0.1)
            self.url = self.servers[0].url.replace("redis://", "redis+cluster://").removesuffix("/0")
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()
