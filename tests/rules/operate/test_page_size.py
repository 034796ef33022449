"""A page of jobs is bounded in bytes, too: however large they are, little travels, and none is left out."""

import itertools
import json
from collections.abc import Iterator
from contextlib import closing

import pytest
from click.testing import CliRunner
from starlette.testclient import TestClient

import lowq_web
from lowq import Lowq
from lowq.cli import main
from lowq.inspection import Page
from lowq.operate.jobs import MAX_BYTES, MAX_PAGE_BYTES
from tests.rows import case
from tests.tiers import real_redis_often

COUNT = 24
MIB = 2**20
#: What comes with one reply more, after there was room for it.
MOST = MAX_PAGE_BYTES + 3 * MAX_BYTES


@pytest.fixture
def app(store_url: str) -> Iterator[Lowq]:
    """Jobs of almost 1 MiB each, due in the order of their ids."""
    with closing(Lowq(redis_url=store_url, max_payload_bytes=8 * MIB)) as app:
        queue = app.queue("Fat", 5)
        for number in range(COUNT):
            queue.push({"id": f"{number:02d}", "payload": "x" * (MIB - 100), "perform_at": 2e9 + number})
        yield app


def size_of(page: Page) -> int:
    return sum(len(payload) for job in page for payload, _ in job.payloads)


def test_large_jobs_come_in_shorter_pages_and_each_once(app: Lowq) -> None:
    queue = app.queue("Fat")
    for order_by, reverse in itertools.product(("perform_at", "id"), (False, True)):
        with case(order_by, reverse):
            page = queue.jobs(order_by=order_by, reverse=reverse, limit=COUNT)
            found = [job.id for job in page]
            while page.cursor is not None:
                assert 0 < size_of(page) <= MOST
                page = queue.jobs(order_by=order_by, reverse=reverse, limit=COUNT, after=page.cursor)
                found += [job.id for job in page]
            assert found == sorted((f"{number:02d}" for number in range(COUNT)), reverse=reverse)


def test_a_page_has_a_job_even_if_it_alone_is_too_large(app: Lowq) -> None:
    queue = app.queue("Fattest", 1)
    for job_id in ("1", "2"):
        queue.push({"id": job_id, "payload": "x" * 6 * MIB, "delay": int(job_id)})
    page = queue.jobs()
    assert [job.id for job in page] == ["1"]
    page = queue.jobs(after=page.cursor)
    assert ([job.id for job in page], page.cursor) == (["2"], None)


@real_redis_often
def test_very_many_small_payloads_count_as_well(store_url: str) -> None:
    with closing(Lowq(redis_url=store_url)) as app:
        queue = app.queue("Many", 1)
        queue.push({"id": job_id, "payload": number, "score": number} for job_id in range(60) for number in range(1000))
        page = queue.jobs(limit=60)
        assert 0 < len(page) < 50
        assert page.cursor is not None


def test_jobs_that_are_gone_end_no_page(app: Lowq) -> None:
    """Found by a walk, and away when they are looked up: they take no room, and the page goes on behind them."""
    queue = app.queue("Fat")
    page = queue.jobs(limit=2)
    queue.delete([f"{number:02d}" for number in range(2, COUNT - 1)])
    page = queue.jobs(limit=COUNT, after=page.cursor)
    assert ([job.id for job in page], page.cursor) == ([f"{COUNT - 1:02d}"], None)


def test_pages_in_steps_api_and_command_line_are_bounded_by_that(app: Lowq) -> None:
    for page in app.queue("Fat").jobs_in_steps(match="*", limit=COUNT, interval=0):
        assert size_of(page) <= MOST
    client = TestClient(lowq_web.create_app(app), base_url="http://127.0.0.1")
    answer = client.get(f"/api/v1/queues/Fat/jobs?limit={COUNT}")
    assert len(answer.content) < MOST + 10_000
    assert answer.json()["cursor"]
    assert "Next page" in client.get("/queues/Fat").text
    if not app.config.redis_url.startswith("memory"):
        shown = CliRunner().invoke(main, ["jobs", "Fat", "--json", "--redis-url", app.config.redis_url])
        assert json.loads(shown.stdout)["cursor"]
