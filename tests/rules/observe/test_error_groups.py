"""What fails: alike errors in groups, counted by those who report them, and taken to Redis with a heartbeat."""

import time
from contextlib import ExitStack, closing
from typing import Any

import pytest

import lowq
from lowq.codec.payloads import format_error
from lowq.node.node import Node
from lowq.observe.error_groups import ErrorCounts, ErrorRecorder, error_text, fingerprint
from lowq.observe.events import QueueEvents
from lowq.queue import Queue
from lowq.store import Call
from lowq.store.keys import error_groups_key
from tests.rows import case
from tests.rules.queue_rig import QueueRig
from tests.rules.support import NOW, job, report, run_script
from tests.waiting import NEVER, PATIENCE, until

KEY = error_groups_key("lowq", "Orders")
TRACEBACK = """Traceback (most recent call last):
  File "app.py", line 7, in perform
    raise ValueError("no order 42")
ValueError: no order 42"""
CHAINED = f"{TRACEBACK}\n\nDuring handling of the above exception, another exception occurred:\n\n" + TRACEBACK.replace(
    "ValueError: no order 42", "shop.errors.Unavailable: the bank\n  says: later"
)


def test_the_text_is_the_class_and_the_first_line() -> None:
    rows = [
        (TRACEBACK, "ValueError: no order 42"),
        (CHAINED, "shop.errors.Unavailable: the bank"),
        (f"{TRACEBACK}\nDETAIL: Key (mail)=(ann@example.com) already exists.", "ValueError: no order 42"),
        (f"{TRACEBACK}\n(Background on this error at: https://x.example)", "ValueError: no order 42"),
        (TRACEBACK.replace(" no order 42", " \n\n  no order 42\n  no money"), "ValueError: no order 42"),
        (TRACEBACK.replace("ValueError:", "shop.test.<locals>.Broken:"), "shop.test.<locals>.Broken: no order 42"),
        (TRACEBACK.replace("    raise", "... 70000 bytes left out ...\n    raise"), "ValueError: no order 42"),
        ("Traceback (most recent call last):", "Traceback (most recent call last):"),
        ("ValueError: no card\nDETAIL: 42", "ValueError: no card"),
        ("  \n ", ""),
        ("x" * 1000, "x" * 300),
    ]
    for error, text in rows:
        with case(error):
            assert error_text(error) == text


def test_of_a_group_it_is_the_last_exception_within() -> None:
    def raised(error: Exception) -> Exception:
        with pytest.raises(type(error)) as caught:
            raise error
        return caught.value

    inner = ExceptionGroup("inner", [raised(ValueError("no order 7\nDETAIL: x"))])
    group = raised(ExceptionGroup("of tasks", [raised(ValueError("first")), inner]))
    assert error_text(format_error(group)) == "ValueError: no order 7"


def test_alike_are_errors_that_differ_in_numbers_and_quoted_parts() -> None:
    rows = [
        ("ValueError: no order 42", "ValueError: no order 7", True),
        ("KeyError: 'a b'", "KeyError: 'c'", True),
        ('E: "x" at 0x7f00, 1.5 s', 'E: "longer" at 0xdeadbeef, 12,000.25 s', True),
        ("E: job 3f2504e0-4f89-11d3-9a0c-0305e82c3301", "E: job 9b2504e0-4f89-11d3-9a0c-0305e82c33ff", True),
        ("ValueError: no order", "KeyError: no order", False),
        ("E: face it", "E: deadbeef", False),
    ]
    for one, other, alike in rows:
        with case(one, other):
            assert (fingerprint(one) == fingerprint(other)) is alike


#: For what nodes and consumers do with the errors of their jobs.
on_redis = pytest.mark.parametrize("store_url", ["redis"], indirect=True)


@pytest.fixture
def queue(app: lowq.Lowq) -> Queue:
    queue = app.queue("Orders", 1)
    queue.push("first")
    return queue


def record(app: lowq.Lowq, *groups: Any, now: float = NOW, most: int = 200) -> list[bytes]:
    words = [word for group in groups for word in group]
    fresh: list[bytes] = run_script(app.client, "record_errors", KEY, repr(now), most, 3600, *words)
    return fresh


def test_counts_add_up_and_the_hours_are_kept_apart(app: lowq.Lowq, queue: Queue) -> None:
    now = time.time()
    assert record(app, ("f1", 2, "a", "E: 1"), ("f2", 1, "b c", "E: other"), now=now - 7200) == [b"f1", b"f2"]
    assert record(app, ("f1", 3, "d", "E: 2"), now=now) == []
    assert record(app, ("f1", 1, "d", "E: 2"), now=now) == []
    one, other = queue.error_groups()
    assert (one.text, one.count, one.sample_id) == ("E: 2", 6, "d")
    assert [one.first_seen, one.last_seen] == pytest.approx([now - 7200, now])
    first, *_, last = [hour for hour, count in enumerate(one.hours) if count]
    assert (last - first, one.hours[first], one.hours[last], len(one.hours)) == (2, 2, 4, 24)
    assert (other.sample_id, other.text) == ("b c", "E: other")


