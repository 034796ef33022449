"""Streams of live numbers: what they send, that they end, and what they cost."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

import lowq
import lowq_web
from lowq_web import live, stats_cache
from lowq_web.context import AppContext
from lowq_web.stats_cache import Snapshot
from tests.redis_server import RedisServer
from tests.rules.web.served import Stream, connected, get, served
from tests.waiting import NEVER, PATIENCE, until

#: A dashboard whose streams end sooner than usual.
IMPATIENT = """
from lowq_web import app, live

live.LIFETIME = 1.5
"""


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
        status, events = get(address, f"/live{query}")
        assert (status, events.endswith(b"retry: 500\n\n")) == (200, True)
        figures = json.loads(events.decode().partition("data: ")[2].partition("\n")[0])
        assert (figures["total"]["length"], set(figures["queues"])) == (4, names)


def test_what_is_fetched_again_is_read_once_for_all_viewers(app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats_cache, "INTERVAL", 3600.0)
    app.queue("<b>", 3).push({"id": 1})
    read: list[str] = []
    dashboard = lowq_web.create_app(app)
    client = TestClient(dashboard, base_url="http://127.0.0.1")
    context: AppContext = dashboard.state.context

    def counted(name: str) -> Callable[[lowq.Lowq], Any]:
        found = getattr(type(context.app), name)

        def count(app: lowq.Lowq) -> Any:
            read.append(name)
            return found(app)

        return count

    for name in ("nodes", "redis_info", "overview"):
        monkeypatch.setattr(type(context.app), name, counted(name))
    pages = [client.get(path) for path in ("/", "/parts", "/parts", "/parts")]
    assert [page.status_code for page in pages] == [200] * 4
    assert sorted(read) == ["nodes", "overview", "redis_info"]
    parts = [re.findall(r'data-part id="([^"]+)"', page.text) for page in pages]
    assert parts[0] == parts[1] == ["part-banners", "part-stuck", "part-shards", "part-redis"]
    assert "&lt;b&gt;" in pages[1].text
    assert "<b>" not in pages[1].text


class Viewer:
    """Somebody who watches a stream of an application that is called as servers call it, in this event loop."""

    def __init__(self, dashboard: Any) -> None:
        headers = [(b"host", b"127.0.0.1")]
        scope = {"type": "http", "method": "GET", "path": "/live", "raw_path": b"/live", "query_string": b"",
                 "headers": headers, "server": ("127.0.0.1", 80), "client": ("127.0.0.1", 5)}  # fmt: skip
        self._sent: asyncio.Queue[Any] = asyncio.Queue()
        self._stays = asyncio.Event()
        self.served = asyncio.ensure_future(dashboard(scope, self._receive, self._sent.put))

    async def _receive(self) -> Any:
        await self._stays.wait()

    async def event(self) -> Any:
        """The figures of the next event."""
        while True:
            message = await self._sent.get()
            if body := message.get("body"):
                name, _, data = body.decode().partition("\ndata: ")
                assert name == "event: figures"
                return json.loads(data)


async def turns() -> None:
    """The event loop has nothing left to do by itself."""
    for _ in range(100):
        await asyncio.sleep(0)


@pytest.fixture
def lasting(app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A dashboard whose streams and snapshots last longer than any test."""
    monkeypatch.setattr(live, "LIFETIME", NEVER)
    monkeypatch.setattr(stats_cache, "INTERVAL", NEVER)
    app.queue("Orders", 3).push({"id": 1})
    return lowq_web.create_app(app)


def test_a_stream_wakes_for_a_new_snapshot_and_for_the_end_of_the_server_and_for_nothing_else(
    lasting: Any, app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch
) -> None:
    context: AppContext = lasting.state.context
    asked, watch = [0], context.stats_cache.watch

    async def counted() -> Snapshot:
        asked[0] += 1
        return await watch()

    async def run() -> None:
        loop, timers = asyncio.get_running_loop(), list[float]()
        call_at = loop.call_at

        def noted(when: float, *args: Any, **options: Any) -> asyncio.TimerHandle:
            timers.append(when - loop.time())
            return call_at(when, *args, **options)

        viewer = Viewer(lasting)
        assert (await viewer.event())["total"]["length"] == 1
        await turns()
        monkeypatch.setattr(context.stats_cache, "watch", counted)
        monkeypatch.setattr(loop, "call_at", noted)
        app.queue("Orders").push({"id": 2})
        context.stats_cache.forget()
        await asyncio.to_thread(context.stats_cache.figures)  # as a page does after an action
        assert (await viewer.event())["total"]["length"] == 2
        await turns()
        seen = asked[0]
        assert seen <= 2, "once, and once more as that woke it"
        context.open_streams.close()
        await viewer.served
        assert asked[0] == seen
        assert min(timers) > 1, "a stream polls"

    asyncio.run(asyncio.wait_for(run(), PATIENCE))


