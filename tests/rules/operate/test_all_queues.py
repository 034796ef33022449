"""Jobs of all queues in one order, page by page; and jobs by what is in them."""

import itertools
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from lowq import Lowq
from lowq.errors import ConfigError
from lowq.inspection import FoundPage
from lowq.store import Client
from lowq.store.keys import shard_prefix
from tests.round_trips import counted_round_trips
from tests.rows import case
from tests.rules.support import NOW
from tests.waiting import NEVER, PATIENCE

#: Pages of several queues are joined here. Those of one are read from both stores in test_queries.py.
pytestmark = pytest.mark.parametrize("store_url", ["memory"], indirect=True)

NAMES = ("Bills", "Mail", "Orders")
IDS = [f"{n:02d}" for n in range(20)]


@pytest.fixture
def app(store_url: str) -> Iterator[Lowq]:
    with closing(Lowq(redis_url=store_url)) as app:
        for number, name in enumerate(NAMES):
            queue = app.queue(name, 3)
            for n, job_id in enumerate(IDS):
                payload = {"customer": n % 5, "from": name}
                queue.push({"id": job_id, "payload": payload, "perform_at": NOW + 60 * n + number % 2})
        yield app


def all_of(app: Lowq, limit: int, **options: Any) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    cursor = None
    for _ in range(200):
        page = app.jobs(limit=limit, after=cursor, **options)
        assert len(page) <= limit
        found += [(item.queue, item.job.id) for item in page]
        cursor = page.cursor
        if cursor is None:
            return found
    raise AssertionError("it never ends")


def test_they_come_by_time_then_queue_then_id_each_once(app: Lowq) -> None:
    """Two of the queues have jobs of the same times."""
    places = sorted((60 * n + NAMES.index(name) % 2, name, job_id) for name in NAMES for n, job_id in enumerate(IDS))
    in_order = [(name, job_id) for _, name, job_id in places]
    for limit, reverse in itertools.product((1, 7, 1000), (False, True)):
        with case(limit, reverse):
            assert all_of(app, limit, reverse=reverse) == (in_order[::-1] if reverse else in_order)
    of_some = [(name, job_id) for name, job_id in in_order if name != "Mail"]
    assert all_of(app, 7, queues=["Orders", "Bills"]) == of_some
    assert app.jobs(queues=[]).found == []


def test_the_morgue_and_what_failed(app: Lowq) -> None:
    for second, name in enumerate(NAMES):
        app.queue(name).bury(["03", "04"], reason=f"Timeout in {name}", now=NOW + 10 + second)
    dead = [(name, job_id) for name in NAMES for job_id in ("03", "04")]
    assert all_of(app, 3, state="morgue", reverse=True) == dead[::-1]
    assert all_of(app, 3, state="morgue", error="TIMEOUT in mail") == [("Mail", "03"), ("Mail", "04")]
    assert all_of(app, 3, order_by="retry_count", min=0, reverse=True) == []


def test_what_looks_at_every_id(app: Lowq) -> None:
    rows: list[tuple[dict[str, Any], list[str]]] = [
        ({"match": "0*"}, IDS[:10]), ({"order_by": "id"}, IDS),
        ({"match": "0*", "payload": "customer:2"}, ["02", "07"]),
    ]  # fmt: skip
    for options, wanted in rows:
        with case(options):
            assert sorted(all_of(app, 7, **options)) == [(name, job_id) for name in NAMES for job_id in wanted]


def test_a_queue_whose_keys_have_another_type_is_left_out(app: Lowq) -> None:
    for shard in range(3):
        key = shard_prefix(app.config.namespace, "Mail", shard) + "due"
        app.client.command("DEL", key)
        app.client.command("SET", key, "x")
    assert {name for name, _ in all_of(app, 50)} == {"Bills", "Orders"}


def test_by_a_field_of_a_payload_or_what_is_shown_of_it(app: Lowq) -> None:
    queue = app.queue("Orders")
    assert [job.id for job in queue.jobs(payload="customer:3")] == ["03", "08", "13", "18"]
    assert [job.id for job in queue.jobs(payload="customer:3", reverse=True, limit=2)] == ["18", "13"]
    assert {item.queue for item in app.jobs(payload="from:Mail")} == {"Mail"}
    queue.push({"id": "03", "payload": {"customer": 9}})
    assert [job.id for job in queue.jobs(payload="customer:9")] == ["03"], "one of its payloads"
    masked: dict[str, Any] = {"redact": lambda payload: {**payload, "customer": "masked"}}
    for value, is_found in (("3", False), ("masked", True)):
        assert bool(list(app.jobs_in_steps(payload=f"customer:{value}", **masked))[-1].found) == is_found
        assert bool(list(queue.jobs_in_steps(payload=f"customer:{value}", **masked))[-1].jobs) == is_found


