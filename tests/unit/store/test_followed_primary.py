"""Connections to a primary end when the sentinels name another one."""

import socket

from redis import exceptions

from lowq.store.followed_primary import ASK_PAUSES, FollowedPrimary


class Connection:
    def __init__(self) -> None:
        self._sock, self.other_end = socket.socketpair()

    def close(self) -> None:
        self._sock.close()
        self.other_end.close()

    def is_broken(self) -> bool:
        self.other_end.setblocking(False)
        try:
            return self.other_end.recv(1) == b""
        except BlockingIOError:
            return False


class Sentinels:
    def __init__(self) -> None:
        self.primary: tuple[str, int] | None = ("127.0.0.1", 1)
        self.asked = 0
        self.now = 100.0
        self.followed = FollowedPrimary(self.discover, clock=lambda: self.now)

    def discover(self) -> tuple[str, int]:
        self.asked += 1
        if self.primary is None:
            raise exceptions.ConnectionError("nobody there")
        return self.primary

    def follow_after(self, seconds: float) -> None:
        self.now += seconds
        self.followed.follow()


def test_connections_break_when_there_is_another_primary_and_not_before() -> None:
    sentinels = Sentinels()
    connection = sentinels.followed.followed(Connection())
    sentinels.follow_after(0)
    sentinels.follow_after(ASK_PAUSES[0])
    assert not connection.is_broken()
    sentinels.primary = ("127.0.0.1", 2)
    sentinels.follow_after(0)
    assert not connection.is_broken()  # they are asked once a second
    sentinels.follow_after(ASK_PAUSES[0])
    assert connection.is_broken()
    assert sentinels.asked == 3
    connection.close()


def test_sentinels_that_do_not_answer_break_nothing_and_are_asked_less_and_less() -> None:
    sentinels = Sentinels()
    connection = sentinels.followed.followed(Connection())
    sentinels.follow_after(0)
    sentinels.primary = None
    for _ in range(100):
        sentinels.follow_after(ASK_PAUSES[0])
    assert not connection.is_broken()
    assert 100 / ASK_PAUSES[1] <= sentinels.asked < 60
    sentinels.primary = ("127.0.0.1", 1)
    sentinels.follow_after(ASK_PAUSES[1])
    sentinels.follow_after(ASK_PAUSES[0])
    assert not connection.is_broken()
    connection.close()
