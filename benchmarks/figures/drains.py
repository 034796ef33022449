"""Drains of other kinds: with a middleware, one round trip to Redis per job, over many shards, of typed payloads."""

from benchmarks.figures.own import lowq_with
from benchmarks.peers.turn import LARGE, bulk_and_drain


def with_middleware(*, quick: bool) -> dict[str, float]:
    """With one middleware that does nothing."""
    return {"drain_middleware": bulk_and_drain(lowq_with(middleware="on"), _count(quick))["drain"]}


def without_prefetch(*, quick: bool) -> dict[str, float]:
    """What jobs get that are too slow for prefetch."""
    return {"drain_plain": bulk_and_drain(lowq_with(prefetch="off"), _count(quick) // 4)["drain"]}


def many_shards(*, quick: bool) -> dict[str, float]:
    """1,000 shards against 5, one right after the other."""
    few = bulk_and_drain(lowq_with(shards=5), _count(quick))["drain"]
    many = bulk_and_drain(lowq_with(shards=1000), _count(quick))["drain"]
    return {"many_shards": many / few, "drain_1000_shards": many}


def typed(*, quick: bool) -> dict[str, float]:
    """Structs against dicts, one right after the other."""
    plain, of_type = (bulk_and_drain(lowq_with(type=kind), _count(quick), LARGE) for kind in ("dict", "struct"))
    return {"struct_drain": of_type["drain"] / plain["drain"]}


def _count(quick: bool) -> int:
    return 50_000 if quick else 200_000
