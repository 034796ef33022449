"""What one process of the dashboard leaves for another: found by its name alone, bounded, and taken once."""

import pytest

from lowq_web.token_store import TokenStore
from tests.rows import case
from tests.rules.queue_rig import QueueRig

pytestmark = pytest.mark.parametrize("store_url", ["memory"], indirect=True)

KEY = "lowq:v1:notices"


def test_a_value_is_found_in_another_process_by_its_name_alone_and_taken_once(rig: QueueRig) -> None:
    kept, other = TokenStore(rig.app, KEY, 3, 60), TokenStore(rig.app, KEY, 3, 60)
    name = kept.leave(b"of any \x00 bytes")
    slot, _, token = name.partition("-")
    for wrong in ("", slot, f"{slot}-{'x' * 16}", f"{int(slot) + 1}-{token}", f"7-{token}", f"{name}\n"):
        with case(wrong):
            assert kept.take(wrong) is None
    assert [other.find(name), other.find(name)] == [b"of any \x00 bytes"] * 2
    assert [other.take(name), kept.take(name), kept.find(name)] == [b"of any \x00 bytes", None, None]


def test_only_the_latest_are_kept_and_they_expire(rig: QueueRig) -> None:
    kept = TokenStore(rig.app, KEY, 3, 60)
    names = [kept.leave(b"%d" % number) for number in range(8)]
    assert [kept.find(name) for name in names] == [None] * 5 + [b"5", b"6", b"7"]
    assert rig.client.command("HLEN", KEY) == 4
    assert 0 < rig.client.command("TTL", KEY) <= 60


def test_what_somebody_else_has_written_is_no_value(rig: QueueRig) -> None:
    for value in (b"", b"nonsense", b"\xff \xfe"):
        with case(value):
            rig.client.command("DEL", KEY)
            kept = TokenStore(rig.app, KEY, 1, 60)
            name = kept.leave(b"x")
            rig.client.command("HSET", KEY, 0, value, key=KEY)
            assert kept.take(name) is None


def test_of_two_who_take_it_at_once_one_gets_it(rig: QueueRig, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = TokenStore(rig.app, KEY, 3, 60)
    name = kept.leave(b"x")
    find = TokenStore.find

    def found_by_both(self: TokenStore, name: str) -> bytes | None:
        value = find(self, name)
        monkeypatch.setattr(TokenStore, "find", find)
        assert kept.take(name) == b"x"  # the other one, in between
        return value

    monkeypatch.setattr(TokenStore, "find", found_by_both)
    assert TokenStore(rig.app, KEY, 3, 60).take(name) is None
