"""A pattern must not stop Redis, whichever way it comes in."""

from collections.abc import Callable

import pytest
from click.testing import CliRunner
from starlette.testclient import TestClient

import lowq_web
from lowq import ConfigError, Lowq
from lowq.cli import main
from lowq.queue import Queue
from lowq.sharding import shard_of
from lowq.store.keys import shard_prefix
from lowq.store.scripts import load_scripts
from tests.rows import case
from tests.rules.queue_rig import SHARDS, QueueRig

#: Held Redis for a quarter of a second per thousand ids.
DEAR = "*[" + "b" * 500 + "a]c"


def test_the_handle_refuses_a_dear_one(rig: QueueRig) -> None:
    asks: list[Callable[[Queue], object]] = [
        lambda queue: queue.jobs(match=DEAR),
        lambda queue: queue.jobs("taken", match=DEAR),
        lambda queue: queue.jobs_in_steps(match=DEAR),
        lambda queue: queue.count("delete", match=DEAR),
        lambda queue: next(queue.bulk("kick", match=DEAR)),
    ]
    rig.queue.push({"id": 1})
    for number, ask in enumerate(asks):
        with case(number), pytest.raises(ConfigError, match="at most 100"):
            ask(rig.queue)


def test_so_do_pages_api_and_command_line(store_url: str) -> None:
    app = Lowq(redis_url=store_url)
    app.queue("Orders", 3).push({"id": 1})
    client = TestClient(
        lowq_web.create_app(app), base_url="http://127.0.0.1", headers={"sec-fetch-site": "same-origin"}
    )
    for path in ("/queues/Orders", "/api/v1/queues/Orders/jobs"):
        answer = client.get(path, params={"match": DEAR})
        assert (answer.status_code, "at most 100" in answer.text) == (400, True), path
    asked = {"action": "delete", "all": {"match": DEAR}}
    for path in ("count", "actions"):
        assert client.post(f"/api/v1/queues/Orders/{path}", json=asked).status_code == 400, path
    for verb in ("jobs", "delete"):
        result = CliRunner().invoke(main, [verb, "Orders", "--match", DEAR, "--redis-url", store_url])
        assert (result.exit_code, "at most 100" in result.output) == (2, True), verb
    app.close()


def test_ids_of_any_bytes_are_found_by_pattern(rig: QueueRig) -> None:
    rig.queue.push({"id": 1})
    job_id = b"caf\xe9-1"
    rig.client.command("ZADD", shard_prefix("lowq", "Orders", shard_of(job_id, SHARDS)) + "due", 1, job_id)
    assert [job.id for job in rig.queue.jobs(match="caf\udce9*")] == ["caf\udce9-1"]


def test_redis_before_7_0_9_is_not_asked_for_several_stars(redis_url: str) -> None:
    """There they are tried against each other. The version is all that is put in place of the script's own."""
    rows = [
        ("*a*b", True),
        ("a*b*c", True),
        ("*a*b*", True),
        ("*a*", False),
        ("a*b", False),
        ("a*b***", False),
        ("4*", False),
    ]
    rig = QueueRig(redis_url)
    rig.queue.push({"id": "ab"})
    script = load_scripts()["scan"].source.replace("redis.REDIS_VERSION_NUM", str(0x070008))
    for pattern, refused in rows:
        arguments = (shard_prefix("lowq", "Orders", 0), "", "due", "0", pattern, "id", "", "", 1000)
        call = ("EVAL", script, 1, *arguments)
        with case(pattern):
            if refused:
                with pytest.raises(ConfigError, match=r"before 7\.0\.9"):
                    rig.client.command(*call)
            else:
                assert rig.client.command(*call)[0] == b"0"
    rig.close()
