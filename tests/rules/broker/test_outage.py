"""What a process says of a Redis that is away, or not ready: each once, and the end once."""

import logging

import pytest

from lowq.broker.outage import Outage
from lowq.errors import RedisNotReady, RedisUnavailable

AWAY = RedisUnavailable("Redis at redis://h does not answer: refused")
REPLICA = RedisNotReady("Redis at redis://h is a read-only replica; do this", "is a read-only replica")


def events(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.event for record in caplog.records]  # type: ignore[attr-defined]  # in `extra`


def test_an_outage_is_logged_when_it_begins_and_when_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    outage = Outage()
    for _ in range(3):
        outage.begin(AWAY)
    assert (outage.trouble or "").startswith("Redis has not answered for ")
    outage.end(outage.begun)
    outage.end(outage.begun)
    assert outage.trouble is None
    assert events(caplog) == ["outage", "recovery"]


def test_a_redis_that_answers_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    outage = Outage()
    outage.begin(REPLICA)
    said = outage.trouble or ""
    assert said.startswith("waiting for ")
    assert said.endswith("Redis is a read-only replica")  # its address is not for everybody
    assert "waiting until it can" in caplog.text


def test_one_that_comes_back_as_a_replica_is_the_same_outage(caplog: pytest.LogCaptureFixture) -> None:
    outage = Outage()
    outage.begin(AWAY)
    outage.begin(REPLICA)
    outage.begin(AWAY)  # a call that was under way
    outage.begin(REPLICA)
    assert outage.begun == 1
    assert (outage.trouble or "").startswith("waiting")
    outage.end(1)
    assert events(caplog) == ["outage", "waiting", "recovery"]
    outage.begin(REPLICA)
    assert events(caplog)[3:] == ["waiting"]


def test_an_answer_to_what_was_sent_before_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    outage = Outage()
    sent = outage.begun
    outage.begin(REPLICA)
    outage.end(sent)
    assert outage.trouble is not None