def test_a_snapshot_that_comes_while_another_is_awaited_is_sent_at_once(
    lasting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    context: AppContext = lasting.state.context
    first = context.stats_cache.figures()
    snapshots = [first, replace(first, at=first.at + 1)]

    async def watch() -> Snapshot:
        found = snapshots[0]
        if len(snapshots) > 1:
            snapshots.pop(0)
            context.open_streams.wake()  # the next one has been read
            await asyncio.sleep(0)
        return found

    async def run() -> None:
        monkeypatch.setattr(context.stats_cache, "watch", watch)
        viewer = Viewer(lasting)
        assert [(await viewer.event())["at"] for _ in range(2)] == [first.at, first.at + 1]
        context.open_streams.close()
        await viewer.served

    asyncio.run(asyncio.wait_for(run(), PATIENCE))


def test_a_server_ends_on_term_while_a_page_is_live(tmp_path: Path, redis_url: str) -> None:
    """However it was started: this one has no time limit of its own for open connections."""
    (tmp_path / "app.py").write_text(IMPATIENT)
    command = [sys.executable, "-m", "uvicorn", "app:app", "--port", "0"]
    environment = {**os.environ, "LOWQ_REDIS_URL": redis_url}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as running:
        try:
            assert running.stderr is not None
            line = next(line for line in running.stderr if "running on" in line)
            at = next(word for word in line.split() if word.startswith("http://"))
            with Stream(at) as stream:
                assert stream.event()[0] == "figures"
                running.send_signal(signal.SIGTERM)
                assert running.wait(PATIENCE) in (0, -signal.SIGTERM)
        finally:
            if running.poll() is None:
                running.kill()


def test_a_slot_is_taken_before_the_stream_begins_and_given_back_after_it(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "LIFETIME", NEVER)  # or the first ones end before the last one comes
    # Not one after the other: none of them has begun when the last one comes.
    began = threading.Barrier(live.MAX_STREAMS + 20)
    statuses = []
    with ExitStack() as stack:

        def come() -> None:
            began.wait()
            stream = Stream(address)
            statuses.append(stream.status)
            stack.push(stream)

        viewers = [threading.Thread(target=come) for _ in range(began.parties)]
        for viewer in viewers:
            viewer.start()
        for viewer in viewers:
            viewer.join()
        assert Counter(statuses) == {200: live.MAX_STREAMS, 503: 20}
    until(lambda: get(address, "/live", method="HEAD")[0] == 200, "a free slot")


def test_head_gets_the_headers_only(address: str) -> None:
    with connected(address) as connection:
        connection.request("HEAD", "/live")
        answer = connection.getresponse()
        assert (answer.status, answer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        answer.read()
        connection.request("GET", "/healthz")  # on the same connection
        assert connection.getresponse().status == 200


class TestRedisHangs:
    """It is there and does not answer: every call takes as long as its time-out."""

    @pytest.fixture(autouse=True)
    def impatient(self, patient: None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(stats_cache, "CLOCK_PATIENCE", 2.0)
        monkeypatch.setattr(stats_cache, "PATIENCE", 10.0)

    def test_nobody_waits_for_it_but_those_who_asked_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(live, "LIFETIME", NEVER)
        with RedisServer() as server:
            app = lowq.Lowq(redis_url=server.url)
            app.queue("Orders", 3).push({"id": 1})
            with served(lowq_web.create_app(app)) as address, ExitStack() as stack:
                streams = [stack.enter_context(Stream(address)) for _ in range(60)]
                for stream in streams:
                    # Behind trouble, perhaps: a busy machine takes long, too.
                    assert "figures" in iter(lambda of=stream: of.event()[0], "end")  # type: ignore[misc]
                server.pause()
                try:
                    for path, expected in (
                        ("/", 503), ("/healthz", 503), ("/static/app.css", 200), ("/", 503), ("/queues/Orders", 503),
                        ("/api/v1/stats", 503), ("/metrics", 503), ("/static/app.css", 200), ("/healthz", 503),
                    ):  # fmt: skip
                        assert get(address, path)[0] == expected, path
                    for stream in streams[:3]:
                        # Behind figures, perhaps, that were read before Redis hung.
                        assert "trouble" in iter(lambda of=stream: of.event()[0], "end")  # type: ignore[misc]
                finally:
                    server.cont()
                until(lambda: get(address, "/healthz")[0] == 200, "health")
                # A page shows what was read within the last second, before that.
                until(lambda: get(address, "/")[0] == 200, "pages")
            app.close()

    def test_health_shows_outsiders_nothing_of_where_redis_is(self) -> None:
        with RedisServer() as server:
            app = lowq.Lowq(redis_url=server.url)
            with served(lowq_web.create_app(app)) as address:
                assert get(address, "/healthz") == (200, b'{"status":"ok"}')
                server.stop()
                until(lambda: get(address, "/healthz")[0] == 503, "word of it")
                assert get(address, "/healthz")[1] == b'{"error":"Redis does not answer"}'
            app.close()
