"""Which jobs are meant: one value, which checks itself."""

import dataclasses
import subprocess
import sys
from array import array
from typing import Any

import pytest

from lowq import ConfigError, Queue
from lowq.application import Lowq
from lowq.inspection import JobFilter, Snapshot
from lowq.operate.bulk import filter_for
from lowq.operate.job_filter import FilterOptions, fingerprint, new_salt
from tests.rows import case


def test_its_fields_are_the_keyword_arguments_that_callers_give() -> None:
    assert [item.name for item in dataclasses.fields(JobFilter)] == list(FilterOptions.__annotations__)


def test_it_refuses_what_makes_no_sense_and_names_what_is_allowed() -> None:
    rows: list[tuple[dict[str, Any], str]] = [
        ({"state": "dead"}, "state='dead': it is one of scheduled, due, retrying, taken, morgue, any, or None"),
        ({"order_by": "buried_at"}, "order_by='buried_at': jobs that wait or are taken are ordered by one of perform_"),
        ({"state": "morgue", "order_by": "perform_at"}, "jobs in the morgue are ordered by one of buried_at, id"),
        ({"min": "a"}, "min='a': it is a number, a bound of perform_at"),
        ({"max": float("nan")}, "max=nan: it is a number"),
        ({"min": True}, "min=True: it is a number"),
        ({"state": "morgue", "max": "b"}, "a bound of buried_at"),
        ({"order_by": "id", "min": 4.0}, "min=4.0: with order_by='id' it is an id, a str"),
        ({"match": "*a*b*c*d*e"}, "a pattern has at most 4"),
        ({"match": 4}, "match=4: it is a pattern of ids"),
        ({"max": -(10**5000)}, "max=(an integer of very many digits): it is a number, a bound of perform_at"),
        ({"order_by": "id", "min": 10**5000}, "min=(an integer of very many digits): with order_by='id'"),
        ({"before": float("inf")}, "before=inf: it is a finite number"),
        ({"before": 10**400}, "before=1000000"),
        ({"before": True}, "before=True: it is a finite number"),
        ({"before": "yesterday"}, "before='yesterday': it is a finite number"),
    ]
    for fields, message in rows:
        with case(fields, message):
            with pytest.raises(ConfigError) as caught:
                JobFilter(**fields)
            assert message in str(caught.value)


def test_it_is_made_of_a_filter_a_state_or_fields_and_tells_those_that_say_anything() -> None:
    four = JobFilter("morgue", match="4*")
    assert JobFilter.of(None, {}) == JobFilter()
    assert JobFilter.of("morgue", {"match": "4*"}) == JobFilter.of(None, {"state": "morgue", "match": "4*"}) == four
    assert JobFilter.of(four, {"match": "5*"}) == JobFilter("morgue", match="5*")
    with pytest.raises(TypeError, match="the state is given twice: 'due' and state='morgue'"):
        JobFilter.of("due", {"state": "morgue"})
    assert JobFilter().given() == {}
    snapshot = Snapshot(7.5, 0, array("q"))
    assert JobFilter("due", min=0.0, before=snapshot).given() == {"state": "due", "min": 0.0, "before": 7.5}
    assert JobFilter(order_by="id", reverse=True, before=3).given() == {"order_by": "id", "reverse": True, "before": 3}


def test_bounds_are_of_what_it_is_ordered_by() -> None:
    by_time, by_id = JobFilter(min=1, max=2.5), JobFilter(order_by="id", min="b", max="c")
    assert [by_time.holds(value, b"x") for value in (0.9, 1, 2.5, 2.6)] == [False, True, True, False]
    assert [by_id.holds(0.0, job_id) for job_id in (b"a", b"b", b"c", b"c1")] == [False, True, True, False]


def test_a_bulk_action_goes_by_time_and_a_moment_bounds_nothing_else() -> None:
    assert filter_for("delete", JobFilter(match="4*", order_by="id", reverse=True)) == JobFilter(match="4*")
    assert filter_for("kick", JobFilter(min=4)) == JobFilter("morgue", min=4)
    for wanted in (JobFilter(order_by="id", min="4"), JobFilter(order_by="retry_count", max=3)):
        with pytest.raises(ConfigError, match="can be bounded by time, not by id or retry_count"):
            filter_for("delete", wanted)
    queue = Queue(Lowq(redis_url="memory://"), "Orders", 1)
    with pytest.raises(ConfigError, match="before: it bounds bulk actions, not listings"):
        queue.jobs(before=4.0)
    with pytest.raises(ConfigError, match="before: a snapshot is of what there is now"):
        queue.snapshot("delete", before=4.0)


def test_a_snapshot_is_the_same_in_another_process() -> None:
    jobs = [("lowq:v1:{Orders:0}:", at, f"job-{at}".encode()) for at in (1.5, -2.0, 2.0**33)]
    salt = new_salt()
    assert fingerprint(salt, *jobs[0]) != fingerprint(new_salt(), *jobs[0])
    snapshot = Snapshot(7.125, 5, array("q", sorted(fingerprint(salt, *job) for job in jobs)), salt)
    packed = Snapshot.unpack(snapshot.pack())
    assert packed == snapshot
    assert packed is not None
    assert all(packed.holds(*job) for job in jobs)
    assert not packed.holds("lowq:v1:{Orders:0}:", 1.5, b"job-2")
    program = (
        "import sys; from lowq.inspection import Snapshot; "
        "print(Snapshot.unpack(bytes.fromhex(sys.argv[1])).holds('lowq:v1:{Orders:0}:', 1.5, b'job-1.5'))"
    )
    command = [sys.executable, "-c", program, snapshot.pack().hex()]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "True\n"


def test_what_is_no_snapshot_is_none() -> None:
    samples: list[bytes] = [
        b"", b"null\n", b"{}\n", b"[" * 100_000, b'{"at": "x", "total": 1, "salt": ""}\n',
        b'{"at": NaN, "total": 1, "salt": ""}\n', b'{"at": 1, "total": -1, "salt": ""}\n',
        b'{"at": 1, "total": true, "salt": ""}\n', b'{"at": 1, "total": 1, "salt": "' + b"00" * 100 + b'"}\n',
        b'{"at": 1, "total": 1, "salt": "zz"}\n', b'{"at": 1, "total": 1, "salt": ""}\n1234567',
        b'{"at": 1, "total": 1, "salt": ""}\n' + b"\x02" + bytes(15),
    ]  # fmt: skip
    for raw in samples:
        with case(raw):
            assert Snapshot.unpack(raw) is None
