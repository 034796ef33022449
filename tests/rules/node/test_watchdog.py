"""The thread that looks whether a batch runs for too long; what it does then is in test_time_limits of the nodes."""

from typing import cast

from lowq.node.activity import ThreadActivity
from lowq.node.watchdog import Watchdog
from tests.waiting import until


def test_what_raises_in_it_stops_the_node() -> None:
    seen: list[BaseException] = []
    no_activities = cast("list[ThreadActivity]", [None])
    watchdog = Watchdog(lambda: no_activities, [10], 0, write_off=lambda _: None, on_fatal=seen.append)
    watchdog.start()
    until(lambda: seen, "what was raised")
    watchdog.stop()
    assert [type(error) for error in seen] == [AttributeError]
