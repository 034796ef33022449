"""What the page of all queues shows of the server, and warns of: on servers that are set up in several ways."""

import re
from collections.abc import Iterator
from contextlib import closing

import pytest
import redis
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

import lowq
import lowq_web
from lowq.store import memory_store
from lowq.store.embedded import serving
from tests.redis_server import RedisServer
from tests.rules.web.shown import Element, Reader


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """One of our own: its settings are changed while it runs. Nothing is persisted, and keys may be evicted."""
    with RedisServer(maxmemory="200mb", maxmemory_policy="allkeys-lru") as server:
        yield server


def card(url: str) -> Element:
    app = lowq.Lowq(redis_url=url)
    try:
        page = Reader(TestClient(lowq_web.create_app(app), base_url="http://127.0.0.1")).page("/")
    finally:
        app.close()
    return next(part for part in page.every("section") if any(head.text == "Redis" for head in part.every("h2")))


def warnings(card: Element) -> list[str]:
    return [line.text for line in card.every("p") if "warning" in line.classes]


def test_an_embedded_store_has_nothing_to_show_and_is_warned_of_for_nothing() -> None:
    with serving(memory_store("memory://")) as listening:
        assert warnings(card(listening)) == []
    shown = card("memory://shown")
    assert (warnings(shown), shown.facts["Version"].text) == ([], "embedded store")


def test_eviction_and_no_persistence_are_warned_of(server: RedisServer) -> None:
    shown = card(server.url)
    with redis.Redis.from_url(server.url) as client:
        info = client.info()
    facts = shown.facts
    assert info["redis_version" if "valkey_version" not in info else "valkey_version"] in facts["Version"].text
    assert facts["Eviction"].text == "allkeys-lru"
    assert facts["Persistence"].text == "none"
    assert facts["Memory"].text.endswith(" of 200.0 MB")
    evicts, forgets = warnings(shown)
    assert "maxmemory-policy is allkeys-lru" in evicts
    assert "jobs are lost" in evicts
    assert re.search(r"appendonly is off|Nothing is persisted", forgets)
    assert "lost" in forgets


def test_metrics_have_memory_and_persistence_of_the_server_and_say_nothing_of_an_embedded_store(
    server: RedisServer,
) -> None:
    def figures(url: str) -> dict[str, float]:
        with closing(lowq.Lowq(redis_url=url)) as app:
            text = TestClient(lowq_web.create_app(app), base_url="http://127.0.0.1").get("/metrics").text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return {sample.name: sample.value for sample in samples if sample.name.startswith("lowq_redis_")}

    found = figures(server.url)
    assert 0 < found["lowq_redis_memory_bytes"] < found["lowq_redis_memory_max_bytes"] == 200 * 2**20
    assert (found["lowq_redis_persistence"], found["lowq_redis_persistence_failing"]) == (0, 0)
    assert found["lowq_redis_clients"] >= 1
    assert found["lowq_redis_last_save_seconds"] > 1e9
    with redis.Redis.from_url(server.url) as client:
        client.config_set("appendonly", "yes")
    assert figures(server.url)["lowq_redis_persistence"] == 1
    assert figures("memory://metrics") == {}


def test_a_server_that_is_set_up_well_is_not_warned_of_and_snapshots_alone_are(server: RedisServer) -> None:
    with redis.Redis.from_url(server.url) as client:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("save", "3600 100000")
        shown = card(server.url)
        (forgets,) = warnings(shown)
        assert (shown.facts["Persistence"].text, "appendonly is off" in forgets) == ("RDB snapshots", True)
        client.config_set("appendonly", "yes")
        shown = card(server.url)
        assert (shown.facts["Eviction"].text, shown.facts["Persistence"].text) == ("noeviction", "AOF")
        assert warnings(shown) == []
        client.setrange("ballast", 20_000_000, b"x")  # sent as a text it would be counted twice for a while
        client.config_set("maxmemory", str(int(client.info("memory")["used_memory"] * 1.05)))
        (full,) = warnings(card(server.url))
        assert "of maxmemory is used" in full
        assert 90 < float(full.partition("%")[0]) <= 100
