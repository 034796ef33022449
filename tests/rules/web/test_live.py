"""Streams of live numbers: what they send, that they end, and what they cost."""

import asyncio
import json
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

import pytest
from starlette.testclient import TestClient

import lowq
import lowq_web
from lowq_web import live, stats_cache
from lowq_web.context import AppContext
from lowq_web.stats_cache import Snapshot
from tests.redis_server import RedisServer
from tests.rules.web.served import Stream, get, served
from tests.waiting import NEVER, PATIENCE, until


@pytest.fixture
def address(app: lowq.Lowq) -> Iterator[str]:
    app.queue("Orders", 3).push({"id": 1})
    with served(lowq_web.create_app(app)) as address:
        yield address


def test_figures_are_sent_at_once_and_when_they_change(
    address: str, app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "LIFETIME", NEVER)
    with Stream(address) as stream:
        name, figures = stream.event()
        assert name == "figures"
        assert figures["queues"]["Orders"]["length"] == figures["total"]["length"] == 1
        app.queue("Orders").push([{"id": 2}, {"id": 3}])
        # Before those that have both there may be some that were read before, or between the two.
        until(lambda: stream.event()[1]["total"]["length"] == 3, "figures with both")


def test_streams_end_by_themselves_and_have_only_the_queues_of_a_page(
    address: str, app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "LIFETIME", 0.3)
    for name in ("Mail", "a&b", "Bills"):
        app.queue(name, 1).push({"id": 1})
    for query, names in (
        ("", {"Orders", "Mail", "a&b", "Bills"}), ("?queue=Mail&queue=a%26b&queue=nobody", {"Mail", "a&b"}),
        ("?queue=", set()),
    ):  # fmt: skip

        def sent(query: str = query) -> str:
            status, events = get(address, f"/live{query}")
            assert (status, events.endswith(b"retry: 500\n\n")) == (200, True)
            return events.decode().partition("data: ")[2].partition("\n")[0]

        figures = json.loads(until(sent, "figures"))  # a stream may be over before it has begun
        assert (figures["total"]["length"], set(figures["queues"])) == (4, names)


def test_what_is_fetched_again_is_read_once_for_all_viewers(app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats_cache, "INTERVAL", NEVER)
    app.queue("<b>", 3).push({"id": 1})
    read: list[str] = []
    dashboard = lowq_web.create_app(app)
    client, kind = TestClient(dashboard, base_url="http://127.0.0.1"), type(dashboard.state.context.app)
    for name in ("nodes", "redis_info", "overview"):
        found = getattr(kind, name)

        def counted(app: lowq.Lowq, name: str = name, found: Any = found) -> Any:
            read.append(name)
            return found(app)

        monkeypatch.setattr(kind, name, counted)
    pages = [client.get(path) for path in ("/", "/parts", "/parts", "/parts")]
    assert [page.status_code for page in pages] == [200] * 4
    assert sorted(read) == ["nodes", "overview", "redis_info"]
    parts = [re.findall(r'data-part id="([^"]+)"', page.text) for page in pages]
    assert parts[0] == parts[1] == ["part-banners", "part-stuck", "part-shards", "part-redis"]
    assert ("&lt;b&gt;" in pages[1].text, "<b>" in pages[1].text) == (True, False)


