"""What a push is sent as, and how tests of applications read it again."""

import pytest

from lowq.codec import EncodedJob
from lowq.push.calls import EXTENDED, PLAIN, TIMED, push_arguments, pushed_items
from lowq.store.keys import queue_of_prefix, shard_prefix
from tests.rows import case

PLAIN_JOB: EncodedJob = (b"1", b'"a"', b"", b"")
TIMED_JOB: EncodedJob = (b"2", b'"b"', b"7", b"+60")
OWN_REST: EncodedJob = (b"3", b'"c"', b"", b"", b"", b"4")


def test_what_is_sent_can_be_read_again() -> None:
    rows: list[tuple[int, list[EncodedJob], bytes, list[EncodedJob]]] = [
        (PLAIN, [PLAIN_JOB], b"", [(*PLAIN_JOB, b"", b"")]),
        (PLAIN, [PLAIN_JOB], b" merge=append ttl=60 priority=2", [(*PLAIN_JOB, b"60", b"2")]),
        (TIMED, [PLAIN_JOB, TIMED_JOB], b" ttl=60", [(*PLAIN_JOB, b"60", b""), (*TIMED_JOB, b"60", b"")]),
        (EXTENDED, [TIMED_JOB, OWN_REST], b" debounce=1 max_wait=5 ttl=60", [(*TIMED_JOB, b"60", b""), OWN_REST]),
        (PLAIN, [], b"", []),
    ]
    for width, items, words, found in rows:
        with case(width, items, words, found):
            assert list(pushed_items(push_arguments(5, items, b"token", b"", b"15", words))) == found


@pytest.mark.parametrize(("namespace", "queue"), [("lowq", "Orders"), ("shop:eu", "Orders:fast"), ("{x}", "Orders")])
def test_a_prefix_says_whose_shard_it_is(namespace: str, queue: str) -> None:
    assert queue_of_prefix(shard_prefix(namespace, queue, 12)) == (namespace, queue)
