"""What the pages say of priority, expiry, capacity and consumers."""

import re

import pytest
from starlette.testclient import TestClient

import lowq
from tests.waiting import PATIENCE
from tests.web.test_pages import visible


def words(client: TestClient, path: str) -> str:
    """What is to be read on a page."""
    return " ".join(visible(client.get(path).text).split())


def test_a_queue_says_how_full_it_is_and_what_has_expired(app: lowq.Lowq, client: TestClient) -> None:
    queue = app.queue("mail", shards_count=1, capacity=20)
    queue.push([{"id": str(number)} for number in range(18)])
    assert "holds 18 of 20 · 1 shard" in words(client, "/queues/mail")
    assert re.search(r"1 shard\s+capacity 20", words(client, "/"))
    assert 'lowq_capacity{queue="mail"} 20.0' in client.get("/metrics").text
    assert "expired" not in words(client, "/queues/mail")
    queue.put("late", ttl=0.001)
    with queue.consumer() as consumer:
        assert len(consumer.take(100, timeout=PATIENCE)) == 18  # the sweep comes first
        assert "expired 1" in words(client, "/queues/mail")


def test_a_queue_without_options_says_nothing_of_them(app: lowq.Lowq, client: TestClient) -> None:
    app.queue("mail", shards_count=2).push({"id": "a"})
    assert "· 2 shards" in words(client, "/queues/mail")
    assert "holds" not in words(client, "/queues/mail")
    assert "capacity" not in words(client, "/")
    assert "priority" not in words(client, "/queues/mail")
    assert 'lowq_capacity{queue="mail"}' not in client.get("/metrics").text


def test_jobs_say_their_priority(app: lowq.Lowq, client: TestClient) -> None:
    app.queue("mail", shards_count=1).push([{"id": "a", "priority": 9}, {"id": "b"}])
    listed = words(client, "/queues/mail")
    assert re.search(r"\ba\s+priority 9", listed)
    assert not re.search(r"\bb\s+priority", listed)
    assert "Priority 9 (0 is first)" in words(client, "/queues/mail/job?id=a")


@pytest.mark.parametrize("waits", [False, True])
def test_of_a_job_in_the_hands_of_a_consumer_nothing_is_said_that_would_stop_its_process(
    app: lowq.Lowq, client: TestClient, waits: bool
) -> None:
    """Who has no handler for TTIN is suspended by it."""
    queue = app.queue("mail", shards_count=1)
    queue.push([{"id": "a"}])
    with queue.consumer(session="importer") as consumer:
        (job,) = consumer.take(timeout=PATIENCE)
        if waits:
            queue.push([{"id": "b"}])
        page = words(client, f"/queues/mail/job?id={'b' if waits else 'a'}")
        assert re.search(r"(by|which) consumer session:", page)
        assert "TTIN" not in page
        assert ("Jobs are taken by hand there" in page) is not waits
        job.ack()
