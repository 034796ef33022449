"""What the checker says of histories that are written by hand. That it catches broken builds is in
`test_broken_builds`.
"""

from typing import Any

from tests.checker import DRIFT, check
from tests.history import Event

TTL = 1.0


def pushed(at: float, job_id: str, *versions: int) -> list[Event]:
    jobs = [[job_id, version, version] for version in versions]
    push = f"push at {at}"
    return [
        {"event": "pushing", "at": at, "pid": 1, "push": push, "jobs": jobs},
        {"event": "pushed", "at": at + 0.01, "pid": 1, "push": push, "jobs": jobs},
    ]


def performed(at: float, job_id: str, *versions: int, name: str, fence: int = 1, **more: Any) -> list[Event]:
    jobs = {job_id: list(versions)}
    start = {"event": "start", "at": at, "pid": 2, "thread": 1, "perform": name, "shard": 0, "fence": fence}
    return [
        {**start, "jobs": jobs, "by_hand": True, **more},
        {"event": "end", "at": at + 0.1, "pid": 2, "thread": 1, "perform": name, "ok": True},
    ]


def acked(at: float, job_id: str, name: str) -> Event:
    return {"event": "acked", "at": at, "pid": 2, "shard": 0, "ids": [job_id], "perform": name}


def taken(sent: float, job_id: str, *versions: int) -> Event:
    return {"event": "taken", "at": sent + 0.01, "pid": 2, "sent": sent, "jobs": {job_id: list(versions)}}


def test_an_acknowledgement_of_a_consumer_is_of_the_perform_that_it_says() -> None:
    history = [
        *pushed(0, "a", 1, 2),
        *performed(1, "a", 1, name="first"),
        *performed(1.2, "a", 2, name="second"),
        acked(1.15, "a", "first"),  # the thread was slow to write this
        *performed(3, "a", 2, name="third", fence=2),
    ]
    assert check(history).returned == []
    (found,) = check([*history[:-2], acked(1.35, "a", "second"), *history[-2:]]).returned
    assert "third" in found
    assert "was given 2, which was acknowledged before" in found


def test_an_acknowledgement_of_what_was_handed_over_again_is_found() -> None:
    history = [
        *pushed(0, "a", 1),
        *performed(1, "a", 1, name="late", until=1.05),
        *performed(2, "a", 1, name="again"),
    ]
    assert check([*history, acked(3, "a", "again")]).problems == []
    (found,) = check([*history, acked(3, "a", "late")]).late_acks
    assert found.startswith("id a: late ")
    assert "though again " in found


def test_a_lower_fence_is_only_excused_of_a_job_that_its_consumer_had_in_hand() -> None:
    pushes = [*pushed(0, "a", 1), *pushed(0, "b", 1)]
    later = performed(2, "b", 1, name="later", fence=3)

    def overlaps(*begun: Event) -> list[str]:
        return check([*pushes, *begun]).overlaps

    assert overlaps(*later, *performed(3, "a", 1, name="in hand", fence=1)) == []
    for begun in (
        [*later, *performed(3, "b", 1, name="same id", fence=1)],
        [*later, *performed(3, "a", 1, name="node", fence=1, by_hand=False)],
        [{**each, "pid": 3} for each in later] + performed(3, "a", 1, name="other process", fence=1),
        [{**each, "pid": 3, "fence": 2} for each in performed(1, "b", 1, name="between", fence=2)]
        + [*later, *performed(3, "a", 1, name="not alone", fence=1)],
    ):
        (found,) = overlaps(*begun)
        assert "whose fence is higher" in found


def test_what_is_taken_after_it_has_expired_is_found() -> None:
    history = pushed(0, "a", 1)
    assert check([*history, taken(TTL + 0.01 + DRIFT / 2, "a", 1)], expiring=["a"], ttl=TTL).stale == []
    (found,) = check([*history, taken(TTL + 0.5, "a", 1)], expiring=["a"], ttl=TTL).stale
    assert found == "id a: 1 was taken 0.490 s after it had expired"
    assert check([*history, *pushed(TTL, "a", 1), taken(TTL + 0.5, "a", 1)], expiring=["a"], ttl=TTL).stale == []


