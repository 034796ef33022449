"""Which jobs of a queue a page or a request asks for: read from an address, and written into one."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import get_args

import lowq
from lowq.job import State
from lowq_web import text

#: The tabs of a queue. "" are all that wait.
STATES: tuple[State, ...] = get_args(State)
ORDERS = ("perform_at", "retry_count", "buried_at", "id")
#: Jobs of a page.
LIMIT = 50
#: Failed jobs up to which those whose retry is to come are counted; above, all failed ones are told.
COUNTED = 5000


@dataclass(frozen=True, slots=True)
class JobQuery:
    """What is asked for. `given` is how it was typed, for addresses and forms."""

    state: State | None
    match: str | None
    order_by: str | None
    reverse: bool
    min: float | str | None
    max: float | str | None
    after: str | None
    limit: int
    given: dict[str, str]

    @property
    def order(self) -> str:
        """What it is ordered by, also when that was not said."""
        return self.order_by or ("buried_at" if self.state == "morgue" else "perform_at")

    @property
    def by_time(self) -> bool:
        """Whether the bounds are times."""
        return self.order in ("perform_at", "buried_at")

    @property
    def scans(self) -> bool:
        """Whether more ids are looked at than are shown: all of them, or those that the state leaves out."""
        if self.match or self.order == "id" or self.state in ("taken", "scheduled", "retrying"):
            return True
        # Those that never failed are in no such order.
        only_failed = self.state is None and isinstance(self.min, float) and self.min > -1
        return self.order == "retry_count" and not only_failed

    @property
    def filtered(self) -> bool:
        """Whether it asks for less than all of a state."""
        return bool(self.match) or self.min is not None or self.max is not None

    @property
    def may_bulk(self) -> bool:
        """Whether a bulk action can do exactly what is listed: its bounds are times."""
        return self.state != "taken" and (self.by_time or (self.min is None and self.max is None))

    def without(self, *names: str, **more: str | None) -> dict[str, str | None]:
        """The query of a similar page."""
        return {**{name: value for name, value in self.given.items() if name not in names}, **more}

    def pages(self, queue: lowq.Queue) -> Iterator[lowq.Page | None]:
        """The page, and before it what of it is known so far; None while it is looked for and nothing new is found.

        Raises:
            ConfigError: what is asked for makes no sense.
        """
        return _news(
            queue.jobs_in_steps(
                self.state, self.match, self.order_by, self.reverse, self.limit, self.after, self.min, self.max
            )
        )

    def bulk_state(self, action: str) -> State | None:
        """The state that a bulk action is told."""
        return None if action == "perform_now" and self.state == "due" else self.state

    def bulk_bounds(self) -> tuple[float | None, float | None]:
        """Bounds of the time for a bulk action.

        Raises:
            ConfigError: the listing is bounded by something else.
        """
        if not self.may_bulk:
            raise lowq.ConfigError(
                "actions on all that match can be bounded by time, not by id or retry_count: order by time, or use a "
                "pattern"
            )
        return (
            None if self.min is None or not self.by_time else float(self.min),
            None if self.max is None or not self.by_time else float(self.max),
        )


def _news(pages: Iterator[lowq.Page]) -> Iterator[lowq.Page | None]:
    shown = page = None
    for page in pages:
        if page is shown or not page.jobs:
            yield None
        else:
            shown = page
            yield page
    if page is not shown:  # nothing: only the end of the looking makes that a page
        yield page


def asked_of(query: Mapping[str, str], now: float) -> JobQuery:
    """From the query of a page's address. What is empty counts as absent. Bounds are as the list shows what it is
    ordered by; in order of ``retry_count`` they are the number of the coming retry, which is one more.

    Raises:
        ConfigError: it names what is allowed.
    """
    given = {
        name: query[name].strip()
        for name in ("state", "match", "order_by", "reverse", "min", "max")
        if query.get(name, "").strip()
    }
    state, order_by = given.get("state"), given.get("order_by")
    if state is not None and state not in STATES:
        raise lowq.ConfigError(f"state={state!r:.50}: it is one of {', '.join(STATES)}, or absent for all that wait")
    if order_by is not None and order_by not in ORDERS:
        raise lowq.ConfigError(f"order_by={order_by!r:.50}: it is one of {', '.join(ORDERS)}")
    # A sort that the other tabs know and this one doesn't.
    if (state == "morgue") == (order_by in ("perform_at", "retry_count")) and order_by not in (None, "id"):
        order_by = None
        given.pop("order_by")
    if given.get("reverse") not in (None, "1"):
        raise lowq.ConfigError(f"reverse={given['reverse']!r:.50}: it is 1 or absent")
    asked = JobQuery(
        state,
        given.get("match"),
        order_by,
        given.get("reverse") == "1",
        None,
        None,
        query.get("after") or None,
        LIMIT,
        given,
    )
    low, high = (_bound(asked, name, given.get(name), now) for name in ("min", "max"))
    return JobQuery(asked.state, asked.match, order_by, asked.reverse, low, high, asked.after, LIMIT, given)


def as_typed(query: Mapping[str, str]) -> JobQuery:
    """A query that makes no sense, for the form to be filled with."""
    given = {name: query[name] for name in ("match", "reverse", "min", "max") if query.get(name)}
    state = next((state for state in STATES if state == query.get("state")), None)
    order_by = next((order for order in ORDERS if order == query.get("order_by")), None)
    given |= {name: value for name, value in (("state", state), ("order_by", order_by)) if value}
    return JobQuery(state, given.get("match"), order_by, "reverse" in given, None, None, None, LIMIT, given)


def _bound(asked: JobQuery, name: str, given: str | None, now: float) -> float | str | None:
    if given is None or asked.order == "id":
        return given
    try:
        # The list counts retries as people do: the first one is 1, and what never failed has 0.
        return text.moment(given, now) if asked.by_time else float(given) - 1
    except (ValueError, OverflowError):
        what = "a time: 2027-01-31T12:00Z, Unix seconds, or -2h, +30min" if asked.by_time else "a number"
        raise lowq.ConfigError(f"{name}={given!r:.50}: it is {what}") from None


@dataclass(frozen=True, slots=True)
class Count:
    """How many jobs a tab has; not exactly when there are too many to count."""

    number: int
    exact: bool = True


def tab_counts(queue: lowq.Queue, stats: lowq.Stats) -> dict[str, Count]:
    """State ("": all that wait) -> how many.

    Of jobs that failed, nothing counts those whose retry is still to come: a few are counted one by one.
    """
    if stats.retries == 0 or stats.due == 0:
        retrying = Count(stats.retries)
    elif stats.retries <= COUNTED:
        retrying = Count(queue.count("bury", "retrying"))
    else:
        retrying = Count(min(stats.retries, stats.scheduled), exact=False)
    return {
        "": Count(stats.length),
        "scheduled": Count(max(stats.scheduled - retrying.number, 0), retrying.exact),
        "due": Count(stats.due),
        "retrying": retrying,
        "taken": Count(stats.taken),
        "morgue": Count(stats.morgue_length),
    }
