"""heartbeat: who lives, who shares the work, and that changes of that are announced."""

import json
from collections.abc import Iterator

import pytest

from lowq.shards.membership import Identity, Membership
from lowq.store.keys import nodes_key
from tests.rows import case
from tests.rules.support import NOW, Channel, ShardRig, run_script

KEY = nodes_key("lowq")
SILENCE = 3.0


class Registry:
    """Nodes that say that they live, at times of the test's choosing."""

    def __init__(self, rig: ShardRig) -> None:
        self.rig = rig
        self.channel = Channel(rig, key=KEY)

    def node(self, nonce: str, *, shares: bool = True, queues: dict[str, int] | None = None) -> Membership:
        identity = Identity(nonce, queues or {"Orders": 5}, 5, "1.0", host="host", pid=7)
        return Membership(identity, "lowq", silence=SILENCE, shares=shares)

    def beat(self, node: Membership, now: float = NOW, *, goodbye: bool = False, text: str = "") -> bool:
        """A heartbeat; whether the members have changed."""
        call = node.goodbye_call() if goodbye else node.heartbeat_call({"text": text})
        call.args[0] = repr(now)
        return node.received(self.rig.client.call(call))

    def announced(self) -> list[str]:
        return [data.decode() for data in self.channel.messages()]

    def names(self) -> set[str]:
        raw = self.rig.client.command("HKEYS", KEY, key=KEY)
        return {name.decode() for name in raw}


@pytest.fixture
def registry(rig: ShardRig) -> Iterator[Registry]:
    made = Registry(rig)
    yield made
    made.channel.close()


def test_nodes_that_join_are_announced_once_and_all_hear_of_each_other(registry: Registry) -> None:
    a, b = registry.node("aaaaaa"), registry.node("bbbbbb", queues={"Mails": 2})
    assert registry.beat(a)
    assert registry.announced() == ["host:7:aaaaaa"]
    assert not registry.beat(a, NOW + 1)
    assert registry.announced() == []
    registry.beat(b, NOW + 1)
    assert registry.beat(a, NOW + 1)
    assert a.members == b.members == {"host:7:aaaaaa": {"Orders": 5}, "host:7:bbbbbb": {"Mails": 2}}


def test_a_node_that_leaves_is_announced_and_still_there_until_its_goodbye(registry: Registry) -> None:
    a, b = registry.node("aaaaaa"), registry.node("bbbbbb")
    for node in (a, b, a):
        registry.beat(node)
    registry.announced()
    b.leave()
    registry.beat(b)
    assert registry.announced() == ["host:7:bbbbbb"]
    assert registry.beat(a)
    assert list(a.members) == ["host:7:aaaaaa"]
    assert registry.names() == {"host:7:aaaaaa", "host:7:bbbbbb"}
    for node, announced in ((b, []), (a, ["host:7:aaaaaa"])):  # b had no part any more
        for _ in range(2):
            registry.beat(node, goodbye=True)
        assert registry.announced() == announced
    assert registry.names() == set()


@pytest.mark.parametrize("step", [0.0, -3600.0])
def test_a_silent_node_is_dead_after_its_time_and_whoever_notices_says_so(registry: Registry, step: float) -> None:
    """Though the clock stepped back meanwhile."""
    a, b = registry.node("aaaaaa"), registry.node("bbbbbb")
    registry.beat(b)
    for seconds in (1.0, SILENCE - (1 if step else 0)):
        registry.beat(a, NOW + step + seconds)
        assert "host:7:bbbbbb" in a.members
    registry.announced()
    assert registry.beat(a, NOW + step + SILENCE + (1.001 if step else 0.001))
    assert list(a.members) == ["host:7:aaaaaa"]
    assert registry.announced() == ["host:7:aaaaaa"]
    # What it said last is kept for an hour, without a part, and nobody hears of it any more.
    assert registry.names() == {"host:7:aaaaaa", "host:7:bbbbbb"}
    assert not registry.beat(a, NOW + step + 3000)
    assert (list(a.members), registry.announced()) == (["host:7:aaaaaa"], [])
    registry.beat(a, NOW + 3600 + SILENCE + 2)
    assert registry.names() == {"host:7:aaaaaa"}


