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
from tests.rows import case
from tests.rules.support import NOW

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
