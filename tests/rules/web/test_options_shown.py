"""What the pages say of priority, expiry, capacity and consumers."""

import re

from starlette.testclient import TestClient

import lowq
from tests.rules.web.shown import parse
from tests.waiting import PATIENCE


def words(client: TestClient, path: str) -> str:
    """What is to be read on a page."""
    return parse(client.get(path).text).find("main").text


def test_a_queue_says_how_full_it_is_and_what_has_expired(app: lowq.Lowq, client: TestClient) -> None:
    queue = app.queue("mail", shards_count=1, capacity=20)
    queue.push([{"id": str(number)} for number in range(18)])
    assert "holds 18 of 20" in words(client, "/queues/mail")
    assert "capacity 20" in words(client, "/")
    assert 'lowq_capacity{queue="mail"} 20.0' in client.get("/metrics").text
    assert "expired" not in words(client, "/queues/mail")
    queue.put("late", ttl=0.001)
    with queue.consumer() as consumer:
        assert len(consumer.take(100, timeout=PATIENCE)) == 18  # the sweep comes first
        assert "expired 1" in words(client, "/queues/mail")


def test_a_queue_without_options_says_nothing_of_them_and_jobs_their_priority(
    app: lowq.Lowq, client: TestClient
) -> None:
    queue = app.queue("mail", shards_count=2)
    queue.push({"id": "b"})
    for word in ("holds", "capacity", "priority"):
        assert word not in words(client, "/queues/mail") + words(client, "/")
    assert "lowq_capacity{" not in client.get("/metrics").text
    queue.push({"id": "a", "priority": 9})
    listed = words(client, "/queues/mail")
    assert (bool(re.search(r"\ba priority 9", listed)), listed.count("priority")) == (True, 1)
    assert "Priority 9" in words(client, "/queues/mail/job?id=a")


def test_of_a_job_in_the_hands_of_a_consumer_nothing_is_said_that_would_stop_its_process(
    app: lowq.Lowq, client: TestClient
) -> None:
    """Who has no handler for TTIN is suspended by it."""
    queue = app.queue("mail", shards_count=1)
    queue.push([{"id": "a"}])
    with queue.consumer(session="importer") as consumer:
        (job,) = consumer.take(timeout=PATIENCE)
        queue.push([{"id": "b"}])
        for job_id in ("a", "b"):  # the other one waits
            page = words(client, f"/queues/mail/job?id={job_id}")
            assert re.search(r"(by|which) consumer session:", page)
            assert "TTIN" not in page
        job.ack()
