"""What a process says of a Redis that is away, or not ready: each once, and the end once."""

import pytest

from lowq.errors import RedisNotReady, RedisUnavailable
from lowq.shards.outage import Outage

AWAY = RedisUnavailable("Redis at redis://h does not answer: refused")
REPLICA = RedisNotReady("Redis at redis://h is a read-only replica; do this", "is a read-only replica")


def test_an_outage_is_logged_once_also_when_redis_comes_back_as_a_replica_and_its_end_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    outage = Outage()
    sent = outage.begun
    for error in (AWAY, AWAY, REPLICA, AWAY, REPLICA):  # a call may have been under way
        outage.begin(error)
    outage.end(sent)
    assert outage.begun == 1
    said = str(outage.trouble)  # an answer to what was sent before ends nothing
    assert said.startswith("waiting for ")
    assert said.endswith("Redis is a read-only replica")  # its address is not for everybody
    for _ in range(2):
        outage.end(outage.begun)
    assert outage.trouble is None
    outage.begin(AWAY)
    assert str(outage.trouble).startswith("Redis has not answered for ")
    events = [record.event for record in caplog.records]  # type: ignore[attr-defined]  # in `extra`
    assert events == ["outage", "waiting", "recovery", "outage"]