def test_a_page_ends_after_so_many_jobs_and_steps_tell_how_far_it_is(
    app: Lowq, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowq.operate.jobs.STEP", 10)
    pages: list[FoundPage] = list(app.jobs_in_steps(payload="customer:4", limit=50, interval=0))
    assert [page.looked for page in pages] == [10, 20, 30, 40, 50, 60]
    assert [len(page) for page in pages] == sorted(len(page) for page in pages)
    monkeypatch.setattr("lowq.operate.jobs.MAX_LOOKED", 6)
    monkeypatch.setattr("lowq.operate.jobs.STEP", 3)
    queue, found, looked = app.queue("Orders"), list[str](), list[int | None]()
    cursor: str | None = None
    while not looked or cursor:
        page = queue.jobs(payload="customer:4", limit=10, after=cursor)
        found += [job.id for job in page]
        looked.append(page.looked)
        cursor = page.cursor
    assert (found, looked[0], len(looked)) == (["04", "09", "14", "19"], 6, 4)
    assert len(all_of(app, 10, payload="customer:4")) == 12
    assert app.jobs(payload="from:Bills", limit=1).looked == 3


def test_a_page_that_nobody_watches_grow_is_read_once(app: Lowq, monkeypatch: pytest.MonkeyPatch) -> None:
    scripts: list[str] = []
    run_many = Client.run_many

    def noted(self: Client, calls: Any, **options: Any) -> Any:
        scripts.extend(call.script for call in calls)
        return run_many(self, calls, **options)

    monkeypatch.setattr(Client, "run_many", noted)
    rows: list[tuple[Any, int]] = [(app.queue("Orders"), 3), (app, 9)]
    for place, shards in rows:
        with case(shards):
            scripts.clear()
            assert len(place.jobs(match="0*", order_by="id")) == 10 * shards // 3
            assert scripts.count("scan") == shards
            assert scripts.count("fetch_jobs") <= shards


def test_a_search_by_contents_asks_each_shard_once_and_many_together(
    app: Lowq, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowq.operate.queues.READ_AGAIN", NEVER)  # else a slow machine reads the registry besides
    queue = app.queue("Wide", 120)
    queue.push({"id": n, "payload": {"customer": n % 120}} for n in range(240))
    with counted_round_trips() as counted:
        page = queue.jobs(payload="customer:7")
    assert ([job.id for job in page], page.looked, page.cursor) == (["7", "127"], 240, None)
    assert counted.count <= 10
    sparse = app.queue("Sparse", 120)
    sparse.push({"id": n, "payload": {"customer": n}} for n in range(10))
    sparse.bury(range(10))
    rows: list[dict[str, Any]] = [{"match": "7*"}, {"payload": "customer:7"}]
    for options in rows:
        with case(options), counted_round_trips() as counted:
            assert [job.id for job in sparse.jobs("morgue", **options)] == ["7"]
        assert counted.count <= 6


def test_jobs_of_many_shards_come_with_all_their_payloads(app: Lowq) -> None:
    queue = app.queue("Wide", 50)
    queue.push({"id": 1, "payload": n, "score": n} for n in range(900))
    queue.push({"id": n, "score": n} for n in range(2, 100))
    found = {job.id: len(job.payloads) for job in queue.jobs(limit=1000)}
    assert (found.pop("1"), set(found.values()), len(found)) == (900, {1}, 98)


def test_jobs_in_any_state_are_what_runs_then_what_waits_then_the_dead(app: Lowq) -> None:
    mail = app.queue("Mail")
    mail.bury(["03", "13"], now=NOW)
    mail.push({"id": "03", "payload": {"customer": 3}})
    app.queue("Bills").push({"id": "runs"})
    options: dict[str, Any] = {"state": "any", "queues": ["Bills", "Mail"]}
    with app.queue("Bills").consumer() as consumer:
        assert [job.id for job in consumer.take(limit=1, timeout=PATIENCE)] == ["runs"]
        for limit in (1, 3, 1000):
            with case(limit):
                found = all_of(app, limit, **options)
                assert found[0] == ("Bills", "runs")
                assert found[-2:] == [("Mail", "03"), ("Mail", "13")]
                assert len(found) == 42
    states = [(item.job.id, item.job.state) for item in app.jobs("any", payload="customer:3", queues=["Mail"])]
    scheduled, dead = (
        [(job_id, "scheduled") for job_id in ("08", "18")],
        [(job_id, "morgue") for job_id in ("03", "13")],
    )
    assert states == [("03", "due"), *scheduled, *dead]
    assert [job.state for job in mail.jobs("any", match="03")] == ["due", "morgue"]
    rows: list[tuple[dict[str, Any], str]] = [
        ({"order_by": "id"}, "jobs in any state"), ({"priority": 1}, "priority"), ({"after": "9x"}, "any state"),
    ]  # fmt: skip
    for wrong, says in rows:
        with case(wrong), pytest.raises(ConfigError, match=says):
            mail.jobs("any", **wrong)
    with pytest.raises(ConfigError, match="state='any'"):
        mail.bulk("delete", "any")


def test_all_that_match_are_acted_on_over_all_queues_and_no_newer_ones(app: Lowq) -> None:
    for name in NAMES:
        app.queue(name).bury(["03", "04"], reason="Timeout")
    app.queue("Mail").bury("05", reason="Other")
    assert app.count("kick", error="timeout") == 6
    assert app.count("kick", error="timeout", queues=["Mail", "Bills"]) == 4
    later = [{"id": f"later-{n}", "delay": 3600} for n in range(3)]
    for name in NAMES:
        app.queue(name).push(later)
    dead, waiting = app.snapshot("kick", error="timeout"), app.snapshot("delete", match="later-*")
    assert (dead.total, waiting.total, waiting.remembers) == (6, 9, True)
    app.queue("Orders").bury("06", reason="Timeout")
    app.queue("Bills").push({"id": "later-9", "delay": 60})
    assert [(step.done, step.total) for step in app.bulk("kick", error="timeout", before=dead)][-1] == (6, 6)
    assert [(step.done, step.total) for step in app.bulk("delete", match="later-*", before=waiting)][-1] == (9, 9)
    assert {(item.queue, item.job.id) for item in app.jobs("morgue")} == {("Mail", "05"), ("Orders", "06")}
    assert [item.job.id for item in app.jobs(match="later-*")] == ["later-9"]
    assert [(step.done, step.total) for step in app.bulk("delete", queues=[])] == [(0, 0)]
    assert app.snapshot("delete", queues=[]).total == 0
    with pytest.raises(ConfigError, match="within one queue"):
        app.bulk("delete", shard=1)


def test_by_shard(app: Lowq) -> None:
    queue = app.queue("Orders")
    for shard in range(3):
        expected = [job_id for job_id in IDS if queue.shard_of(job_id) == shard]
        assert [job.id for job in queue.jobs(shard=shard)] == expected
        assert [job.id for job in queue.jobs(shard=shard, order_by="id")] == expected


def test_what_makes_no_sense_is_refused(app: Lowq) -> None:
    cursor = app.jobs(limit=1).cursor
    rows: list[tuple[Any, dict[str, Any], str]] = [
        (app.queue("Orders"), {"payload": "x"}, "payload="), (app.queue("Orders"), {"error": ""}, "error="),
        (app.queue("Orders"), {"error": "x" * 513}, "error="), (app.queue("Orders"), {"shard": -1}, "shard="),
        (app.queue("Orders"), {"shard": True}, "shard="), (app.queue("Orders"), {"shard": 3}, "shards 0 to 2"),
        (app, {"shard": 1}, "within one queue"), (app, {"after": ""}, "after"), (app, {"after": "cCsx"}, "after"),
        (app, {"after": "cCs1LjAgT3JkZXJz"}, "after"), (app, {"after": "cCtuYW4gT3JkZXJzIDE"}, "after"),
        (app, {"after": cursor, "reverse": True}, "another order"),
    ]  # fmt: skip
    for place, options, says in rows:
        with case(options), pytest.raises(ConfigError, match=says):
            place.jobs(**options)