def test_what_is_gone_before_it_had_expired_is_found() -> None:
    history = [*pushed(0, "a", 1), *pushed(0.2, "a", 2)]
    gone = check([*history, taken(0.5, "a", 2), *performed(0.6, "a", 2, name="one")], expiring=["a"], ttl=TTL)
    assert gone.expired == 1
    assert gone.hasty == ["id a: 1 is gone, and [2] were taken before it expired"]
    late = check([*history, taken(TTL, "a", 2), *performed(1.1, "a", 2, name="one")], expiring=["a"], ttl=TTL)
    assert (late.expired, late.hasty) == (1, [])
    assert check(history).lost == [
        f"id a: version {n} was accepted, never performed, and is not buried" for n in (1, 2)
    ]


def test_what_finished_just_after_an_outage_may_come_again_as_its_lease_was_not_renewed() -> None:
    def history(*outage: Event) -> list[Event]:
        first, again = performed(2.5, "a", 1, name="first"), performed(2.8, "a", 1, name="again")
        return [*pushed(0, "a", 1), *outage, *first, *again]

    (found,) = check(history()).excess
    assert "was given 1 again, finished by first" in found
    outage = [{"event": "trouble", "at": 1.5, "who": None}, {"event": "calm", "at": 2.0, "who": None}]
    assert check(history(*outage)).problems == []


def test_a_failover_excuses_only_what_its_replica_could_not_have() -> None:
    """Of the moments and the shards that it is about."""

    def lost(accepted_at: float, *, shards: list[int] | None) -> int:
        lapse = {"event": "lapse", "at": 6, "pid": 1, "seconds": 1, "data": True, "since": 4, "shards": shards}
        history = [*pushed(0, "a", 1), *performed(1, "a", 1, name="first"), *pushed(accepted_at, "a", 2), lapse]
        return len(check(history).unexcused)

    assert [lost(at, shards=[0]) for at in (3, 5, 8)] == [1, 0, 1]
    assert [lost(at, shards=[1]) for at in (3, 5, 8)] == [1, 1, 1]
    assert lost(5, shards=None) == 0


def test_only_a_handler_that_returns_when_its_time_limit_passes_may_have_been_ended() -> None:
    def history(limit: float | None) -> list[Event]:
        return [
            *pushed(0, "a", 1),
            *performed(1, "a", 1, name="first", by_hand=False, limit=limit),
            *performed(3, "a", 1, name="again", by_hand=False),
        ]

    for seconds in (1.1, 1.05):
        assert check(history(seconds)).problems == []
    for limit in (1.15, None):
        (found,) = check(history(limit)).excess
        assert "was given 1 again, finished by first" in found


def test_what_is_pushed_again_when_it_was_performed_may_come_again() -> None:
    history = [
        *pushed(0, "a", 1),
        *performed(1, "a", 1, name="first", by_hand=False),
        *performed(3, "a", 1, name="again", by_hand=False),
    ]
    history[3] = {**history[3], "ok": False}
    third = performed(5, "a", 1, name="third", by_hand=False)
    assert check([*history, *pushed(4, "a", 1), *third]).problems == []
    for more in ([], pushed(2, "a", 1)):
        (found,) = check([*history, *more, *third]).excess
        assert "was given 1 again, finished by again" in found


def test_what_is_pushed_after_a_cancel_is_not_cancelled() -> None:
    def without_a_score(at: float) -> list[Event]:
        return [{**event, "jobs": [["a", 1, None]]} for event in pushed(at, "a", 1)]

    start, end = performed(3, "a", 1, name="failed")
    again = [start, {**end, "ok": False}, *performed(4, "a", 1, name="again")]
    cancel: list[Event] = [
        {"event": "cancelling", "at": 1.0, "pid": 3, "cancel": "one", "ids": ["a"]},
        {"event": "cancelled", "at": 1.1, "pid": 3, "cancel": "one"},
    ]
    assert check([*cancel, *without_a_score(2), *again]).revived == []
    (found,) = check([*without_a_score(0), *cancel, *again]).revived
    assert "version 1 was cancelled at 1.000" in found
