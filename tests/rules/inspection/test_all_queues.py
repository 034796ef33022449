"""Jobs of all queues in one order, page by page; and jobs by what is in them."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from lowq import FoundPage, Lowq
from lowq.errors import ConfigError
from lowq.inspection import sifting
from lowq.store.keys import shard_prefix
from tests.rows import case
from tests.rules.support import NOW

#: Pages of several queues are joined here. Those of one are read from both stores in test_queries.py.
pytestmark = pytest.mark.parametrize("store_url", ["memory"], indirect=True)

NAMES = ("Bills", "Mail", "Orders")


@pytest.fixture
def app(store_url: str) -> Iterator[Lowq]:
    app = Lowq(redis_url=store_url)
    for number, name in enumerate(NAMES):
        queue = app.queue(name, 3)
        for n in range(20):
            payload = {"customer": n % 5, "from": name}
            queue.push({"id": f"{n:02d}", "payload": payload, "perform_at": NOW + 60 * n + number % 2})
    yield app
    app.close()


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


def in_order(*, reverse: bool = False, names: tuple[str, ...] = NAMES) -> list[tuple[str, str]]:
    places = [(60 * n + NAMES.index(name) % 2, name, f"{n:02d}") for name in names for n in range(20)]
    return [(name, job_id) for _, name, job_id in sorted(places, reverse=reverse)]


def test_they_come_by_time_then_queue_then_id_each_once(app: Lowq) -> None:
    for limit, reverse in itertools.product((1, 7, 50, 1000), (False, True)):
        assert all_of(app, limit, reverse=reverse) == in_order(reverse=reverse), (limit, reverse)


def test_equal_times_in_several_queues(app: Lowq) -> None:
    for name in NAMES:
        app.queue(name).clear()
        app.queue(name).push({"id": f"{n}", "payload": "", "perform_at": NOW + 5} for n in range(6))
    for reverse in (False, True):
        found = all_of(app, 4, reverse=reverse)
        assert found == sorted(((name, str(n)) for name in NAMES for n in range(6)), reverse=reverse), reverse


def test_those_of_some_queues(app: Lowq) -> None:
    assert all_of(app, 7, queues=["Orders", "Bills"]) == in_order(names=("Bills", "Orders"))
    assert app.jobs(queues=[]).found == []


def test_the_morgue_and_what_failed(app: Lowq) -> None:
    for second, name in enumerate(NAMES):
        app.queue(name).bury(["03", "04"], reason=f"Timeout in {name}", now=NOW + 10 + second)
    dead = all_of(app, 3, state="morgue", reverse=True)
    assert dead == [
        ("Orders", "04"),
        ("Orders", "03"),
        ("Mail", "04"),
        ("Mail", "03"),
        ("Bills", "04"),
        ("Bills", "03"),
    ]
    assert all_of(app, 3, state="morgue", error="TIMEOUT in mail") == [("Mail", "03"), ("Mail", "04")]
    assert all_of(app, 3, order_by="retry_count", min=0, reverse=True) == []


def test_what_looks_at_every_id(app: Lowq) -> None:
    rows: list[tuple[dict[str, Any], list[int]]] = [
        ({"match": "0*"}, list(range(10))),
        ({"order_by": "id"}, list(range(20))),
        ({"match": "0*", "payload": "customer:2"}, [2, 7]),
    ]
    for options, wanted in rows:
        expected = sorted((name, f"{n:02d}") for name in NAMES for n in wanted)
        assert sorted(all_of(app, 7, **options)) == expected, options


def test_a_queue_whose_keys_have_another_type_is_left_out(app: Lowq) -> None:
    for shard in range(3):
        key = shard_prefix(app.config.namespace, "Mail", shard) + "due"
        app.client.command("DEL", key)
        app.client.command("SET", key, "x")
    assert {name for name, _ in all_of(app, 50)} == {"Bills", "Orders"}


def test_by_a_field_of_a_payload(app: Lowq) -> None:
    queue = app.queue("Orders")
    assert [job.id for job in queue.jobs(payload="customer:3")] == ["03", "08", "13", "18"]
    assert [job.id for job in queue.jobs(payload="customer:3", reverse=True, limit=2)] == ["18", "13"]
    assert {item.queue for item in app.jobs(payload="from:Mail")} == {"Mail"}
    queue.push({"id": "03", "payload": {"customer": 9}})
    assert [job.id for job in queue.jobs(payload="customer:9")] == ["03"], "one of its payloads"


def test_a_page_ends_after_so_many_jobs(app: Lowq, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sifting, "MAX_LOOKED", 6)
    monkeypatch.setattr("lowq.inspection.queries.STEP", 3)
    monkeypatch.setattr("lowq.inspection.all_queues.STEP", 3)
    queue = app.queue("Orders")
    page = queue.jobs(payload="customer:4", limit=10)
    assert ([job.id for job in page], page.looked) == (["04"], 6)
    found, pages = [job.id for job in page], 1
    while page.cursor:
        page = queue.jobs(payload="customer:4", limit=10, after=page.cursor)
        found, pages = found + [job.id for job in page], pages + 1
    assert (found, pages) == (["04", "09", "14", "19"], 4)
    assert len(all_of(app, 10, payload="customer:4")) == 12
    found_at = app.jobs(payload="from:Bills", limit=1)
    assert found_at.looked == 3


def test_steps_tell_how_far_it_is(app: Lowq, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowq.inspection.all_queues.STEP", 10)
    pages: list[FoundPage] = list(app.jobs_in_steps(payload="customer:4", limit=50, interval=0))
    assert [page.looked for page in pages] == [10, 20, 30, 40, 50, 60]
    assert [len(page) for page in pages] == sorted(len(page) for page in pages)


def test_nobody_finds_what_is_masked(app: Lowq) -> None:
    def redact(payload: Any) -> Any:
        return {**payload, "customer": "masked"}

    queue = app.queue("Orders")
    assert not list(app.jobs_in_steps(payload="customer:3", redact=redact))[-1].found
    assert list(app.jobs_in_steps(payload="customer:masked", redact=redact))[-1].found
    assert not list(queue.jobs_in_steps(payload="customer:3", redact=redact))[-1].jobs
    assert list(queue.jobs_in_steps(payload="customer:masked", redact=redact))[-1].jobs


def test_by_shard(app: Lowq) -> None:
    queue = app.queue("Orders")
    for shard in range(3):
        expected = [f"{n:02d}" for n in range(20) if queue.shard_of(f"{n:02d}") == shard]
        assert [job.id for job in queue.jobs(shard=shard)] == expected
        assert [job.id for job in queue.jobs(shard=shard, order_by="id")] == expected
    with pytest.raises(ConfigError, match="shards 0 to 2"):
        queue.jobs(shard=3)
    with pytest.raises(ConfigError, match="within one queue"):
        app.jobs(shard=1)


def test_what_makes_no_sense_is_refused(app: Lowq) -> None:
    rows: list[dict[str, Any]] = [{"payload": "x"}, {"error": ""}, {"error": "x" * 513}, {"shard": -1}, {"shard": True}]
    for options in rows:
        with case(options), pytest.raises(ConfigError, match=f"{next(iter(options))}="):
            app.queue("Orders").jobs(**options)


def test_what_is_no_cursor_is_refused(app: Lowq) -> None:
    for after in ("", "x", "cCsx", "cCs1LjAgT3JkZXJz", "cCtuYW4gT3JkZXJzIDE"):
        with case(after), pytest.raises(ConfigError, match="after"):
            app.jobs(after=after)


def test_a_cursor_of_another_order_is_refused(app: Lowq) -> None:
    cursor = app.jobs(limit=1).cursor
    with pytest.raises(ConfigError, match="another order"):
        app.jobs(limit=1, after=cursor, reverse=True)
