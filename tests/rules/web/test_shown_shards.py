"""The page of a queue's shards, and the heat maps: owner, fence, length, lag and oldest id of shards that are known."""

import re
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from starlette.testclient import TestClient

import lowq
import lowq_web
from tests.rows import case
from tests.rules.web.hand import LEASE, Hand, heartbeat
from tests.rules.web.shown import Element, Reader, Row, id_in

#: A node that lives, and what its leases begin with; and a process that no node is known of.
NODE, ITS_NONCE, STRANGER = "shop-1:4711:aaaaaa", "aaaaaa123456", "zzzzzz999999"


@dataclass(frozen=True)
class Known:
    """A shard."""

    #: Seconds; 0: nothing is due.
    lag: int
    waiting: int
    #: The colour and fill that its lag and its length stand for.
    heat: int
    owner: str | None
    taken: int = 0
    morgue: int = 0


KNOWN = [
    Known(lag=60, waiting=12, heat=3, owner=NODE, taken=2, morgue=3),
    Known(lag=0, waiting=101, heat=0, owner=STRANGER, morgue=1),
    Known(lag=3000, waiting=2, heat=5, owner=None),
    Known(lag=0, waiting=0, heat=0, owner=None),
    Known(lag=300, waiting=5, heat=4, owner=NODE, taken=1),
    Known(lag=10, waiting=30, heat=2, owner=None, morgue=2),
]


@dataclass(frozen=True)
class World:
    reader: Reader
    #: Of each shard that is leased.
    fences: dict[int, int]
    #: Of each shard that is not empty: the id that is or was due first.
    oldest: dict[int, str]


@pytest.fixture  # not of the module: its lags grow
def world() -> Iterator[World]:
    app, now = lowq.Lowq(redis_url=f"memory://{uuid.uuid4().hex}"), time.time()
    hand, early = Hand(app, "Orders", len(KNOWN)), now - 50_000
    fences, oldest = {}, {}
    for index, known in enumerate(KNOWN):
        ids = hand.ids(index, known.waiting)
        for job_id in hand.ids(index, known.morgue, "buried"):
            hand.push(job_id, early)
            hand.queue.bury(job_id, now=early)
        if known.owner is not None:
            shard = hand.own(index, early + index, ITS_NONCE if known.owner == NODE else STRANGER)
            assert shard.lease.current is not None
            fences[index] = shard.lease.current.fence
        if known.taken:
            taken = hand.ids(index, known.taken, "taken")
            for job_id in taken:
                hand.push(job_id, early)
            hand.take(taken, early + index)
        for n, job_id in enumerate(reversed(ids)):  # the last one first: its id says nothing of its age
            hand.push(job_id, now - known.lag if n == 0 and known.lag else now + 3600 + n)
        if ids:
            oldest[index] = ids[-1]
    heartbeat(app, NODE, now)
    app.queue("Quiet", 2).push({"id": 1, "delay": 3600})
    yield World(Reader(TestClient(lowq_web.create_app(app), base_url="http://127.0.0.1")), fences, oldest)
    app.close()


def rows_of(page: Element) -> list[Row]:
    return page.table("Shard", "Owner", "Fence")


def test_every_shard_is_shown_as_it_is(world: World) -> None:
    rows = rows_of(world.reader.page("/queues/Orders/shards"))
    assert [row["Shard"].number for row in rows] == list(range(len(KNOWN)))
    for index, (known, row) in enumerate(zip(KNOWN, rows, strict=True)):
        numbers = {word: row[word].number for word in ("Queued", "Running", "Dead")}
        assert numbers == {"Queued": known.waiting, "Running": known.taken, "Dead": known.morgue}, index
        assert row["Latency"].lasts(known.lag) if known.lag else row["Latency"].lasts(0, 0), index
        assert known.owner in row["Owner"].text if known.owner else row["Owner"].text == "nobody", index
        assert row["Fence"].text == str(world.fences.get(index, "")), index
        if known.owner:
            assert row["Lease"].lasts(LEASE - 60, LEASE)
        else:
            assert row["Lease"].text == ""
        assert (id_in(row["Oldest id"]) if row["Oldest id"].text else None) == world.oldest.get(index)
    leads_to = world.reader.page(rows[0]["Oldest id"].link)
    assert world.oldest[0] in leads_to.find("h1").text
    assert len(set(world.fences.values())) == len(world.fences), "a constant would do"


KEYS: dict[str, Callable[[int], int]] = {
    "Shard": lambda index: index,
    "Queued": lambda index: KNOWN[index].waiting,
    "Latency": lambda index: KNOWN[index].lag,
}


