"""Patterns of ids: what is accepted, how many ids are compared at once, and that none stops Redis."""

from collections.abc import Callable
from contextlib import closing
from functools import partial

import pytest
from click.testing import CliRunner
from starlette.testclient import TestClient

import lowq_web
from lowq import ConfigError
from lowq.cli import main
from lowq.codec import MAX_ID_BYTES
from lowq.operate.job_filter import (
    MAX_PATTERN_BYTES,
    MAX_PATTERN_REST,
    MAX_PATTERN_STARS,
    MAX_SCANNED,
    check_pattern,
    encode_pattern,
    ids_per_call,
)
from lowq.sharding import shard_of
from lowq.store.calls import load_scripts
from lowq.store.keys import shard_prefix
from tests.rows import case
from tests.rules.queue_rig import SHARDS, QueueRig

ACCEPTED = [
    "42", "4*", "order-?", "[a-c]*", "*a*b*c*", r"100\*", "x" * MAX_ID_BYTES, "x" * (MAX_PATTERN_BYTES - 1) + "*",
    "*" + "x" * (MAX_PATTERN_REST - 1) + "*", "x" * 512 + "*" + "y" * (MAX_PATTERN_REST - 1), "caf\udce9*",
]  # fmt: skip
#: Held Redis for a quarter of a second per thousand ids.
DEAR = "*[" + "b" * 500 + "a]c"


def test_what_people_type_is_accepted_but_stars_side_by_side_are_one() -> None:
    rows: list[tuple[str | None, str]] = [
        *((pattern, pattern) for pattern in ACCEPTED),
        (None, ""), ("", ""), ("*" * 5000, "*"), ("a***b**", "a*b*"), (r"\**", r"\**"), (r"\***", r"\**"),
    ]  # fmt: skip
    for pattern, accepted in rows:
        with case(pattern, accepted):
            assert check_pattern(pattern) == accepted


def test_what_is_too_dear_is_refused_with_the_limit() -> None:
    rows: list[tuple[object, str]] = [
        ("é" * (MAX_PATTERN_BYTES // 2 + 1), str(MAX_PATTERN_BYTES)),
        ("*" + "x" * MAX_PATTERN_REST, f"{MAX_PATTERN_REST} there"),
        ("x*" + "é" * (MAX_PATTERN_REST // 2), f"{MAX_PATTERN_REST} there"), (DEAR, f"{MAX_PATTERN_REST} there"),
        ("*a" * (MAX_PATTERN_STARS + 1), f"at most {MAX_PATTERN_STARS}"),
        ("\ud800*", "Unicode"), (42, "a pattern of ids"),
    ]  # fmt: skip
    for pattern, limit in rows:
        with case(pattern, limit), pytest.raises(ConfigError, match=limit):
            check_pattern(pattern)


def test_the_dearer_the_fewer_ids_of_a_call() -> None:
    assert ids_per_call("") == MAX_SCANNED
    for pattern in [*ACCEPTED, "*[" + "b" * 95 + "a]c"]:
        with case(pattern):
            head, star, rest = encode_pattern(pattern).rstrip(b"*").partition(b"*")
            steps = len(head) + MAX_ID_BYTES * len(star + rest)
            assert 1 <= ids_per_call(pattern) <= MAX_SCANNED
            assert ids_per_call(pattern) * steps <= 1_000_000
            assert ids_per_call(pattern) == MAX_SCANNED or ids_per_call(pattern) * steps > 900_000


@pytest.mark.parametrize("store_url", ["redis"], indirect=True)
def test_a_dear_one_is_refused_by_handle_pages_api_and_command_line(rig: QueueRig, store_url: str) -> None:
    rig.queue.push({"id": 1})
    asks: list[Callable[..., object]] = [rig.queue.jobs, rig.queue.jobs_in_steps, partial(rig.queue.count, "delete")]
    for ask in asks:
        with case(ask), pytest.raises(ConfigError, match="at most 100"):
            ask(match=DEAR)
    headers = {"sec-fetch-site": "same-origin"}
    client = TestClient(lowq_web.create_app(rig.app), base_url="http://127.0.0.1", headers=headers)
    answer = client.get("/queues/Orders", params={"match": DEAR})
    assert (answer.status_code, "at most 100" in answer.text) == (400, True)
    asked = {"action": "delete", "all": {"match": DEAR}}
    assert client.post("/api/v1/queues/Orders/actions", json=asked).status_code == 400
    result = CliRunner().invoke(main, ["delete", "Orders", "--match", DEAR, "--redis-url", store_url])
    assert (result.exit_code, "at most 100" in result.output) == (2, True)


def test_ids_of_any_bytes_are_found_by_pattern(rig: QueueRig) -> None:
    rig.queue.push({"id": 1})
    job_id = b"caf\xe9-1"
    rig.client.command("ZADD", shard_prefix("lowq", "Orders", shard_of(job_id, SHARDS)) + "due", 1, job_id)
    assert [job.id for job in rig.queue.jobs(match="caf\udce9*")] == ["caf\udce9-1"]


def test_redis_before_7_0_9_is_not_asked_for_several_stars(redis_url: str) -> None:
    """There they are tried against each other. The version is all that is put in place of the script's own."""
    rows = [("*a*b", True), ("a*b*c", True), ("*a*b*", True), ("*a*", False), ("a*b", False), ("a*b***", False)]
    script = load_scripts()["scan"].source.replace("redis.REDIS_VERSION_NUM", str(0x070008))
    with closing(QueueRig(redis_url)) as rig:
        rig.queue.push({"id": "ab"})
        for pattern, refused in rows:
            arguments = (shard_prefix("lowq", "Orders", 0), "", "due", "0", pattern, "id", "", "", 1000)
            with case(pattern):
                if refused:
                    with pytest.raises(ConfigError, match=r"before 7\.0\.9"):
                        rig.client.command("EVAL", script, 1, *arguments)
                else:
                    assert rig.client.command("EVAL", script, 1, *arguments)[0] == b"0"
