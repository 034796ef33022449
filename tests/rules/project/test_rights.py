"""docs/operations.md against the scripts: each user may run what its scripts call, and nothing that nobody calls."""

import pytest

from lowq.store.calls import load_scripts
from tests.rights import allowed, commands

PRODUCER = ("push", "register")
NODE = (
    *PRODUCER, "ack_and_take", "acquire", "bury", "fail", "heartbeat", "count", "record_errors", "release", "renew",
    "stats", "surrender",
)  # fmt: skip
#: What is sent besides scripts.
PLAIN = {
    "lowq-producer": {"hget", "ssubscribe", "ping"},
    "lowq-node": {"hget", "hgetall", "hkeys", "time", "ssubscribe", "sunsubscribe", "ping"},
    "lowq-people": {
        "time", "hget", "hgetall", "hkeys", "hmget", "lrange", "hdel", "unlink", "type", "spublish", "ssubscribe",
        "ping", "scan", "wait", "dbsize", "object|encoding", "zcard", "memory|usage",
    },
}  # fmt: skip
SCRIPTS = {"evalsha", "script|load", "script|exists"}


@pytest.mark.parametrize(
    ("user", "scripts"),
    [("lowq-producer", PRODUCER), ("lowq-node", NODE), ("lowq-people", tuple(load_scripts()))],
)
def test_a_user_has_the_rights_that_its_scripts_and_commands_need(user: str, scripts: tuple[str, ...]) -> None:
    assert allowed(user) == SCRIPTS | PLAIN[user] | commands(scripts)
