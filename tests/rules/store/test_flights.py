"""How long a client waits for its calls: each wait ends with the deadline of all of them together."""

from typing import Any, cast

import pytest

from lowq.store import Call, Client, Deadline
from lowq.store.client import MAX_WRITE


class Server:
    """A pool, its only connection, and the timeouts that it was given since it was checked out."""

    def __init__(self) -> None:
        self.scripts = {"push": (b"", b"sha")}
        self.limits = 0

    def checkout(self, _deadline: Deadline) -> "Server":
        self.limits = 0
        return self

    def check_rights(self, _connection: object, _calls: object) -> None: ...

    def limit(self, _connection: object, _deadline: Deadline) -> None:
        self.limits += 1

    def send_packed_command(self, _packed: list[bytes], *, check_health: bool) -> None:
        assert not check_health

    def read_response(self) -> int:
        return 1

    def release(self, connection: object) -> None:
        assert connection is self


def limits(*sizes: int, servers: int = 1) -> list[int]:
    """How often each server's connection was told what is left, for calls of such sizes, one after the other."""
    pools = [Server() for _ in range(servers)]
    client = Client("redis://127.0.0.1:1/0", size=1, timeout=1.0)
    cast(Any, client)._servers.pool_for = lambda key, _deadline: pools[int(key) % servers]
    calls = [Call("push", str(number), (), [b"x" * size]) for number, size in enumerate(sizes)]
    assert client.start(calls, deadline=Deadline(1.0))() == [1] * len(sizes)
    return [pool.limits for pool in pools]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        pytest.param([10], 0, id="a small call is written at once"),
        pytest.param([10, 10], 1, id="the second reply has what the first left"),
        pytest.param([100_000], 1, id="a large one takes time"),
        pytest.param([10, MAX_WRITE], 2, id="so does a large one behind a small one"),
    ],
)
def test_a_reply_is_waited_for_no_longer_than_is_left(sizes: list[int], expected: int) -> None:
    assert limits(*sizes) == [expected]


def test_the_second_server_has_what_the_first_left() -> None:
    assert limits(10, 10, servers=2) == [1, 1]
