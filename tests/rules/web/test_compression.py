"""Answers are small where that is wanted, and streams come as soon as ever."""

import gzip
import threading
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

import lowq
import lowq_web
from lowq import inspection
from tests.rows import case
from tests.rules.web.served import connected, served
from tests.waiting import PATIENCE


def test_what_is_sent_is_packed_unless_it_is_short(client: TestClient) -> None:
    for path in ("/", "/static/app.js", "/api/v1/openapi.json"):
        with case(path):
            plain = client.get(path, headers={"accept-encoding": "identity"})
            with client.stream("GET", path, headers={"accept-encoding": "br, gzip;q=0.5"}) as answer:
                packed = b"".join(answer.iter_raw())
            assert "content-encoding" not in plain.headers
            assert answer.headers["content-encoding"] == "gzip"
            assert int(answer.headers["content-length"]) == len(packed) < len(plain.content) / 2
            assert "accept-encoding" in answer.headers["vary"].lower()
            # The page has the time in it.
            assert len(gzip.decompress(packed)) == pytest.approx(len(plain.content), abs=100 if path == "/" else 0)
    assert "content-encoding" not in client.get("/healthz", headers={"accept-encoding": "gzip"}).headers


def test_pieces_of_a_stream_are_held_by_nobody(app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second piece is made only when the first has been read."""
    app.queue("Orders", 1).push({"id": "a"})
    read = threading.Event()
    empty: Any = inspection.Page([], None)

    def steps(*_: Any, **__: Any) -> Iterator[inspection.Page]:
        yield empty
        assert read.wait(PATIENCE)
        yield empty

    monkeypatch.setattr(lowq.Queue, "jobs_in_steps", steps)
    with served(lowq_web.create_app(app)) as address, connected(address) as connection:
        connection.request("GET", "/queues/Orders?match=zzz", headers={"accept-encoding": "gzip"})
        answer = connection.getresponse()
        assert answer.headers["content-encoding"] == "gzip"
        unpack, page = zlib.decompressobj(16 + zlib.MAX_WBITS), b""
        while b"nothing new yet" not in page:
            page += unpack.decompress(answer.read1())
        assert b"No job matches" not in page
        read.set()
        page += unpack.decompress(answer.read())
        assert b"No job matches" in page
        assert unpack.eof


def test_events_are_left_alone(app: lowq.Lowq) -> None:
    with served(lowq_web.create_app(app)) as address, connected(address) as connection:
        connection.request("GET", "/live", headers={"accept-encoding": "gzip"})
        answer = connection.getresponse()
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert "content-encoding" not in answer.headers
        assert answer.readline() == b"event: figures\n"
        answer.close()
