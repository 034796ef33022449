"""Failed logins, counted for all processes of the dashboard: in a row, forgotten, bounded, each once."""

import pytest

from lowq.operate.logins import find_failures, record_failure
from lowq.store.keys import logins_key
from tests.rows import case
from tests.rules.queue_rig import QueueRig
from tests.rules.support import NOW

pytestmark = pytest.mark.parametrize("store_url", ["redis"], indirect=True)

KEY = logins_key("lowq")
ADDRESS = "192.0.2.1"


def failed(rig: QueueRig, who: str, attempt: str, now: float = NOW, kept: int = 1000) -> int:
    count: int = rig.client.run("login_failed", KEY, repr(now), who, attempt, 900, kept)
    return count


def test_failures_of_a_user_from_an_address_are_counted_in_a_row(rig: QueueRig) -> None:
    for name in ("ann", "ann2", "", "a\x00b", "\udcff", "x" * 100_000):
        with case(name):
            assert find_failures(rig.app, ADDRESS, name) is None
            assert [record_failure(rig.app, ADDRESS, name, 900) for _ in range(3)] == [1, 2, 3]
            assert record_failure(rig.app, "192.0.2.2", name, 900) == 1
            found = find_failures(rig.app, ADDRESS, name)
            assert found is not None
            assert (found.count, found.ago >= 0) == (3, True)
    assert "ann" not in str(rig.client.command("HGETALL", KEY)), "nothing that somebody has typed"


def test_a_repeated_call_counts_once_and_old_failures_are_forgotten(rig: QueueRig) -> None:
    assert [failed(rig, "a", attempt) for attempt in ("x", "x", "y", "y")] == [1, 1, 2, 2]
    assert failed(rig, "a", "2", NOW + 899) == 3
    assert failed(rig, "a", "3", NOW + 899 + 900) == 1
    assert failed(rig, "a", "4", NOW) == 1, "the clock has stepped back"
    assert 0 < rig.client.command("TTL", KEY) <= 900


def test_the_older_half_goes_when_there_are_many(rig: QueueRig) -> None:
    for number in range(25):
        failed(rig, f"who-{number}", "x", NOW + number, kept=10)
        assert rig.client.command("HLEN", KEY) <= 10
    assert failed(rig, "who-24", "y", NOW + 25, kept=10) == 2
    assert failed(rig, "who-0", "y", NOW + 25, kept=10) == 1


def test_what_is_no_record_counts_for_nothing(rig: QueueRig) -> None:
    for forged in ("", "nonsense", "1 nan x", "-1 5 x", "9" * 400 + " 5 x"):
        with case(forged):
            rig.client.command("DEL", KEY)
            record_failure(rig.app, ADDRESS, "ann", 900)
            (field,) = rig.client.command("HKEYS", KEY)
            rig.client.command("HSET", KEY, field, forged, key=KEY)
            assert find_failures(rig.app, ADDRESS, "ann") is None
            assert record_failure(rig.app, ADDRESS, "ann", 900) == 1
            for number in range(4):
                rig.client.command("HSET", KEY, f"other-{number}", forged, key=KEY)
            assert failed(rig, "new", "x", kept=3) == 1
            assert rig.client.command("HLEN", KEY) <= 3