def test_a_stream_wakes_for_a_new_snapshot_and_for_the_end_of_the_server_and_for_nothing_else(
    app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "LIFETIME", NEVER)
    monkeypatch.setattr(stats_cache, "INTERVAL", NEVER)
    app.queue("Orders", 3).push({"id": 1})
    dashboard: Any = lowq_web.create_app(app)
    context: AppContext = dashboard.state.context
    asked, timers, watch = [0], list[float](), context.stats_cache.watch
    scope: Any = {"type": "http", "method": "GET", "path": "/live", "raw_path": b"/live", "query_string": b"",
             "headers": [(b"host", b"127.0.0.1")], "server": ("127.0.0.1", 80), "client": ("127.0.0.1", 5)}  # fmt: skip

    async def counted() -> Snapshot:
        asked[0] += 1
        return await watch()

    async def run() -> None:
        loop, sent, stays = asyncio.get_running_loop(), asyncio.Queue[Any](), asyncio.Event()
        call_at, viewer = loop.call_at, asyncio.ensure_future(dashboard(scope, stays.wait, sent.put))

        def noted(when: float, *args: Any, **options: Any) -> asyncio.TimerHandle:
            timers.append(when - loop.time())
            return call_at(when, *args, **options)

        async def figures_of(length: int) -> None:
            found = None
            while found != length:
                data = (await sent.get()).get("body", b"").partition(b"\ndata: ")[2]
                found = json.loads(data)["total"]["length"] if data else None
            for _ in range(100):
                await asyncio.sleep(0)  # the event loop has nothing left to do by itself

        await figures_of(1)
        monkeypatch.setattr(context.stats_cache, "watch", counted)
        monkeypatch.setattr(loop, "call_at", noted)
        app.queue("Orders").push({"id": 2})
        context.stats_cache.forget()
        await asyncio.to_thread(context.stats_cache.figures)  # as a page does after an action
        await figures_of(2)
        seen = asked[0]
        assert seen <= 2, "once, and once more as that woke it"
        context.open_streams.close()
        await viewer
        assert asked[0] == seen
        assert min(timers) > 1, "a stream polls"

    asyncio.run(asyncio.wait_for(run(), PATIENCE))


def test_a_slot_is_taken_before_the_stream_begins_and_given_back_after_it(
    app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "LIFETIME", NEVER)  # or the first ones end before the last one comes
    monkeypatch.setattr(live, "MAX_STREAMS", 20)
    with served(lowq_web.create_app(app)) as address:
        # Not one after the other: none of them has begun when the last one comes.
        with ThreadPoolExecutor(30) as pool, ExitStack() as stack:
            streams = [stack.enter_context(stream) for stream in pool.map(Stream, [address] * 30)]
            assert Counter(stream.status for stream in streams) == {200: 20, 503: 10}
        until(lambda: get(address, "/live", method="HEAD")[0] == 200, "a free slot")


def test_nobody_waits_for_a_redis_that_hangs_but_those_who_asked_it(
    patient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stats_cache, "CLOCK_PATIENCE", 2.0)
    monkeypatch.setattr(stats_cache, "PATIENCE", 10.0)
    monkeypatch.setattr(live, "LIFETIME", NEVER)

    def opened(address: str) -> Stream | None:
        stream = Stream(address)
        if stream.status == 200:
            return stream
        stream.__exit__()
        return None

    def event(stream: Stream, name: str) -> None:
        """Behind others, perhaps: a busy machine takes long, too."""
        until(lambda: stream.event()[0] == name, name)

    with RedisServer() as server, closing(lowq.Lowq(redis_url=server.url)) as app:
        app.queue("Orders", 3).push({"id": 1})
        with served(lowq_web.create_app(app)) as address, ExitStack() as stack:
            streams = list[Stream]()
            for _ in range(30):
                stream = until(lambda: opened(address), "a stream: to a busy machine Redis may seem to be away")
                assert stream is not None
                streams.append(stack.enter_context(stream))
            for stream in streams:
                event(stream, "figures")
            server.pause()
            try:
                for path, expected in (
                    ("/", 503), ("/healthz", 503), ("/static/app.css", 200), ("/queues/Orders", 503),
                    ("/api/v1/stats", 503), ("/metrics", 503), ("/static/app.css", 200), ("/healthz", 503),
                ):  # fmt: skip
                    assert get(address, path)[0] == expected, path
                event(streams[0], "trouble")
            finally:
                server.cont()
            until(lambda: get(address, "/healthz") == (200, b'{"status":"ok"}'), "health")
            # A page shows what was read within the last second, before that.
            until(lambda: get(address, "/")[0] == 200, "pages")
            server.stop()
            until(lambda: get(address, "/healthz")[0] == 503, "word of it")
            assert get(address, "/healthz")[1] == b'{"error":"Redis does not answer"}', "and nothing of where it is"
