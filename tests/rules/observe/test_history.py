"""The checker finds what it is there to find, on histories written by hand."""

from pathlib import Path
from typing import Any, Self

import pytest

from tests.checker import UNACKED, Report, Rest, check, recovery, rests
from tests.history import Event, History, performs_of, read
from tests.rows import case


class Story:
    """A history in the making: every line is one second after the one before."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.at = -1.0

    def tell(self, event: str, **fields: Any) -> Self:
        self.at += 1
        at = self.at
        self.events.append({"event": event, "at": at, "wall": at, "pid": 1, "thread": 1, **fields})
        return self

    def skip(self, seconds: float) -> Self:
        self.at += seconds
        return self

    def push(self, *versions: int, job_id: str = "a", accepted: bool = True, scored: bool = True) -> Self:
        jobs = [[job_id, version, float(version) if scored else None] for version in versions]
        self.tell("pushing", push="p", jobs=jobs)
        return self.tell("pushed", push="p", jobs=jobs) if accepted else self

    def start(self, name: str, *versions: int, job_id: str = "a", fence: int = 1, **more: Any) -> Self:
        return self.tell("start", perform=name, shard=0, fence=fence, jobs={job_id: list(versions)}, **more)

    def end(self, name: str, *, ok: bool = True, pid: int = 1) -> Self:
        return self.tell("end", perform=name, ok=ok, pid=pid)

    def perform(self, name: str, *versions: int, ok: bool = True, pid: int = 1, **more: Any) -> Self:
        return self.start(name, *versions, pid=pid, **more).end(name, ok=ok, pid=pid)

    def acked(self) -> Self:
        return self.tell("acked", shard=0, ids=["a"])

    def gone(self, **more: Any) -> Self:
        """The process 7 ends."""
        return self.tell("gone", gone=7, **more)


KINDS = ("unexcused", "unknown", "overlaps", "fences", "steps_back", "returned", "excess", "hasty", "stale",
         "late_acks", "fenced")  # fmt: skip


def found(report: Report) -> dict[str, int]:
    """How much of each kind."""
    return {kind: len(getattr(report, kind)) for kind in KINDS if getattr(report, kind)}


def check_all(rows: list[tuple[str, Story, dict[str, int]]]) -> None:
    for rule, story, expected in rows:
        with case(rule):
            assert found(check(story.events)) == expected


def test_a_sound_history_has_no_problems() -> None:
    report = check(Story().push(2, 1, 3).perform("x", 1, 2, 3).push(4).perform("y", 4).events)
    assert (report.problems, found(report)) == ([], {})
    assert (report.accepted, report.performs, report.repeats) == (4, 2, 0)


def test_what_is_lost_and_what_is_unknown() -> None:
    check_all([
        ("a payload was never performed", Story().push(1, 2).perform("x", 1), {"unexcused": 1}),
        ("a perform raised", Story().push(1).perform("x", 1, ok=False), {"unexcused": 1}),
        ("a perform never ended", Story().push(1).start("x", 1), {"unexcused": 1}),
        ("what was not accepted can't be lost", Story().push(1, accepted=False), {}),
        ("what was never pushed is unknown", Story().perform("x", 1), {"unknown": 1}),
    ])  # fmt: skip
    assert "version 2" in check(Story().push(1, 2).perform("x", 1).events).lost[0]
    assert check(Story().push(1).events, buried=[("a", 1)]).problems == [], "what is buried is not lost"


def test_what_overlaps() -> None:
    both = Story().push(1).push(1, job_id="b")
    frozen = Story().push(1, 2).tell("frozen", frozen=7).perform("x", 1, 2, fence=2).perform("y", 1, pid=7)
    check_all([
        ("two performs at a time", Story().push(1, 2).start("x", 1).start("y", 2).end("x").end("y"), {"overlaps": 1}),
        ("two ids of one shard", both.start("x", 1).perform("y", 1, job_id="b").end("x"), {"overlaps": 1}),
        ("of a consumer one id at a time", Story().push(1).start("x", 1).start("y", 1, by_hand=True).end("y").end("x"),
         {"overlaps": 1}),
        ("of a consumer another id", Story().push(1).push(1, job_id="b").start("x", 1)
         .start("y", 1, job_id="b", by_hand=True).end("y").end("x"), {}),
        ("a lower fence may go on and is told",
         Story().push(1).start("x", 1, pid=1).start("y", 1, fence=2, pid=2).end("x").end("y"), {"fenced": 1}),
        ("a lower fence may begin nothing", Story().push(1).perform("x", 1, fence=2).push(2).perform("y", 2),
         {"overlaps": 1}),
        ("who was frozen may begin one late perform", frozen, {"fenced": 1}),
        ("who waited for Redis when it was frozen may begin none",
         Story().push(1, 2).tell("frozen", frozen=7, in_call=True).perform("x", 1, 2, fence=2).perform("y", 1, pid=7),
         {"overlaps": 1, "excess": 1}),
        ("a lower fence begins during a higher one",
         Story().push(1, 2).start("x", 1, fence=2).perform("y", 2).end("x"), {"overlaps": 1}),
        ("a perform ends with its process", Story().push(1).start("x", 1, pid=7).gone().perform("y", 1, fence=2), {}),
        ("one without an end goes on for ever", Story().push(1).start("x", 1).perform("y", 1), {"overlaps": 1}),
        ("two processes with one fence", Story().push(1, 2).perform("x", 1, pid=1).perform("y", 2, pid=2),
         {"fences": 1}),
    ])  # fmt: skip
    assert len(check(frozen.perform("z", 1, pid=7).events).overlaps) == 1, "one in each thread"


def test_order_by_scores() -> None:
    check_all([
        ("payloads of one perform are sorted", Story().push(1, 2).perform("x", 2, 1), {"steps_back": 1}),
        ("an older one after a newer one", Story().push(1, 2).perform("x", 2).perform("y", 1), {"steps_back": 1}),
        ("what arrived later may come later", Story().push(2).perform("x", 2).push(1).perform("y", 1), {}),
        ("what was in flight may come again in parts",
         Story().push(1, 2, 3).perform("x", 1, 2, 3, ok=False).perform("y", 1, 2).perform("z", 3), {}),
        ("what was pushed again may come again",
         Story().push(1, 2, accepted=False).perform("x", 1).perform("y", 2).push(1).perform("z", 1), {}),
        ("newer ones before a failed one comes again",
         Story().push(1, 2).perform("x", 1, ok=False).perform("y", 2).perform("z", 1), {"steps_back": 1}),
    ])  # fmt: skip
    again = check(Story().push(1, 2).perform("x", 1).perform("y", 2).perform("z", 1).events)
    assert len(again.steps_back) == 1, "what comes again after newer ones"
    twice = Story().push(1, 2, accepted=False).push(1, 2).perform("x", 1, 2)  # the first push, carried out late
    twice.push(3).perform("y", 3).perform("z", 1, 2)
    assert check(twice.events).problems == []
    assert len(check(twice.push(4).perform("u", 4).perform("v", 1).events).steps_back) == 1, "twice, and no more"
    in_flight = Story().push(1, 2).start("x", 1, 2, pid=7).gone().push(3).perform("y", 1, 2, 3, fence=2)
    report = check(in_flight.events)
    assert (report.problems, report.repeats, report.repeats_of_finished) == ([], 2, 0)


def test_order_without_scores_is_that_of_the_pushes() -> None:
    def pushed() -> Story:
        return Story().push(3, 1, scored=False).push(2, scored=False)

    def unsure(*versions: int) -> Story:
        return Story().push(*versions, accepted=False, scored=False)

    check_all([
        ("as they were pushed", pushed().perform("x", 3, 1).perform("y", 2), {}),
        ("another order within one", pushed().perform("x", 1, 3), {"steps_back": 1, "unexcused": 1}),
        ("another order over two", pushed().perform("x", 1).perform("y", 3), {"steps_back": 1, "unexcused": 1}),
        ("another order over three", pushed().perform("x", 3).perform("y", 2).perform("z", 1), {"steps_back": 1}),
        ("what is pushed again is no excuse", unsure(1, 2).perform("x", 2).push(1, scored=False).perform("y", 1),
         {"steps_back": 1}),
        ("what comes again because it was pushed again may be last",
         unsure(1).perform("x", 1).push(1, scored=False).push(2, scored=False).perform("y", 2, 1), {}),
    ])  # fmt: skip


def finished_and_again(*, soon: bool, code: int | None = -9, fence: int = 2) -> Story:
    """Finished by a process that then ends, and performed by another."""
    story = Story().push(1).perform("x", 1, pid=7).skip(-1 + UNACKED / 2 if soon else UNACKED)
    if code is not None:
        story.gone(code=code)
    return story.perform("y", 1, fence=fence, pid=7 if fence == 1 else 8)


def test_what_was_finished_and_comes_again() -> None:
    def confirmed() -> Story:
        return Story().push(1).perform("x", 1).acked()

    def in_trouble(who: int | None) -> Story:
        return Story().push(1).tell("trouble", who=who).perform("x", 1, pid=7).tell("calm", who=who).skip(10)

    repeated = confirmed().push(1).perform("y", 1).acked()
    thawed = Story().push(1).tell("frozen", frozen=7).tell("thawed", thawed=7).perform("x", 1, pid=7).skip(10).gone()
    check_all([
        ("Redis had confirmed it", confirmed().perform("y", 1, fence=2, pid=2), {"returned": 1}),
        ("it was pushed again", repeated, {}),
        ("an acknowledgement is of what its process performed",
         Story().push(1).start("x", 1, pid=7).gone(code=-9).acked().perform("y", 1, fence=2), {}),
        ("just before a crash", finished_and_again(soon=True), {}),
        ("long before a crash", finished_and_again(soon=False), {"excess": 1}),
        ("before an orderly end", finished_and_again(soon=True, code=0), {"excess": 1}),
        ("to the same owner", finished_and_again(soon=True, code=None, fence=1), {"excess": 1}),
        ("the last that an owner did, to the next", finished_and_again(soon=True, code=None), {}),
        ("while Redis was out of its reach", in_trouble(7).gone().perform("y", 1, fence=2, pid=8), {}),
        ("while Redis was out of reach", in_trouble(None).gone().perform("y", 1, fence=2, pid=8), {}),
        ("after trouble", thawed.perform("y", 1, fence=2, pid=8), {"excess": 1}),
    ])  # fmt: skip
    assert len(check(repeated.perform("z", 1).events).returned) == 1
    report = check(finished_and_again(soon=True).events)
    assert (report.repeats, report.repeats_of_finished) == (1, 1)


def test_the_work_that_is_repeated_is_added_up() -> None:
    story = Story().push(1, 2)
    for name, version in (("x", 1), ("y", 2)):
        story.start(name, version, pid=7).skip(-0.995).end(name, pid=7).skip(-0.995)
    report = check(story.gone(code=-9).perform("z", 1, 2, fence=2).events)
    assert report.repeated_work == pytest.approx(0.01)


def test_what_redis_has_lost_is_told_and_no_problem() -> None:
    report = check(Story().push(1).tell("lapse", seconds=0.5).push(2).perform("x", 2).events)
    assert (len(report.lost), report.problems) == (1, [])
    anew = Story().push(1, 2, 3).perform("x", 1, 2).acked().tell("lapse", seconds=0.5).perform("y", 1, 2)
    assert check(anew.events).problems == []
    assert len(check(anew.perform("z", 3).perform("u", 2).events).steps_back) == 1, "order is judged anew"
    # Owners may not know for a while that their leases were lost.
    owners = Story().push(1, 2, 3).perform("x", 1, pid=1).tell("lapse", seconds=3.5).perform("y", 1, fence=2, pid=2)
    assert check(owners.perform("z", 2, pid=1).events).problems == []
    assert len(check(owners.perform("u", 3, pid=1).events).overlaps) == 1


def test_a_shard_rests_from_the_death_of_its_owner_to_the_next_perform() -> None:
    # The push takes 0 and 1, the process ends at 3, the next perform is at 14.
    events = Story().push(1, 2).start("x", 1, pid=7).gone().skip(10).perform("y", 1, 2, fence=2).events
    assert rests(events) == [Rest(0, 1.0, 2.0), Rest(0, 3.0, 14.0)]
    assert recovery(rests(events)) == 11.0
    assert recovery(rests(events), outages=[2.5, 4.0, 20.0]) == 10.0
    assert recovery([]) == 0.0
    without_work = Story().push(1).perform("x", 1).skip(10).push(2).perform("y", 2).events
    assert rests(without_work, least=1.5) == []
    frozen = Story().push(1).start("x", 1, pid=7).tell("frozen", frozen=7).perform("y", 1, fence=2).end("x", pid=7)
    assert rests(frozen.events) == [Rest(0, 1.0, 2.0), Rest(0, 3.0, 4.0)]


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    history = History(tmp_path / "history")
    assert read(history.path) == []
    with history.pushing([("a", 1, 1.0)]):
        pass
    with history.performing(0, 5, {"a": [1]}):
        pass
    with pytest.raises(ZeroDivisionError), history.performing(0, 5, {"a": [1]}):
        raise ZeroDivisionError
    history.write("start", perform="last", shard=0, fence=5, jobs={})
    history.gone(history_pid := read(history.path)[0]["pid"])
    assert [event["event"] for event in read(history.path)] == [
        "pushing", "pushed", "start", "end", "start", "end", "start", "gone",
    ]  # fmt: skip
    assert [perform.ok for perform in performs_of(read(history.path))] == [True, False, None]
    assert read(history.path)[-1]["gone"] == history_pid
    with Path(history.path).open("a") as file:
        file.write('{"event": "go')  # is just being written
    assert len(read(history.path)) == 8