def test_of_more_than_are_kept_those_seen_longest_ago_go_and_all_with_their_queue(app: lowq.Lowq, queue: Queue) -> None:
    for number in range(5):
        record(app, (f"f{number}", 1, "a", "E"), now=NOW + number, most=3)
    assert set(app.client.command("HKEYS", KEY)) == {b"f2", b"f3", b"f4"}
    record(app, *((f"g{number}", 1, "a", "E") for number in range(5)), now=NOW + 10, most=3)
    assert app.client.command("HLEN", KEY) == 3
    queue.drop()
    assert app.client.command("EXISTS", KEY) == 0


def test_what_is_none_of_ours_is_left_out_and_replaced(app: lowq.Lowq, queue: Queue) -> None:
    values: list[str | bytes] = ["x", "1 2 3", "1 nan 3 4:5 1 ab", "1 2 3 4 5 6", b"\xff"]
    for number, value in enumerate(values):
        app.client.command("HSET", KEY, f"f{number}", value)
    assert queue.error_groups() == []
    record(app, ("f1", 2, "a", "E: 1"))
    assert [(group.fingerprint, group.count) for group in queue.error_groups()] == [("f1", 2)]


def test_a_process_gathers_a_bounded_number_and_sends_each_once(app: lowq.Lowq) -> None:
    counts = ErrorCounts(bytes.decode)
    counts.jobs_failed((b"%d" % n, b"E%s: x" % (b"x" * n)) for n in range(300))
    counts.jobs_failed([(b"again", b"E: x"), (b"bad", b"\xff"), (b"\xff", b"E: x")])
    recorder = ErrorRecorder("lowq", {"Orders": counts, "Idle": ErrorCounts(bytes.decode)})
    (call,) = recorder()
    assert isinstance(call, Call)
    assert len(call.args) == 3 + 4 * 200
    assert recorder() == []
    app.client.call(call)
    found = {group.text: group for group in app.queue("Orders", 1).error_groups()}
    assert (found["E: x"].count, found["E: x"].sample_id) == (3, "\udcff")


@on_redis
def test_nodes_record_what_their_jobs_raise_and_a_new_group_is_an_event_once_over_all_of_them(store_url: str) -> None:
    told: list[lowq.JobEvent] = []

    def perform(payloads_by_id: dict[str, list[int]]) -> None:
        (job_id,) = payloads_by_id
        if job_id == "good":
            lowq.current().fail(job_id, "the bank says no")
        else:
            raise ValueError(f"no order {job_id!r}")

    apps = [lowq.Lowq(redis_url=store_url, lease_ttl=6, on_job_event=told.append) for _ in range(2)]
    with ExitStack() as stack:
        for app in apps:
            stack.callback(app.close)
            app.worker(shards_count=4, batch_size=1, queue_name="Orders")(perform)
            node = Node(app, threads=2)
            node.start()
            stack.callback(node.stop, PATIENCE)
        until(lambda: len(apps[0].nodes()) == 2, "two nodes")
        queue = apps[0].queue("Orders")
        queue.push([{"id": "good"}, *({"id": n} for n in range(40))])
        until(lambda: sum(group.count for group in queue.error_groups()) >= 41, "recorded failures")
        until(lambda: len([event for event in told if event.kind == "new_error"]) >= 2, "the events")
    raised, said = sorted((event for event in told if event.kind == "new_error"), key=lambda event: event.id == "good")
    assert (raised.queue, raised.error) == ("Orders", f"ValueError: no order {raised.id!r}"), "whatever the id is"
    assert (said.error, said.payloads_count) == ("the bank says no", None)


@on_redis
def test_a_consumer_records_what_it_fails_and_buries_and_a_new_group_is_an_event(store_url: str) -> None:
    told: list[lowq.JobEvent] = []
    with closing(lowq.Lowq(redis_url=store_url, lease_ttl=NEVER, on_job_event=told.append)) as app:
        queue = app.queue("Orders", 1)
        queue.push([{"id": "first"}, {"id": "second"}, {"id": "third"}])
        with queue.consumer() as consumer:
            jobs = {job.id: job for job in consumer.take(10, timeout=PATIENCE)}
            jobs["first"].fail(RuntimeError("not today"))
            jobs["second"].bury("obsolete")
            jobs["third"].fail(RuntimeError("not today"))
        app.flush_events()
        found = {group.text: (group.queue, group.count) for group in app.error_groups()}
    assert found == {"RuntimeError: not today": ("Orders", 2), "obsolete": ("Orders", 1)}
    assert sorted(event.error or "" for event in told if event.kind == "new_error") == sorted(found)


def test_poison_is_recorded_and_its_group_leads_to_it(store_url: str) -> None:
    counts = ErrorCounts(bytes.decode)
    with closing(QueueRig(store_url)) as rig:
        rig.push(job("a"))
        for crashes in (1, 2, 3):
            shard = rig.own("a", NOW + crashes)
            shard.in_flight.events = QueueEvents(shard.queue, own=[counts])
            shard.in_flight.take(100, NOW + crashes)
            report(shard, "release", [("a", 0.0)], NOW + crashes, crashed=True)
        found = rig.queue.peek("a", "morgue")
    assert found is not None
    assert found.error is not None
    assert counts.take()[:3] == [fingerprint(found.error), 1, b"a"]
