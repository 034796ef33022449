"""Which jobs of a queue a page or a request asks for: parsed from an address, and written into one."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import lowq
from lowq import inspection
from lowq.inspection import JobFilter
from lowq.operate.actions import ActionName
from lowq.operate.bulk import filter_for
from lowq.operate.job_filter import ORDERS, STATES
from lowq_web import text

#: Jobs of a page.
LIMIT = 50
#: Fields of the filter that look into a job, and that name its shard.
_INSIDE = ("payload", "error", "error_group", "shard")
#: Failed jobs up to which those whose retry is to come are counted; above, all failed ones are shown.
COUNTED = 5000


@dataclass(frozen=True, slots=True)
class JobQuery:
    """Which jobs, in which order. `given` is how it was typed, for addresses and forms."""

    filter: JobFilter
    after: str | None
    limit: int
    given: dict[str, str]

    @property
    def scans(self) -> bool:
        """Whether more ids are read than are shown: all of them, or those in another state."""
        asked = self.filter
        if asked.scanned or asked.asks_for_contents or asked.state in ("scheduled", "retrying"):
            return True
        # Jobs that never failed are not in the set of retries.
        only_failed = asked.state is None and asked.low > -1
        return asked.order == "retry_count" and not only_failed

    @property
    def filtered(self) -> bool:
        """Whether it asks for less than all of a state."""
        return self.filter.bounded or any(self.given.get(name) for name in ("match", *_INSIDE))

    @property
    def may_bulk(self) -> bool:
        """Whether a bulk action can do exactly what is listed. Not by payloads: some are masked."""
        asked = self.filter
        if asked.state == "taken" or asked.payload is not None:
            return False
        try:
            filter_for("delete", asked)
        except lowq.ConfigError:
            return False
        return True

    def without(self, *names: str, **more: str | None) -> dict[str, str | None]:
        """The query of a similar page."""
        return {**{name: value for name, value in self.given.items() if name not in names}, **more}

    def pages(self, queue: lowq.Queue, redact: Callable[[Any], Any]) -> Iterator[inspection.Page | None]:
        """The page as far as it is known, again and again; None while nothing new is found. The last one is complete.

        Raises:
            ConfigError: the query makes no sense.
        """
        return news(queue.jobs_in_steps(self.filter, limit=self.limit, after=self.after, redact=redact))

    def filter_for(self, action: ActionName) -> JobFilter:
        """The filter of a bulk action on all that is listed.

        Raises:
            ConfigError: it can't be done to these, or they are bounded by something else than time.
        """
        state = None if action == "perform_now" and self.filter.state == "due" else self.filter.state
        return filter_for(action, replace(self.filter, state=state))


P = TypeVar("P", inspection.Page, inspection.FoundPage)


def news(pages: Iterator[P]) -> Iterator[P | None]:
    """The pages that say something new; None while nothing is."""
    shown = page = None
    for page in pages:
        if page is shown or not (len(page) or page.looked):
            yield None
        else:
            shown = page
            yield page
    if page is not None and page is not shown:  # nothing was found: an empty page is known only at the end
        yield page


def asked_of(query: Mapping[str, str], now: float) -> JobQuery:
    """Parses the query of a page's address. Empty values count as absent. Bounds are as the list shows them: in order
    of ``retry_count`` they are the number of the coming retry, which is one more.

    Raises:
        ConfigError: it names what is allowed.
    """
    given = {
        name: query[name].strip()
        for name in ("state", "match", "order_by", "reverse", "min", "max", *_INSIDE)
        if query.get(name, "").strip()
    }
    state, order_by = given.get("state"), given.get("order_by")
    if state is not None and state not in STATES:
        raise lowq.ConfigError(f"state={state!r:.50}: it is one of {', '.join(STATES)}, or absent for all that wait")
    if order_by is not None and order_by not in ORDERS:
        raise lowq.ConfigError(f"order_by={order_by!r:.50}: it is one of {', '.join(ORDERS)}")
    # The order of another tab that this one does not have.
    if (state == "morgue") == (order_by in ("perform_at", "retry_count")) and order_by not in (None, "id"):
        order_by = None
        given.pop("order_by")
    if given.get("reverse") not in (None, "1"):
        raise lowq.ConfigError(f"reverse={given['reverse']!r:.50}: it is 1 or absent")
    unbounded = JobFilter(
        state, given.get("match"), order_by, given.get("reverse") == "1", payload=given.get("payload"),
        error=given.get("error"), error_group=given.get("error_group"), shard=_shard(given.get("shard")),
    )  # fmt: skip
    low, high = (_bound(unbounded, name, given.get(name), now) for name in ("min", "max"))
    return JobQuery(replace(unbounded, min=low, max=high), query.get("after") or None, LIMIT, given)


def as_typed(query: Mapping[str, str]) -> JobQuery:
    """An invalid query, to fill the form with."""
    given = {name: query[name] for name in ("match", "reverse", "min", "max", *_INSIDE) if query.get(name)}
    state = next((state for state in STATES if state == query.get("state")), None)
    order_by = next((order for order in ORDERS if order == query.get("order_by")), None)
    given |= {name: value for name, value in (("state", state), ("order_by", order_by)) if value}
    try:
        shown = JobFilter(state, order_by=order_by, reverse="reverse" in given)
    except lowq.ConfigError:  # an order that this state doesn't have
        shown = JobFilter(state, reverse="reverse" in given)
    return JobQuery(shown, None, LIMIT, given)


def _shard(given: str | None) -> int | None:
    if given is not None and not (given.isascii() and given.isdecimal() and len(given) < 10):
        raise lowq.ConfigError(f"shard={given!r:.50}: it is the number of a shard, from 0 on")
    return None if given is None else int(given)


def _bound(asked: JobFilter, name: str, given: str | None, now: float) -> float | str | None:
    if given is None or asked.order == "id":
        return given
    try:
        # The list counts retries from 1; a job that never failed has 0.
        return text.moment(given, now) if asked.by_time else float(given) - 1
    except (ValueError, OverflowError):
        what = "a time: 2027-01-31T12:00Z, Unix seconds, or -2h, +30min" if asked.by_time else "a number"
        raise lowq.ConfigError(f"{name}={given!r:.50}: it is {what}") from None


@dataclass(frozen=True, slots=True)
class Count:
    """The number of jobs of a tab; an estimate when there are too many to count."""

    number: int
    exact: bool = True


def tab_counts(queue: lowq.Queue, stats: inspection.Stats) -> dict[str, Count]:
    """State ("": all that wait) -> how many.

    No counter has the failed jobs whose retry is still to come. A few are counted one by one.
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


def group_text(handle: lowq.Queue, fingerprint: str | None) -> str | None:
    """What errors of a group say; the fingerprint, when it is forgotten."""
    if fingerprint is None:
        return None
    return next((group.text for group in handle.error_groups() if group.fingerprint == fingerprint), fingerprint)
