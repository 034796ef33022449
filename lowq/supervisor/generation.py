"""A generation: the N processes that a supervisor has started for the same code; when to replace one, and when not."""

import random
from dataclasses import dataclass
from math import inf

from lowq.supervisor.process import Child

#: Processes in a row that may end before they were ready.
TRIES = 5
#: Seconds before a process is replaced that has died the second time in a row; doubled with each further time.
FIRST_DELAY = 0.25
LONGEST_DELAY = 15.0
#: The longest where only Redis is waited for.
PASSING_DELAY = 2.0
#: Seconds that a process has to live until its earlier deaths are forgotten.
FORGIVEN_AFTER = 30.0


def restart_delay(deaths: int, longest: float = LONGEST_DELAY) -> float:
    """Seconds before a process is started again that has died so often in a row, this time included: at first none."""
    if deaths <= 1:
        return 0.0
    # Doubled a few times only: days of deaths would make it a number that no float holds.
    doubled: int = 2 ** min(deaths - 2, 20)
    return min(FIRST_DELAY * doubled, longest) * random.uniform(0.75, 1.25)


@dataclass(slots=True, eq=False)
class Place:
    """One of the N places for a process."""

    number: int
    child: Child | None = None
    #: Monotonic time at which a process is to be started in it; inf: none.
    start_at: float = 0.0
    #: Deaths in a row, each before FORGIVEN_AFTER.
    deaths: int = 0


class Generation:
    """Belongs to the supervisor's main thread."""

    def __init__(self, number: int, processes: int) -> None:
        self.number = number
        self.places = [Place(place + 1) for place in range(processes)]
        #: Whether any process of it was ever ready. Until then only one is tried: broken code fails once, not N times.
        self._proven = False
        #: Processes in a row that ended before they were ready.
        self._failures = 0

    def children(self) -> list[Child]:
        """Its processes that live, or whose end was not noticed yet."""
        return [place.child for place in self.places if place.child is not None]

    def ready(self) -> list[Child]:
        """Those of them that were ready."""
        return [child for child in self.children() if child.ready]

    def is_complete(self) -> bool:
        """Whether all of its processes are ready."""
        return len(self.ready()) == len(self.places)

    def startable(self) -> list[Place]:
        """The places that a process is to be started in, now or later."""
        places = self.places if self._proven else self.places[:1]
        return [place for place in places if place.child is None and place.start_at < inf]

    def rest(self) -> None:
        """From now on it starts no process."""
        for place in self.places:
            place.start_at = inf

    def became_ready(self) -> None:
        """One of its processes is ready."""
        self._proven, self._failures = True, 0

    def lost(self, place: Place, child: Child | None, now: float, *, asked_for: bool = False) -> float | None:
        """The process in that place has died, or could not even be started: when to replace it. ``asked_for``: it has
        worked, and ended to be replaced. That is no death: its successor is started at once, however often.

        Returns:
            Seconds, noted in the place too; None when there is no use in trying again.
        """
        if asked_for and child is not None and child.ready:
            place.start_at = now
            return 0.0
        if child is not None and now - child.started_at >= FORGIVEN_AFTER:
            place.deaths = 0
        if child is None or not child.ready:
            self._failures += 1
            if self._is_hopeless(child):
                return None
        place.deaths += 1
        delay = restart_delay(place.deaths, PASSING_DELAY if child is not None and child.passing else LONGEST_DELAY)
        place.start_at = now + delay
        return delay

    @property
    def failures(self) -> int:
        """Processes in a row that ended before they were ready."""
        return self._failures

    def _is_hopeless(self, child: Child | None) -> bool:
        if self.ready():
            return False  # the code is good, then; it may be memory that is short
        passing = child is not None and child.passing
        if self._proven:
            # All of them were ready once. When Redis is away now, trying goes on until it is back.
            return not passing and self._failures >= TRIES * len(self.places)
        known = child is not None and child.reason is not None and not passing
        return known or self._failures >= TRIES
