"""What the pages call things: the words of people who operate job queues. Addresses, the API and the command line have
those of the library; where the two differ, a hint names the other one.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

from lowq.operate.actions import ActionName

#: An action on jobs, or another number of shards for a queue.
TaskAction = Literal[ActionName, "reshard"]


class Term(NamedTuple):
    """A figure: its name, and what is shown on hover."""

    word: str
    hint: str


#: Figure -> its name, on all pages.
TERMS: Mapping[str, Term] = {
    "lag": Term("Latency", "How long the oldest due job has been waiting; lag in lowq's API"),
    "due": Term("Due", "Queued, and their time has come"),
    "taken": Term("Running", "A worker or consumer has them; taken in lowq's API, Busy in Lowkiq"),
    "length": Term("Queued", "They wait to run, due or not; Enqueued in Lowkiq"),
    "fresh": Term("Fresh", "Queued, never failed; due or not"),
    "retries": Term("Retries", "Queued, failed at least once; due or not"),
    "morgue": Term("Dead", "Given up: failed too often, or buried by hand; the morgue in lowq's API"),
    "processed": Term("Processed", "Since the queue was created"),
    "failed": Term("Failed", "Since the queue was created"),
}
#: State of a job -> its name, where that is another one.
STATES: Mapping[str, str] = {"taken": "running", "morgue": "dead"}
_JOBS: Mapping[str | None, str] = {None: "queued jobs", "any": "jobs"}
_DO: Mapping[TaskAction, str] = {
    "perform_now": "run {} now",
    "kick": "retry {} now",
    "bury": "bury {}",
    "delete": "delete {}",
    "cancel": "cancel {}",
    "reshard": "reshard {}",
}
#: Action -> its name; and what was done, in a sentence about jobs.
VERBS: Mapping[TaskAction, str] = {action: " ".join(words.format("").split()) for action, words in _DO.items()}
DONE: Mapping[TaskAction, str] = {
    "perform_now": "made due now",
    "kick": "queued again",
    "bury": "buried",
    "delete": "deleted",
    "cancel": "cancelled",
    "reshard": "moved",
}
#: Action -> what a button says of it on hover.
ACTION_HINTS: Mapping[TaskAction, str] = {
    "perform_now": "Makes them due now; their retries count on",
    "kick": "Queues them again, due now, with all their retries; kick in lowq's API",
    "bury": "Gives them up: they are dead until somebody retries them",
    "delete": "With all their payloads, for good",
    "cancel": "Their handlers are interrupted, and nothing of them runs again; cancel in lowq's API",
}


def state_word(state: str) -> str:
    """``dead`` for ``morgue``."""
    return STATES.get(state, state)


def jobs_of(state: str | None) -> str:
    """Jobs of a state; None: all that wait."""
    return _JOBS.get(state) or f"{state_word(state or '')} jobs"


def do(action: TaskAction, what: str) -> str:
    """``Retry 3 jobs now``, or without ``what`` ``Retry now``: for buttons and headings."""
    words = _DO[action].format(what) if what else VERBS[action]
    return words[:1].upper() + words[1:]
