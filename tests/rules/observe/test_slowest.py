"""The slowest batches of the last hour, in a node."""

from lowq.observe.histories import MOST_SLOW, SLOW_STRETCH
from lowq.observe.tallies import FLOOR, EndedBatch, SlowBatches


def batch(name: object, seconds: float, ended: float = 0.0) -> EndedBatch:
    return EndedBatch(str(name), 1, 0, seconds, ended)


def test_a_node_keeps_the_slowest_of_each_id_and_tells_what_is_new() -> None:
    slow = SlowBatches()
    for number in (*range(1, MOST_SLOW + 6), 8, 3):  # some ids come again, faster and too fast
        slow.add(batch(number, float(number)))
    slow.add(batch(9, 50.0))
    assert slow.floor == 6.0, "what took no longer is not among them"
    expected = {*range(6, MOST_SLOW + 6), 50} - {9}
    for _ in range(2):
        assert {item.seconds for item in slow.unrecorded(1.0)} == expected, "again, as Redis has not got them yet"
    slow.recorded()
    assert slow.unrecorded(2.0) == []
    slow.add(batch("c", 7.5, 3.0))
    slow.add(batch(9, 40.0, 3.0))
    assert slow.unrecorded(4.0) == [batch("c", 7.5, 3.0)], "of an id the slowest stays"
    slow.recorded()
    slow.add(batch(9, 60.0, 5.0))
    assert slow.unrecorded(6.0) == [batch(9, 60.0, 5.0)], "an id that took longer this time"


def test_what_is_older_than_a_stretch_does_not_hide_what_is_slow_now() -> None:
    slow = SlowBatches()
    for number in range(MOST_SLOW):
        slow.add(batch(number, 100.0, 10.0))
    assert len(slow.unrecorded(20.0)) == MOST_SLOW
    assert slow.floor == 100.0
    slow.recorded()
    assert slow.unrecorded(10.0 + SLOW_STRETCH) == []
    assert slow.floor == FLOOR
    slow.add(batch("new", 1.0, 4000.0))
    assert slow.unrecorded(4001.0) == [batch("new", 1.0, 4000.0)]
