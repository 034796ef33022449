"""How often Redis is written to and waited for."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from lowq.store.pool import Pool


class RoundTrips:
    """What was counted, server by server: each time that a connection was taken to write something and await replies.
    Preparing a new connection does not count.
    """

    def __init__(self) -> None:
        self._pools: list[Pool] = []

    def add(self, pool: Pool) -> None:
        self._pools.append(pool)

    @property
    def count(self) -> int:
        return len(self._pools)

    @property
    def most_of_a_server(self) -> int:
        """Of the server that was asked most often."""
        return max(map(self._pools.count, self._pools), default=0)


@contextmanager
def counted_round_trips() -> Iterator[RoundTrips]:
    """Counts those of the block, by whatever client."""
    counted, checkout = RoundTrips(), Pool.checkout

    def counting(pool: Pool, *args: Any, **options: Any) -> Any:
        counted.add(pool)
        return checkout(pool, *args, **options)

    with mock.patch.object(Pool, "checkout", counting):
        yield counted