def test_a_click_on_a_header_sorts_and_another_one_turns_it_round(world: World) -> None:
    def header(page: Element) -> Element:
        return next(cell for cell in page.every("th") if cell.text == word)

    for word, key in KEYS.items():
        with case(word):
            page = world.reader.page(f"/queues/Orders/shards{'?sort=lag' if word == 'Shard' else ''}")
            orders = []
            for _ in range(2):
                page = world.reader.page(header(page).link)
                orders.append(header(page).attributes["aria-sort"])
                shown = [row["Shard"].number for row in rows_of(page)]
                assert sorted(shown) == list(range(len(KNOWN)))
                assert list(map(key, shown)) == sorted(map(key, shown), reverse=orders[-1] == "descending")
            assert orders == (["ascending", "descending"] if word == "Shard" else ["descending", "ascending"])


@pytest.mark.slow
def test_no_shard_is_missed_or_shown_twice_while_they_change_places(app: lowq.Lowq) -> None:
    hand = Hand(app, "Wide", 450)
    hand.queue.push({"id": n, "delay": 60} for n in range(2000))
    dashboard = lowq_web.create_app(app)
    reader = Reader(TestClient(dashboard, base_url="http://127.0.0.1"))
    address, shown = "/queues/Wide/shards?sort=length&dir=desc", list[int]()
    while address:
        page = reader.page(address)
        shown += [row["Shard"].number for row in rows_of(page)]
        address = next((link.link for link in page.every("a") if link.attributes.get("rel") == "next"), "")
        # What is still to come goes to the front, and what was shown first to the end.
        behind = [index for index in range(450) if index not in shown][-30:]
        hand.queue.push({"id": job_id, "delay": 60} for index in behind for job_id in hand.ids(index, 30, "more"))
        hand.queue.delete([str(n) for n in range(2000) if hand.index(str(n)) in shown[:30]])
        dashboard.state.context.stats_cache.forget()
    assert sorted(shown) == list(range(450))


def test_a_paused_shard_says_so(app: lowq.Lowq, reader: Reader) -> None:
    queue = app.queue("Orders", 3)
    queue.push({"id": 1})
    assert not any("paused" in row["Owner"].text for row in rows_of(reader.page("/queues/Orders/shards")))
    queue.pause()
    assert all("paused" in row["Owner"].text for row in rows_of(reader.page("/queues/Orders/shards")))


# --- heat maps -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    heat: int
    fill: float
    words: str


def cells_in(page: Element, queue: str) -> dict[int, Cell]:
    """The heat map of a queue: shard -> cell."""
    (drawing,) = (svg for svg in page.every("svg") if re.search(rf"\b{queue}\b", svg.attributes.get("aria-label", "")))
    found: dict[int, Cell] = {}
    for element in drawing.every():
        heats = [int(name[-1]) for name in element.classes if re.fullmatch(r"heat-\d", name)]
        if heats:
            words = "".join(str(text) for title in element.every("title") for text in title.children)
            index = re.match(r"shard (\d+)\b", words)
            assert index, words
            fills = [float(each.attributes["height"]) for each in element.every("rect") if "fill" in each.classes]
            found[int(index[1])] = Cell(heats[0], sum(fills), words)
    return found


@pytest.mark.parametrize("address", ["/", "/queues/Orders/shards"])
def test_hot_and_long_shards_stand_out(world: World, address: str) -> None:
    cells = cells_in(world.reader.page(address), "Orders")
    assert {index: cell.heat for index, cell in cells.items()} == {n: known.heat for n, known in enumerate(KNOWN)}
    by_length = sorted(cells, key=lambda index: KNOWN[index].waiting)
    fills = [cells[index].fill for index in by_length]
    assert fills == sorted(fills)
    assert fills[0] == 0 < fills[1]  # an empty shard, and one with two jobs
    assert fills[1] < fills[3] < fills[-1]  # 2, 12 and 101 jobs
    for index, known in enumerate(KNOWN):
        assert f"{known.waiting} queued" in cells[index].words
        assert (known.owner or "no owner") in cells[index].words


def test_the_hottest_shards_are_named_first(world: World) -> None:
    named = world.reader.page("/").find("p", has="Hottest")
    assert [link.text for link in named.every("a")] == ["Orders 2", "Orders 4", "Orders 0"]
    assert re.findall(r"latency (\d+ min)", named.text) == ["50 min", "5 min", "1 min"]
    first = rows_of(world.reader.page(named.link))[0]
    assert first["Shard"].number == 2
