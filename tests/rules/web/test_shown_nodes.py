"""The page of the nodes: what a node reported with its last heartbeat."""

import time

import lowq
from tests.rules.web.conftest import Open
from tests.rules.web.hand import heartbeat
from tests.rules.web.shown import SLOW, Element, Reader


def node_of(page: Element, name: str) -> Element:
    """The part of the page that is about it."""
    (found,) = (part for part in page.every("section") if any(name in head.text for head in part.every("h2")))
    return found


def test_every_node_is_shown_as_it_reported(app: lowq.Lowq, reader: Reader) -> None:
    now = time.time()
    app.queue("Orders", 8).push({"id": "order-7"})
    heartbeat(app, "gone:1:cccccc", now - 500, silence=499)
    heartbeat(
        app, "shop-1:4711:aaaaaa", now - 90,
        host="shop-1", pid=4711, version="1.2.3", threads=4, started_at=now - 7450, memory=150 * 2**20, quiet=False,
        shards={"Orders": [0, 3, 5], "Refunds": [1]},
        performing=[
            None,
            {"queue": "Orders", "shard": 3, "ids": ["order-7", "a/b"], "seconds": 33.0},
            None,
            {"queue": "Refunds", "shard": 1, "ids": ["r-1"], "seconds": 5.0},
        ],
    )  # fmt: skip
    heartbeat(
        app, "shop-2:99:bbbbbb", now - 2, host="shop-2", pid=99, version="1.2.4", started_at=now - 9, quiet=True,
        shards={}, performing=[None],
        tasks=12, longest_tasks=[{"queue": "Orders", "shard": 2, "ids": ["order-9"], "count": 1, "seconds": 70.0}],
    )  # fmt: skip
    page = reader.page("/nodes")
    assert "2 alive" in page.text
    assert "gone:1" not in page.text

    busy = node_of(page, "shop-1:4711:aaaaaa")
    facts = busy.facts
    assert {word: facts[word].text for word in ("Host", "Process", "Version", "Memory")} == {
        "Host": "shop-1", "Process": "4711", "Version": "1.2.3", "Memory": "150.0 MB",
    }  # fmt: skip
    assert facts["Up"].lasts(7450)
    assert facts["Heartbeat"].lasts(90)
    assert "ago" in facts["Heartbeat"].text
    assert [link.text for link in facts["Shards"].every("a")] == ["Orders 3", "Refunds 1"]
    assert "0, 3, 5" in next(facts["Shards"].every("a")).attributes["title"]
    assert "quiet" not in busy.find("h2").text
    assert [button.text for button in busy.every("button")] == ["Quiet", "Reload", "Stop"]

    threads = busy.table("Thread or task", "Performs", "Ids", "For")
    assert [row["Thread or task"].text for row in threads] == ["0", "1", "2", "3"]
    assert [row["Performs"].text for row in threads] == ["idle", "Orders shard 3", "idle", "Refunds shard 1"]
    assert [[link.text for link in row["Ids"].every("a")] for row in threads] == [[], ["order-7", "a/b"], [], ["r-1"]]
    assert threads[1]["Ids"].link == "/queues/Orders/job?id=order-7"
    # What it reported, whether or not with the time that has passed since then.
    assert threads[1]["For"].lasts(33, 33 + 90 + SLOW)
    assert threads[3]["For"].lasts(5, 5 + 90 + SLOW)
    assert [threads[n]["For"].text for n in (0, 2)] == ["", ""]

    other = node_of(page, "shop-2:99:bbbbbb")
    assert "quiet" in other.find("h2").text
    assert [button.text for button in other.every("button")] == ["Reload", "Stop"]
    assert other.facts["Memory"].text == "unknown"
    assert other.facts["Shards"].text == "none"
    tasks = other.table("Thread or task", "Performs", "For")
    assert [row["Thread or task"].text for row in tasks] == ["0", "task", "tasks"]
    assert [row["Performs"].text for row in tasks] == ["idle", "Orders shard 2", "11 more, started later"]
    assert tasks[1]["For"].lasts(70, 70 + SLOW)


def test_the_page_of_all_queues_counts_the_nodes(app: lowq.Lowq, browse: Open) -> None:
    for count in (0, 3):
        for n in range(count):
            heartbeat(app, f"shop:{n}:aaaaa{n}", time.time())
        nodes = Reader(browse()).page("/").facts["Nodes"]  # one that has not looked yet
        assert f"{count} alive" in nodes.text
        assert nodes.link == "/nodes"
