"""Which jobs a page or a request asks for, of a queue or of several: parsed from an address, and written into one."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import lowq
from lowq import inspection
from lowq.inspection import JobFilter
from lowq.operate.actions import ActionName
from lowq.operate.bulk import filter_for
from lowq.operate.job_filter import FILTER_STATES, ORDERS, FilterState
from lowq.retry import attempt_number
from lowq_web import text
from lowq_web.words import TERMS

#: Jobs of a page.
LIMIT = 50
#: Fields of the filter that look into a job, and that name its shard.
_INSIDE = ("payload", "error", "error_group", "shard", "priority")
#: Fields of an address.
FIELDS = ("queue", "state", "match", "order_by", "reverse", "min", "max", *_INSIDE)
#: What addresses call the state of all that wait.
WAITING = "waiting"
_WORDS = (WAITING, *FILTER_STATES)
#: Failed jobs up to which those whose retry is to come are counted; above, all failed ones are shown.
COUNTED = 5000


Page = inspection.Page | inspection.FoundPage


class Queues:
    """Several queues as one: what the handle of a queue does with a filter, with those of all of them."""

    def __init__(self, app: lowq.Lowq, part: str = "", names: Iterable[str] | None = None) -> None:
        #: A part of their names, in any case; "" for all queues.
        self.part = part
        found = (info.name for info in app.queues()) if names is None else names
        self.names = [name for name in found if part.casefold() in name.casefold()]
        self.jobs_in_steps = partial(app.jobs_in_steps, queues=self.names)
        self.bulk = partial(app.bulk, queues=self.names)
        self.snapshot = partial(app.snapshot, queues=self.names)
        self.count = partial(app.count, queues=self.names)
        self.error_groups = app.error_groups

    def __str__(self) -> str:
        return queues_with(self.part)


def queues_with(part: str) -> str:
    """Those with a part in their names, in words."""
    return f"queues with “{part}” in their names" if part else "all queues"


Target = lowq.Queue | Queues


@dataclass(frozen=True, slots=True)
class JobQuery:
    """Which jobs, in which order. `given` is how it was typed, for addresses and forms."""

    filter: JobFilter
    after: str | None
    limit: int
    given: dict[str, str]

    @property
    def tab(self) -> str:
        """Its state, as addresses have it."""
        return self.filter.state or WAITING

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
        return self.filter.bounded or any(self.given.get(name) for name in ("queue", "match", *_INSIDE))

    @property
    def may_bulk(self) -> bool:
        """Whether a bulk action can do exactly what is listed. Not by payloads: some are masked."""
        asked = self.filter
        if asked.payload is not None:
            return False
        try:
            filter_for("cancel" if asked.state == "taken" else "delete", asked)
        except lowq.ConfigError:
            return False
        return True

    def without(self, *names: str, **more: str | None) -> dict[str, str | None]:
        """The query of a similar page."""
        return {**{name: value for name, value in self.given.items() if name not in names}, **more}

    def pages(self, target: Target, redact: Callable[[Any], Any]) -> Iterator[Page | None]:
        """The page as far as it is known, again and again; None while nothing new is found. The last one is complete.

        Raises:
            ConfigError: the query makes no sense.
        """
        return news(target.jobs_in_steps(self.filter, limit=self.limit, after=self.after, redact=redact))

    def filter_for(self, action: ActionName) -> JobFilter:
        """The filter of a bulk action on all that is listed.

        Raises:
            ConfigError: it can't be done to these, or they are bounded by something else than time.
        """
        state = None if action == "perform_now" and self.filter.state == "due" else self.filter.state
        return filter_for(action, replace(self.filter, state=state))


def news(pages: Iterator[Page]) -> Iterator[Page | None]:
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


def asked_of(query: Mapping[str, str], now: float, default: str = WAITING) -> JobQuery:
    """Parses the query of a page's address. Empty values count as absent; without a state it is the default. Bounds are
    as the list shows them: in order of ``retry_count`` they are the number of the coming attempt.

    Raises:
        ConfigError: it names what is allowed.
    """
    given = {name: query[name].strip() for name in FIELDS if query.get(name, "").strip()}
    word, order_by = given.get("state", default), given.get("order_by")
    if word not in _WORDS:
        raise lowq.ConfigError(f"state={word!r:.50}: it is one of {', '.join(_WORDS)}")
    state = _state_of(word)
    if order_by is not None and order_by not in ORDERS:
        raise lowq.ConfigError(f"order_by={order_by!r:.50}: it is one of {', '.join(ORDERS)}")
    # The order of another tab that this one does not have.
    is_other = (state == "morgue") == (order_by in ("perform_at", "retry_count")) and order_by != "id"
    if order_by is not None and (is_other or state == "any"):
        order_by = None
        given.pop("order_by")
    if given.get("reverse") not in (None, "1"):
        raise lowq.ConfigError(f"reverse={given['reverse']!r:.50}: it is 1 or absent")
    unbounded = JobFilter(
        state, given.get("match"), order_by, given.get("reverse") == "1", payload=given.get("payload"),
        error=given.get("error"), error_group=given.get("error_group"),
        shard=_number("shard", given.get("shard"), "the number of a shard, from 0 on"),
        priority=_number("priority", given.get("priority"), "a whole number from 0, the most urgent, to 9"),
    )  # fmt: skip
    low, high = (_bound(unbounded, name, given.get(name), now) for name in ("min", "max"))
    return JobQuery(replace(unbounded, min=low, max=high), query.get("after") or None, LIMIT, given)


def _state_of(word: str | None) -> FilterState | None:
    return next((state for state in FILTER_STATES if state == word), None)


def as_typed(query: Mapping[str, str], default: str = WAITING) -> JobQuery:
    """An invalid query, to fill the form with."""
    given = {name: query[name] for name in FIELDS if query.get(name)}
    if given.get("order_by") not in ORDERS:
        given.pop("order_by", None)
    if given.get("state", default) not in _WORDS:
        given.pop("state")
    state = _state_of(given.get("state", default))
    order_by = next((order for order in ORDERS if order == given.get("order_by")), None)
    try:
        shown = JobFilter(state, order_by=order_by, reverse="reverse" in given)
    except lowq.ConfigError:  # an order that this state doesn't have
        shown = JobFilter(state, reverse="reverse" in given)
    return JobQuery(shown, None, LIMIT, given)


def _number(name: str, given: str | None, must_be: str) -> int | None:
    if given is not None and not (given.isascii() and given.isdecimal() and len(given) < 10):
        raise lowq.ConfigError(f"{name}={given!r:.50}: it is {must_be}")
    return None if given is None else int(given)


def _bound(asked: JobFilter, name: str, given: str | None, now: float) -> float | str | None:
    if given is None or asked.order == "id":
        return given
    try:
        return text.moment(given, now) if asked.by_time else float(given) - attempt_number(0)
    except (ValueError, OverflowError):
        what = "a time: 2027-01-31T12:00Z, Unix seconds, or -2h, +30min" if asked.by_time else "a number"
        raise lowq.ConfigError(f"{name}={given!r:.50}: it is {what}") from None


@dataclass(frozen=True, slots=True)
class Tab:
    """The jobs of a state: what they are called, and how many there are."""

    state: str
    #: Of the figures, that counts them.
    field: str | None
    word: str
    hint: str
    number: int
    #: False: there are too many to count.
    exact: bool = True


def tabs(stats: Any, retrying: int | None) -> list[Tab]:
    """The states of jobs, by the figures of a queue or of all. ``retrying``: how many jobs wait for the time of their
    retry, which no counter has; None: they were not counted.
    """
    exact = retrying is not None
    later = stats.length - stats.due
    failed = min(stats.retries, later) if retrying is None else retrying
    return [
        Tab("any", None, "All", "Running, queued and dead", stats.taken + stats.length + stats.morgue_length),
        Tab(WAITING, "length", TERMS["length"].word, "Due, scheduled and retrying", stats.length),
        Tab("due", "due", "Due", "Their time has come, failed before or not", stats.due),
        Tab("scheduled", "scheduled", "Scheduled", "Never failed, and their time has not come",
            max(later - failed, 0), exact),
        Tab("retrying", "retrying", "Retrying", "Failed before, and the time of their retry has not come", failed,
            exact),
        Tab("taken", "taken", *TERMS["taken"], stats.taken),
        Tab("morgue", "morgue_length", *TERMS["morgue"], stats.morgue_length),
    ]  # fmt: skip


def count_retrying(queue: lowq.Queue, stats: inspection.Stats) -> int | None:
    """How many jobs wait for the time of their retry: a few are counted one by one. None: there are too many."""
    if stats.retries == 0 or stats.due == 0:
        return stats.retries
    return queue.count("bury", "retrying") if stats.retries <= COUNTED else None


def group_text(target: Target, fingerprint: str | None) -> str | None:
    """What errors of a group say; the fingerprint, when it is forgotten."""
    if fingerprint is None:
        return None
    return next((group.text for group in target.error_groups() if group.fingerprint == fingerprint), fingerprint)
