"""The page of a queue's shards, and the heat maps: owner, fence, length, lag and oldest id of shards that are known."""

import time
from dataclasses import dataclass

import pytest
from starlette.testclient import TestClient

import lowq
from lowq import inspection
from lowq_web.chart import ALL_CELLS, MOST_CELLS, HeatMap, heat_map, heat_maps
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
    owner: str | None
    taken: int = 0
    morgue: int = 0


KNOWN = [
    Known(lag=60, waiting=12, owner=NODE, taken=2, morgue=3),
    Known(lag=0, waiting=101, owner=STRANGER, morgue=1),
    Known(lag=3000, waiting=2, owner=None),
    Known(lag=0, waiting=0, owner=None),
    Known(lag=300, waiting=5, owner=NODE, taken=1),
    Known(lag=10, waiting=30, owner=None, morgue=2),
]


@pytest.fixture
def hand(app: lowq.Lowq) -> Hand:
    """Of a queue as it is `KNOWN`."""
    now, hand = time.time(), Hand(app, "Orders", len(KNOWN))
    early = now - 50_000
    for index, known in enumerate(KNOWN):
        for job_id in hand.ids(index, known.morgue, "buried"):
            hand.push(job_id, early)
            hand.queue.bury(job_id, now=early)
        if known.owner is not None:
            hand.own(index, early + index, ITS_NONCE if known.owner == NODE else STRANGER)
        if known.taken:
            taken = hand.ids(index, known.taken, "taken")
            for job_id in taken:
                hand.push(job_id, early)
            hand.take(taken, early + index)
        for n, job_id in enumerate(hand.ids(index, known.waiting)):
            hand.push(job_id, now - known.lag if n == 0 and known.lag else now + 3600 + n)
    heartbeat(app, NODE, now)
    return hand


def rows_of(page: Element) -> list[Row]:
    return page.table("Shard", "Owner", "Fence")


def test_every_shard_is_shown_as_it_is(hand: Hand, reader: Reader) -> None:
    rows = rows_of(reader.page("/queues/Orders/shards"))
    assert [row["Shard"].number for row in rows] == list(range(len(KNOWN)))
    for index, (known, row) in enumerate(zip(KNOWN, rows, strict=True)):
        with case(index):
            numbers = tuple(row[word].number for word in ("Queued", "Running", "Dead"))
            assert numbers == (known.waiting, known.taken, known.morgue)
            assert row["Latency"].lasts(known.lag) if known.lag else row["Latency"].lasts(0, 0)
            oldest = hand.ids(index, 1) if known.waiting else []
            assert [id_in(row["Oldest id"])] == oldest if oldest else row["Oldest id"].text == ""
            if known.owner is None:
                assert [row[word].text for word in ("Owner", "Lease", "Fence")] == ["nobody", "", ""]
                continue
            lease = hand.own(index, time.time()).lease.current
            assert known.owner in row["Owner"].text
            assert row["Lease"].lasts(LEASE - 60, LEASE)
            assert lease is not None
            assert row["Fence"].number == lease.fence
    named = reader.page("/").find("p", has="Hottest")
    assert [link.text for link in named.every("a")] == ["Orders 2", "Orders 4", "Orders 0"]
    assert rows_of(reader.page(named.link))[0]["Shard"].number == 2
    hand.queue.pause()
    assert all("paused" in row["Owner"].text for row in rows_of(reader.page("/queues/Orders/shards")))


def overview(name: str, *shard_lags: float) -> inspection.QueueOverview:
    shards = [inspection.ShardInfo(n, 0, 0, 0, lag, "a", 1, 5.0, False, None) for n, lag in enumerate(shard_lags)]
    return inspection.QueueOverview(
        inspection.Stats(name, len(shards), 0, 0, 0, 0, 0, 0, 0, 0.0, 0, 0, 0, False), shards
    )


def test_of_very_many_shards_the_hottest_are_shown_in_their_order() -> None:
    one = overview("one", *(float(n % 700) for n in range(1400)))
    cells = heat_map("one", one.shards).cells
    assert len(cells) == MOST_CELLS
    assert [cell.shard.index for cell in cells] == sorted(cell.shard.index for cell in cells)
    assert min(cell.shard.lag for cell in cells) == 700 - MOST_CELLS / 2
    maps = heat_maps([*(overview(f"q{n:02d}", *[float(n)] * 400) for n in range(60)), overview("hot", 500.0)])
    assert sum(len(item.cells) for item in maps) <= ALL_CELLS
    assert [item.queue for item in maps] == ["q57", "q58", "q59", "hot"], "in the order of the table"


def test_the_heat_maps_of_the_first_page_are_drawn_once_for_all_viewers(
    app: lowq.Lowq, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowq_web.stats_cache.INTERVAL", 600.0)
    drawn: list[str] = []

    def draw(shown: HeatMap) -> str:
        drawn.append(shown.queue)
        return f"[{shown.queue}]"

    monkeypatch.setattr("lowq_web.pages.dashboard.draw_heat", draw)
    for name in ("a", "b"):
        app.queue(name, 2).push({"id": 1})
    for path in ("/", "/parts", "/?sort=due"):
        assert all(f"[{name}]" in client.get(path).text for name in ("a", "b"))
    assert drawn == ["a", "b"]