@pytest.mark.parametrize(("said", "kept"), [(0, 50), (100_000, 2), (300_000, 0)])
def test_of_many_nodes_that_die_some_are_kept(registry: Registry, said: int, kept: int) -> None:
    """Each heartbeat reads them, and what they said of long batches is long."""
    for number in range(60):
        registry.beat(registry.node(f"{number:06}"), text="x" * said)
    a = registry.node("aaaaaa")
    for _ in range(2):
        registry.beat(a, NOW + SILENCE + 1)
        assert (list(a.members), len(registry.names())) == (["host:7:aaaaaa"], kept + 1)


def test_a_node_without_a_part_is_there_and_no_member(registry: Registry) -> None:
    a, apart = registry.node("aaaaaa"), registry.node("bbbbbb", shares=False)
    registry.beat(a)
    registry.announced()
    registry.beat(apart)
    assert registry.announced() == []
    assert not registry.beat(a)
    assert apart.members == a.members == {"host:7:aaaaaa": {"Orders": 5}}
    assert registry.names() == {"host:7:aaaaaa", "host:7:bbbbbb"}


def test_a_node_learns_when_the_next_could_be_found_silent(registry: Registry) -> None:
    a, b, c = (registry.node(letter * 6) for letter in "abc")
    alone, now, *_ = run_script(registry.rig.client, "heartbeat", KEY, repr(NOW), *a.heartbeat_call({}).args[1:])
    assert alone == b""
    assert float(now) == NOW, "the time in Redis, from which the node knows how far its own clock is off"
    registry.beat(b, NOW + 1)
    registry.beat(c, NOW + 2)
    (first, *_) = run_script(registry.rig.client, "heartbeat", KEY, repr(NOW + 2.5), *a.heartbeat_call({}).args[1:])
    assert float(first) == pytest.approx(1.5)


def test_an_entry_that_nobody_understands_is_removed_and_such_a_part_serves_nothing(registry: Registry) -> None:
    command = registry.rig.client.command
    for entry in ("", "1000.5 {}", "no time 3 0 {}", "1000 3 x {}", "\xff\xfe"):
        with case(entry):
            command("DEL", KEY)
            command("HSET", KEY, "strange", entry.encode("latin-1"), key=KEY)
            assert registry.beat(registry.node("aaaaaa"))
            assert registry.names() == {"host:7:aaaaaa"}
    for part in ("[]", "no json", '{"queues": 3}', '{"queues": {"Orders": "5", "A": 0, "B": 2}}'):
        with case(part):
            command("DEL", KEY)
            run_script(registry.rig.client, "heartbeat", KEY, repr(NOW), "other", part, "{}", "3")
            a = registry.node("aaaaaa")
            registry.beat(a)
            assert a.members["other"] == ({"B": 2} if "B" in part else {})


def test_what_a_node_says_survives_any_text(registry: Registry) -> None:
    a = registry.node("aaaaaa", queues={"Bestellungen ä\n {}": 3})
    registry.beat(a)
    assert registry.beat(b := registry.node("bbbbbb"))
    assert b.members["host:7:aaaaaa"] == {"Bestellungen ä\n {}": 3}
    raw = registry.rig.client.command("HGET", KEY, "host:7:aaaaaa", key=KEY)
    size = int(raw.split(b" ")[2])
    rest = raw.split(b" ", 3)[3]
    assert json.loads(rest[:size]) == {"queues": {"Bestellungen ä\n {}": 3}}
    assert json.loads(rest[size:])["queues"] == ["Bestellungen ä\n {}"]
