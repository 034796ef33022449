import socket
import ssl
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from lowq.store.kernel import is_connected, keeps_timeout, timed_out


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.settimeout(5.0)
    with ours, theirs:
        yield ours, theirs


@pytest.mark.parametrize("seconds", [0.05, 0.3, 1.1])
def test_the_kernel_ends_a_read_that_takes_too_long(pair: tuple[socket.socket, socket.socket], seconds: float) -> None:
    assert keeps_timeout(SimpleNamespace(_sock=pair[0]), seconds)
    assert pair[0].gettimeout() is None
    begun = time.monotonic()
    with pytest.raises(BlockingIOError):
        pair[0].recv(1)
    assert time.monotonic() - begun > seconds * 0.9


def test_the_kernel_ends_a_write_that_takes_too_long(pair: tuple[socket.socket, socket.socket]) -> None:
    assert keeps_timeout(SimpleNamespace(_sock=pair[0]), 0.05)
    with pytest.raises(BlockingIOError):
        pair[0].sendall(bytes(64 * 2**20))


def test_a_timeout_of_almost_nothing_is_not_none_at_all(pair: tuple[socket.socket, socket.socket]) -> None:
    assert keeps_timeout(SimpleNamespace(_sock=pair[0]), 1e-9)
    with pytest.raises(BlockingIOError):
        pair[0].recv(1)


def test_what_reads_on_its_own_keeps_its_own_timeout(pair: tuple[socket.socket, socket.socket]) -> None:
    context = ssl.create_default_context()
    with context.wrap_socket(pair[0], do_handshake_on_connect=False, server_hostname="x") as wrapped:
        assert not keeps_timeout(SimpleNamespace(_sock=wrapped), 1.0)
        assert wrapped.gettimeout() == 5.0
    assert not keeps_timeout(SimpleNamespace(), 1.0)
    assert not keeps_timeout(SimpleNamespace(_sock=None), 1.0)


def test_a_socket_that_never_blocks_keeps_its_own_timeout(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    # gevent puts its own class into the place of Python's.
    class Green(socket.socket):
        pass

    monkeypatch.setattr(socket, "socket", Green)
    with Green(fileno=pair[0].detach()) as green:
        green.settimeout(5.0)
        assert not keeps_timeout(SimpleNamespace(_sock=green), 1.0)
        assert green.gettimeout() == 5.0


@pytest.mark.parametrize(("connection", "connected"), [
    (SimpleNamespace(is_connected=True, _sock=None), True), (SimpleNamespace(is_connected=False, _sock=1), False),
    (SimpleNamespace(_sock=1), True), (SimpleNamespace(_sock=None), False), (SimpleNamespace(), False),
])  # fmt: skip
def test_older_versions_of_redis_py_only_have_a_socket_or_none(connection: object, connected: bool) -> None:
    assert is_connected(connection) is connected


def test_without_a_timeout_nothing_is_changed(pair: tuple[socket.socket, socket.socket]) -> None:
    assert not keeps_timeout(SimpleNamespace(_sock=pair[0]), None)
    assert pair[0].gettimeout() == 5.0


def test_another_error_is_no_timeout() -> None:
    assert not timed_out(ConnectionError("another"))
