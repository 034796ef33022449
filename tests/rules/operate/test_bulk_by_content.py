"""Bulk actions on jobs by what is in them: their payloads, their errors; and by shard."""

from collections.abc import Iterator
from typing import Any

import pytest

import lowq
from lowq.job import State
from lowq.observe.error_groups import error_fingerprint
from lowq.operate import jobs
from lowq.operate.bulk import Step
from tests.rows import case
from tests.rules.queue_rig import SHARDS, QueueRig
from tests.rules.support import NOW, job

pytestmark = pytest.mark.parametrize("store_url", ["redis"], indirect=True)

TIMEOUTS, NO_CARD = error_fingerprint("TimeoutError: after 1 s"), error_fingerprint("ValueError: no card")


def last(steps: Iterator[Step]) -> tuple[int, int]:
    *_, step = steps
    return step.done, step.total


@pytest.fixture
def failed(rig: QueueRig) -> QueueRig:
    """Jobs that wait for their retry (in 10 s), whose retry is due, that are dead, and that never failed."""
    for n in range(6):
        rig.push(job(f"wait-{n}", n % 2), job(f"again-{n}", n % 2), job(f"dead-{n}", n % 2))
        error = b"TimeoutError: after %d s" % n if n % 2 else b"ValueError: no card"
        rig.fail(f"wait-{n}", error=error)
        rig.fail(f"again-{n}", delay=0.5, error=error)
        rig.fail(f"dead-{n}", error=error)
    rig.queue.bury([f"dead-{n}" for n in range(6)], now=NOW)
    rig.push(job("fresh", 1), job("later", 1, perform_at=NOW + 60))
    return rig


def ids_of(rig: QueueRig, state: State | None = None) -> set[str]:
    return set(rig.ids(state=state, now=NOW + 1)) if state else set(rig.ids(now=NOW + 1))


def test_a_group_of_errors_is_kicked(failed: QueueRig) -> None:
    assert last(failed.queue.bulk("kick", error_group=TIMEOUTS, now=NOW + 1)) == (3, 3)
    assert ids_of(failed, "morgue") == {"dead-0", "dead-2", "dead-4"}
    assert failed.queue.count("kick", error_group=TIMEOUTS, now=NOW + 1) == 0


@pytest.mark.parametrize(
    ("action", "state", "names"),
    [
        ("delete", None, ("wait", "again")), ("bury", None, ("wait", "again")), ("perform_now", None, ("wait",)),
        ("delete", "retrying", ("wait",)), ("delete", "due", ("again",)), ("delete", "scheduled", ()),
        ("delete", "morgue", ("dead",)),
    ],
)  # fmt: skip
def test_and_so_is_what_waits_for_a_retry_or_is_due_again(
    failed: QueueRig, action: Any, state: Any, names: tuple[str, ...]
) -> None:
    done = {f"{name}-{n}" for name in names for n in (1, 3, 5)}
    waiting, dead, due = ids_of(failed), ids_of(failed, "morgue"), ids_of(failed, "due")
    assert last(failed.queue.bulk(action, state, error_group=TIMEOUTS, now=NOW + 1)) == (len(done), len(done))
    if action == "perform_now":
        assert ids_of(failed, "due") == due | done
    else:
        assert ids_of(failed) == waiting - done
        assert ids_of(failed, "morgue") == (dead | done if action == "bury" else dead - done)


@pytest.mark.parametrize(
    ("options", "done"),
    [
        ({"error": "CARD"}, 6), ({"error": "TimeoutError", "match": "wait-*"}, 3), ({"payload": "v:1"}, 0),
        ({"error_group": NO_CARD, "error": "Timeout"}, 0), ({"shard": 0, "error": "e"}, None),
    ],
)  # fmt: skip
def test_by_a_part_of_the_error_by_pattern_and_by_shard(
    failed: QueueRig, options: dict[str, Any], done: int | None
) -> None:
    if done is None:
        done = sum(failed.shard_index(item) == 0 for item in ids_of(failed) if item not in ("fresh", "later"))
        assert 0 < done < 12
    assert last(failed.queue.bulk("delete", now=NOW + 1, **options))[0] == done
    assert len(ids_of(failed)) == 14 - done


def test_by_a_field_of_the_payload_or_by_shard_alone(rig: QueueRig) -> None:
    ids = {f"{n:02}" for n in range(40)}
    rig.push(*(job(job_id, {"customer": int(job_id) % 4}) for job_id in sorted(ids)))
    assert last(rig.queue.bulk("delete", payload="customer:3", now=NOW + 1)) == (10, 10)
    ids -= {f"{n:02}" for n in range(3, 40, 4)}
    assert ids_of(rig) == ids
    of_shard = {job_id for job_id in ids if rig.shard_index(job_id) == 1}
    assert last(rig.queue.bulk("bury", shard=1, now=NOW + 1)) == (len(of_shard), len(of_shard))
    assert ids_of(rig, "morgue") == of_shard
    with pytest.raises(lowq.ConfigError, match=f"shard=3: queue 'Orders' has the shards 0 to {SHARDS - 1}"):
        rig.queue.count("kick", shard=3)


def test_a_job_that_failed_otherwise_meanwhile_is_left_alone(failed: QueueRig) -> None:
    steps = failed.queue.bulk("kick", error_group=TIMEOUTS, now=NOW + 2)
    while next(steps).counting:
        pass
    failed.queue.kick("dead-1", now=NOW + 1)
    failed.queue.bury("dead-1", reason="ValueError: no card", now=NOW + 1)
    assert last(steps)[0] == 2
    assert ids_of(failed, "morgue") >= {"dead-1"}


def test_a_snapshot_binds_it(failed: QueueRig) -> None:
    dead = failed.queue.snapshot("kick", error_group=TIMEOUTS, now=NOW + 1)
    waiting = failed.queue.snapshot("delete", error_group=TIMEOUTS, now=NOW + 1)
    assert (dead.total, waiting.total) == (3, 6)
    failed.queue.bury("fresh", reason="TimeoutError: after 9 s", now=NOW + 2)
    failed.queue.perform_now("wait-1", now=NOW + 2)
    assert failed.queue.count("kick", error_group=TIMEOUTS, now=NOW + 3) == 4
    assert last(failed.queue.bulk("delete", error_group=TIMEOUTS, before=waiting, now=NOW + 3)) == (5, 6)
    assert last(failed.queue.bulk("kick", error_group=TIMEOUTS, before=dead, now=NOW + 3)) == (3, 3)
    assert "wait-1" in ids_of(failed)
    assert "fresh" in ids_of(failed, "morgue")


def test_jobs_are_read_bit_by_bit(failed: QueueRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "MAX_PAGE_BYTES", 1)
    assert last(failed.queue.bulk("kick", error_group=TIMEOUTS, now=NOW + 1)) == (3, 3)


def test_jobs_of_a_group_are_listed_and_what_is_no_fingerprint_is_refused(failed: QueueRig) -> None:
    assert failed.ids(state="morgue", error_group=TIMEOUTS) == ["dead-1", "dead-3", "dead-5"]
    found = failed.ids(order_by="retry_count", min=0, error_group=NO_CARD)
    assert sorted(found) == sorted(f"{name}-{n}" for name in ("wait", "again") for n in (0, 2, 4))
    rows: list[Any] = ["", "0" * 11, "0" * 13, "G" * 12, 7]
    for group in rows:
        with case(group), pytest.raises(lowq.ConfigError, match=r"error_group=.*: it is the fingerprint of a group"):
            failed.queue.jobs(error_group=group)
