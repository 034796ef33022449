"""Which calls of a write are repeated."""

from lowq.errors import RedisUnavailable, ScriptError
from lowq.group_commit import PLAIN, Part
from lowq.group_commit.requests import SharedCall
from lowq.group_commit.writer import _unanswered
from lowq.store import Refusal


def test_a_refusal_of_those_with_another_number_of_shards_keeps_nobody_from_being_repeated() -> None:
    wrong, right = SharedCall("lowq:v1:{q:0}:", 7, b"", b""), SharedCall("lowq:v1:{q:0}:", 5, b"", b"")
    assert _unanswered([wrong, right], [Refusal("SHARDSCOUNT", "5"), RedisUnavailable("cut")]) == [1]


def test_nothing_is_repeated_that_comes_after_a_call_that_was_refused_for_good() -> None:
    first, second, other = (Part(f"lowq:v1:{{q:{shard}}}:", 5, [], [], PLAIN, b"the one before") for shard in (0, 0, 1))
    lost = RedisUnavailable("cut")
    assert _unanswered([first, second, other], [Refusal("SHARDSCOUNT", "7"), lost, lost]) == [2]


def test_a_call_that_fails_keeps_nobody_else_in_its_shard_from_being_repeated() -> None:
    """Calls that are made for one caller alone, after a script has failed on an id of one of them."""
    first, second = (SharedCall("lowq:v1:{q:0}:", 5, b"", b"") for _ in range(2))
    assert _unanswered([first, second], [ScriptError("WRONGTYPE"), RedisUnavailable("cut")]) == [1]
