"""The slowest batches of the last hour, in a node."""

from lowq.observe.slowest import FLOOR, MOST, STRETCH, EndedBatch, SlowestOfNode, SlowestOfThread


def batch(name: object, seconds: float, ended: float = 0.0) -> EndedBatch:
    return EndedBatch(str(name), 1, 0, seconds, ended)


def test_a_thread_keeps_the_slowest_of_each_id() -> None:
    thread = SlowestOfThread()
    for number in (*range(1, MOST + 6), 8, 3):  # some ids come again, faster and too fast
        thread.add(batch(number, float(number)))
    thread.add(batch(9, 50.0))
    assert thread.floor == 6.0
    assert sorted(item.seconds for item in thread.take()) == sorted({*range(6, MOST + 6), 50} - {9})
    assert (thread.take(), thread.floor) == ([], FLOOR)


def test_a_node_tells_what_is_new_and_how_slow_a_batch_has_to_be() -> None:
    node, first, second = SlowestOfNode(), SlowestOfThread(), SlowestOfThread()
    for number in range(MOST - 1):
        first.add(batch(number, 10.0 + number))
    second.add(batch("b", 5.0))
    assert len(node.update([first, second], 1.0)) == MOST
    assert (first.floor, second.floor) == (5.0, 5.0)
    assert len(node.update([first, second], 1.5)) == MOST, "Redis has not got them yet"
    node.recorded()
    assert node.update([first, second], 2.0) == []
    second.add(batch("c", 7.0, 3.0))
    assert node.update([first, second], 4.0) == [batch("c", 7.0, 3.0)]
    assert (first.floor, second.floor) == (7.0, 7.0)
    node.recorded()
    first.add(batch(3, 50.0, 5.0))
    assert node.update([first, second], 6.0) == [batch(3, 50.0, 5.0)], "an id that took longer this time"
    node.recorded()
    first.add(batch(3, 40.0, 6.0))
    assert node.update([first, second], 7.0) == []


def test_what_is_older_than_a_stretch_does_not_hide_what_is_slow_now() -> None:
    node, thread = SlowestOfNode(), SlowestOfThread()
    for number in range(MOST):
        thread.add(batch(number, 100.0, 10.0))
    node.update([thread], 20.0)
    assert thread.floor == 100.0
    node.recorded()
    assert node.update([thread], 10.0 + STRETCH) == []
    assert thread.floor == FLOOR
    thread.add(batch("new", 1.0, 4000.0))
    assert node.update([thread], 4001.0) == [batch("new", 1.0, 4000.0)]
