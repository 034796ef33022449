"""The checker finds what it is there to find, on histories written by hand."""

from pathlib import Path
from typing import Any

import pytest

from tests.checker import UNACKED, Rest, check, recovery, rests
from tests.history import Event, History, performs_of, read


class Story:
    """A history in the making: every line is one second after the one before."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.at = -1.0

    def tell(self, event: str, **fields: Any) -> None:
        self.at += 1
        at = self.at
        self.events.append({"event": event, "at": at, "wall": at, "pid": 1, "thread": 1, **fields})

    def skip(self, seconds: float) -> None:
        self.at += seconds

    def push(self, *versions: int, job_id: str = "a", accepted: bool = True, scored: bool = True) -> None:
        jobs = [[job_id, version, float(version) if scored else None] for version in versions]
        self.tell("pushing", push="p", jobs=jobs)
        if accepted:
            self.tell("pushed", push="p", jobs=jobs)

    def start(self, name: str, *versions: int, job_id: str = "a", fence: int = 1, pid: int = 1) -> None:
        self.tell("start", perform=name, shard=0, fence=fence, jobs={job_id: list(versions)}, pid=pid)

    def end(self, name: str, *, ok: bool = True) -> None:
        self.tell("end", perform=name, ok=ok)

    def perform(
        self, name: str, *versions: int, job_id: str = "a", ok: bool = True, fence: int = 1, pid: int = 1
    ) -> None:
        self.start(name, *versions, job_id=job_id, fence=fence, pid=pid)
        self.tell("end", perform=name, ok=ok, pid=pid)


@pytest.fixture
def story() -> Story:
    return Story()


def test_a_sound_history_has_no_problems(story: Story) -> None:
    story.push(2, 1, 3)
    story.perform("x", 1, 2, 3)
    story.push(4)
    story.perform("y", 4)
    report = check(story.events)
    assert report.problems == []
    assert (report.accepted, report.performs, report.repeats, report.fenced) == (4, 2, 0, [])


# --- lost ---


def test_a_payload_that_was_never_performed_is_lost(story: Story) -> None:
    story.push(1, 2)
    story.perform("x", 1)
    assert len(check(story.events).lost) == 1
    assert "version 2" in check(story.events).lost[0]


@pytest.mark.parametrize("ending", ["raised", "buried"])
def test_a_perform_that_did_not_return_finished_nothing(story: Story, ending: str) -> None:
    story.push(1)
    story.start("x", 1)
    if ending == "raised":
        story.end("x", ok=False)
    assert len(check(story.events).lost) == 1


def test_a_buried_payload_is_not_lost(story: Story) -> None:
    story.push(1)
    assert check(story.events, buried=[("a", 1)]).problems == []


def test_what_was_not_accepted_cannot_be_lost(story: Story) -> None:
    story.push(1, accepted=False)
    assert check(story.events).problems == []


def test_what_was_performed_but_never_pushed_is_unknown(story: Story) -> None:
    story.perform("x", 1)
    assert len(check(story.events).unknown) == 1


# --- overlaps ---


def test_two_performs_at_a_time_overlap(story: Story) -> None:
    story.push(1, 2)
    story.start("x", 1)
    story.start("y", 2)
    story.end("x")
    story.end("y")
    assert len(check(story.events).overlaps) == 1


def test_two_ids_of_one_shard_overlap_too(story: Story) -> None:
    story.push(1)
    story.push(1, job_id="b")
    story.start("x", 1)
    story.perform("y", 1, job_id="b")
    story.end("x")
    assert len(check(story.events).overlaps) == 1


@pytest.mark.parametrize(("job_id", "overlaps"), [("a", 1), ("b", 0)])
def test_of_a_consumer_only_one_id_at_a_time_counts(story: Story, job_id: str, overlaps: int) -> None:
    story.push(1)
    story.push(1, job_id="b")
    story.start("x", 1)
    story.tell("start", perform="y", shard=0, fence=1, jobs={job_id: [1]}, by_hand=True)
    story.end("y")
    story.end("x")
    assert len(check(story.events).overlaps) == overlaps


def test_an_owner_with_a_lower_fence_may_go_on_and_is_reported(story: Story) -> None:
    story.push(1)
    story.start("x", 1, fence=1, pid=1)
    story.start("y", 1, fence=2, pid=2)
    story.end("x")
    story.end("y")
    report = check(story.events)
    assert report.problems == []
    assert [(old.name, new.name) for old, new in report.fenced] == [("x", "y")]


def test_an_owner_with_a_lower_fence_may_not_begin_anything(story: Story) -> None:
    story.push(1)
    story.perform("x", 1, fence=2)
    story.push(2)
    story.perform("y", 2, fence=1)
    assert len(check(story.events).overlaps) == 1


def test_a_process_that_was_frozen_may_begin_one_late_perform_in_each_thread(story: Story) -> None:
    story.push(1, 2)
    story.tell("frozen", frozen=7)
    story.perform("x", 1, 2, fence=2)
    story.start("y", 1, fence=1, pid=7)
    story.end("y")
    report = check(story.events)
    assert report.problems == []
    assert [(old.name, new.name) for old, new in report.fenced] == [("y", "x")]
    story.start("z", 1, fence=1, pid=7)
    story.end("z")
    assert len(check(story.events).overlaps) == 1


def test_who_waited_for_redis_when_it_was_frozen_may_begin_nothing_late(story: Story) -> None:
    story.push(1, 2)
    story.tell("frozen", frozen=7, in_call=True)
    story.perform("x", 1, 2, fence=2)
    story.start("y", 1, fence=1, pid=7)
    story.end("y")
    assert len(check(story.events).overlaps) == 1


def test_a_lower_fence_that_begins_during_a_higher_one_overlaps(story: Story) -> None:
    story.push(1, 2)
    story.start("x", 1, fence=2)
    story.perform("y", 2, fence=1)
    story.end("x")
    assert len(check(story.events).overlaps) == 1


def test_a_perform_ends_with_its_process(story: Story) -> None:
    story.push(1)
    story.start("x", 1, pid=7)
    story.tell("gone", gone=7)
    story.perform("y", 1, fence=2)
    assert check(story.events).problems == []


def test_a_perform_without_an_end_goes_on_for_ever(story: Story) -> None:
    story.push(1)
    story.start("x", 1)
    story.perform("y", 1)
    assert len(check(story.events).overlaps) == 1


# --- order ---


def test_payloads_of_one_perform_are_sorted(story: Story) -> None:
    story.push(1, 2)
    story.perform("x", 2, 1)
    assert len(check(story.events).steps_back) == 1


def test_an_older_payload_after_a_newer_one_is_a_step_back(story: Story) -> None:
    story.push(1, 2)
    story.perform("x", 2)
    story.perform("y", 1)
    assert len(check(story.events).steps_back) == 1


def test_a_payload_that_arrived_later_may_come_later(story: Story) -> None:
    story.push(2)
    story.perform("x", 2)
    story.push(1)
    story.perform("y", 1)
    assert check(story.events).problems == []


def test_without_scores_the_order_of_the_pushes_is_kept(story: Story) -> None:
    story.push(3, 1, scored=False)
    story.push(2, scored=False)
    story.perform("x", 3, 1)
    story.perform("y", 2)
    assert check(story.events).problems == []


@pytest.mark.parametrize("handed", [[(1, 3)], [(1,), (3,)], [(3,), (2,), (1,)]])
def test_without_scores_another_order_is_a_step_back(story: Story, handed: list[tuple[int, ...]]) -> None:
    story.push(3, 1, scored=False)
    story.push(2, scored=False)
    for number, versions in enumerate(handed):
        story.perform(f"{number}", *versions)
    assert len(check(story.events).steps_back) == 1


def test_without_scores_what_is_pushed_again_is_no_excuse(story: Story) -> None:
    story.push(1, 2, accepted=False, scored=False)
    story.perform("x", 2)
    story.push(1, scored=False)
    story.perform("y", 1)
    assert len(check(story.events).steps_back) == 1


def test_without_scores_what_comes_again_because_it_was_pushed_again_may_be_last(story: Story) -> None:
    story.push(1, accepted=False, scored=False)
    story.perform("x", 1)
    story.push(1, scored=False)
    story.push(2, scored=False)
    story.perform("y", 2, 1)
    assert check(story.events).problems == []


def test_what_was_in_flight_may_come_again(story: Story) -> None:
    story.push(1, 2)
    story.start("x", 1, 2, pid=7)
    story.tell("gone", gone=7)
    story.push(3)
    story.perform("y", 1, 2, 3, fence=2)
    report = check(story.events)
    assert report.problems == []
    assert (report.repeats, report.repeats_of_finished) == (2, 0)


def test_what_was_in_flight_may_come_again_in_parts(story: Story) -> None:
    story.push(1, 2, 3)
    story.perform("x", 1, 2, 3, ok=False)
    story.perform("y", 1, 2)
    story.perform("z", 3)
    assert check(story.events).problems == []


def test_what_comes_again_after_newer_ones_is_a_step_back(story: Story) -> None:
    story.push(1, 2)
    story.perform("x", 1)
    story.perform("y", 2)
    story.perform("z", 1)
    assert len(check(story.events).steps_back) == 1


def test_what_was_pushed_again_may_come_again(story: Story) -> None:
    story.push(1, 2, accepted=False)
    story.perform("x", 1)
    story.perform("y", 2)
    story.push(1)
    story.perform("z", 1)
    assert check(story.events).problems == []


def test_what_was_pushed_twice_may_come_twice_and_no_more(story: Story) -> None:
    story.push(1, 2, accepted=False)
    story.push(1, 2)
    story.perform("x", 1, 2)  # the first push, carried out late
    story.push(3)
    story.perform("y", 3)
    story.perform("z", 1, 2)
    assert check(story.events).problems == []
    story.push(4)
    story.perform("u", 4)
    story.perform("v", 1)
    assert len(check(story.events).steps_back) == 1


def test_newer_payloads_before_a_failed_one_comes_again_are_a_step_back(story: Story) -> None:
    story.push(1, 2)
    story.perform("x", 1, ok=False)
    story.perform("y", 2)
    story.perform("z", 1)
    assert len(check(story.events).steps_back) == 1


# --- fences ---


def test_two_processes_with_one_fence_are_a_fault(story: Story) -> None:
    story.push(1, 2)
    story.perform("x", 1, pid=1)
    story.perform("y", 2, pid=2)
    assert len(check(story.events).fences) == 1


# --- what was finished, and comes again ---


def test_what_redis_confirmed_may_not_come_again(story: Story) -> None:
    story.push(1)
    story.perform("x", 1)
    story.tell("acked", shard=0, ids=["a"])
    story.perform("y", 1, fence=2, pid=2)
    assert len(check(story.events).returned) == 1


def test_what_redis_confirmed_may_come_again_when_it_was_pushed_again(story: Story) -> None:
    story.push(1)
    story.perform("x", 1)
    story.tell("acked", shard=0, ids=["a"])
    story.push(1)
    story.perform("y", 1)
    story.tell("acked", shard=0, ids=["a"])
    assert check(story.events).problems == []
    story.perform("z", 1)
    assert len(check(story.events).returned) == 1


def test_an_acknowledgement_is_of_what_its_process_performed(story: Story) -> None:
    story.push(1)
    story.start("x", 1, pid=7)
    story.tell("gone", gone=7, code=-9)
    story.tell("acked", shard=0, ids=["a"])
    story.perform("y", 1, fence=2)
    assert check(story.events).problems == []


def finished_and_again(story: Story, *, soon: bool, code: int | None = -9, fence: int = 2) -> None:
    """Finished by a process that then ends, and performed by another."""
    story.push(1)
    story.perform("x", 1, pid=7)
    story.skip(-1 + UNACKED / 2 if soon else UNACKED)
    if code is not None:
        story.tell("gone", gone=7, code=code)
    story.perform("y", 1, fence=fence, pid=7 if fence == 1 else 8)


def test_what_finished_just_before_a_crash_may_come_again(story: Story) -> None:
    finished_and_again(story, soon=True)
    report = check(story.events)
    assert report.problems == []
    assert (report.repeats, report.repeats_of_finished) == (1, 1)


def test_what_finished_long_before_a_crash_may_not(story: Story) -> None:
    finished_and_again(story, soon=False)
    assert len(check(story.events).excess) == 1


def test_what_finished_before_an_orderly_end_may_not(story: Story) -> None:
    finished_and_again(story, soon=True, code=0)
    assert len(check(story.events).excess) == 1


def test_what_finished_may_not_come_again_to_the_same_owner(story: Story) -> None:
    finished_and_again(story, soon=True, code=None, fence=1)
    assert len(check(story.events).excess) == 1


def test_the_last_that_an_owner_did_may_come_again_to_the_next(story: Story) -> None:
    finished_and_again(story, soon=True, code=None)
    assert check(story.events).problems == []


@pytest.mark.parametrize("who", [7, None])
def test_what_finished_while_redis_was_out_of_reach_may_come_again(story: Story, who: int | None) -> None:
    story.push(1)
    story.tell("trouble", who=who)
    story.perform("x", 1, pid=7)
    story.tell("calm", who=who)
    story.skip(10)
    story.tell("gone", gone=7)
    story.perform("y", 1, fence=2, pid=8)
    assert check(story.events).problems == []


def test_what_finished_after_trouble_may_not_come_again(story: Story) -> None:
    story.push(1)
    story.tell("frozen", frozen=7)
    story.tell("thawed", thawed=7)
    story.perform("x", 1, pid=7)
    story.skip(10)
    story.tell("gone", gone=7)
    story.perform("y", 1, fence=2, pid=8)
    assert len(check(story.events).excess) == 1


def test_the_work_that_is_repeated_is_added_up(story: Story) -> None:
    story.push(1, 2)
    for name, version in (("x", 1), ("y", 2)):
        story.start(name, version, pid=7)
        story.skip(-0.995)
        story.tell("end", perform=name, ok=True, pid=7)
        story.skip(-0.995)
    story.tell("gone", gone=7, code=-9)
    story.perform("z", 1, 2, fence=2)
    report = check(story.events)
    assert report.repeated_work == pytest.approx(0.01)


# --- Redis lost data ---


def test_what_redis_lost_is_counted_and_no_problem(story: Story) -> None:
    story.push(1)
    story.tell("lapse", seconds=0.5)
    story.push(2)
    story.perform("x", 2)
    report = check(story.events)
    assert len(report.lost) == 1
    assert report.problems == []


def test_order_is_judged_anew_after_a_loss(story: Story) -> None:
    story.push(1, 2, 3)
    story.perform("x", 1, 2)
    story.tell("acked", shard=0, ids=["a"])
    story.tell("lapse", seconds=0.5)
    story.perform("y", 1, 2)
    assert check(story.events).problems == []
    story.perform("z", 3)
    story.perform("u", 2)
    assert len(check(story.events).steps_back) == 1


def test_owners_may_not_know_for_a_while_that_their_leases_were_lost(story: Story) -> None:
    story.push(1, 2, 3)
    story.perform("x", 1, fence=1, pid=1)
    story.tell("lapse", seconds=3.5)
    story.perform("y", 1, fence=2, pid=2)
    story.perform("z", 2, fence=1, pid=1)
    assert check(story.events).problems == []
    story.perform("u", 3, fence=1, pid=1)
    assert len(check(story.events).overlaps) == 1


# --- rests ---


def test_a_shard_rests_from_the_death_of_its_owner_to_the_next_perform(story: Story) -> None:
    story.push(1, 2)  # at 0 and 1
    story.start("x", 1, pid=7)
    story.tell("gone", gone=7)  # at 3
    story.skip(10)
    story.perform("y", 1, 2, fence=2)  # at 14
    assert rests(story.events) == [Rest(0, 1.0, 2.0), Rest(0, 3.0, 14.0)]
    assert recovery(rests(story.events)) == 11.0
    assert recovery(rests(story.events), outages=[2.5, 4.0, 20.0]) == 10.0
    assert recovery([]) == 0.0


def test_a_shard_without_work_does_not_rest(story: Story) -> None:
    story.push(1)
    story.perform("x", 1)
    story.skip(10)
    story.push(2)
    story.perform("y", 2)
    assert rests(story.events, least=1.5) == []


def test_a_frozen_perform_is_no_work(story: Story) -> None:
    story.push(1)
    story.start("x", 1, pid=7)
    story.tell("frozen", frozen=7)  # at 3
    story.perform("y", 1, fence=2)
    story.tell("end", perform="x", ok=True, pid=7)
    assert rests(story.events) == [Rest(0, 1.0, 2.0), Rest(0, 3.0, 4.0)]


# --- the file ---


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


def test_a_line_that_is_just_being_written_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "history"
    History(path).gone(1)
    with path.open("a") as file:
        file.write('{"event": "go')
    assert len(read(path)) == 1
