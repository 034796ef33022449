"""The checker of histories finds what it is there to find, on histories written by hand."""

from pathlib import Path
from typing import Any

import pytest

from tests.history import Event, History, check, performs_of, read


class Story:
    """A history in the making: every line is one second after the one before."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def tell(self, event: str, **fields: Any) -> None:
        at = float(len(self.events))
        self.events.append({"event": event, "at": at, "wall": at, "pid": 1, "thread": 1, **fields})

    def push(self, *versions: int, job_id: str = "a", accepted: bool = True) -> None:
        jobs = [[job_id, version, float(version)] for version in versions]
        self.tell("pushing", push="p", jobs=jobs)
        if accepted:
            self.tell("pushed", push="p", jobs=jobs)

    def start(self, name: str, *versions: int, job_id: str = "a", fence: int = 1, pid: int = 1) -> None:
        self.tell("start", perform=name, shard=0, fence=fence, jobs={job_id: list(versions)}, pid=pid)

    def end(self, name: str, *, ok: bool = True) -> None:
        self.tell("end", perform=name, ok=ok)

    def perform(self, name: str, *versions: int, job_id: str = "a", ok: bool = True, fence: int = 1) -> None:
        self.start(name, *versions, job_id=job_id, fence=fence)
        self.end(name, ok=ok)


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


@pytest.mark.parametrize("ending", ["raised", "died"])
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
    story.perform("y", 1)
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


def test_what_was_in_flight_may_come_again(story: Story) -> None:
    story.push(1, 2)
    story.start("x", 1, 2, pid=7)
    story.tell("gone", gone=7)
    story.push(3)
    story.perform("y", 1, 2, 3)
    report = check(story.events)
    assert report.problems == []
    assert report.repeats == 2


def test_what_was_in_flight_may_come_again_in_parts(story: Story) -> None:
    story.push(1, 2, 3)
    story.perform("x", 1, 2, 3)
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
