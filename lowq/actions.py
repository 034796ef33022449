"""What people do to jobs by hand: one script call per shard and some 200 ids, repeated where a job takes more."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from lowq.connection import Call, Client
from lowq.errors import LowqError

ActionName = Literal["perform_now", "bury", "kick", "delete"]
ACTIONS: tuple[ActionName, ...] = get_args(ActionName)

#: Ids of one call: with small jobs it holds Redis for a few milliseconds.
MAX_IDS = 200
#: Ids that `Acted.left` names at most.
MAX_LEFT = 1000
#: Why nothing was done to an id, in words.
IN_FLIGHT = "in flight, left alone"
CHANGED = "changed since it was looked at, left alone"
MISSING: dict[ActionName, str] = {
    "kick": "not in the morgue",
    "bury": "no such job waits",
    "delete": "no such job waits or is buried",
    "perform_now": "no such job waits",
}

_DONE, _AGAIN, _IN_FLIGHT = 1, 2, 3


@dataclass(frozen=True, slots=True)
class Acted:
    """What became of the ids that something was done to. As a number: how many it was done to."""

    done: int = 0
    #: In flight, and therefore left alone.
    in_flight: int = 0
    #: Not there, not where the action looks, or changed where it was not to be. An id that is named twice may be
    #: missing the second time, and so may one whose reply was lost, since the call is repeated then.
    missing: int = 0
    #: The first 1,000 ids that it was not done to, and why, in words. Not compared.
    left: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    def __int__(self) -> int:
        return self.done

    def __bool__(self) -> bool:
        return self.done > 0

    def __add__(self, other: "Acted") -> "Acted":
        return Acted(
            self.done + other.done,
            self.in_flight + other.in_flight,
            self.missing + other.missing,
            (*self.left, *other.left[: MAX_LEFT - len(self.left)]) if len(self.left) < MAX_LEFT else self.left,
        )


class Action(NamedTuple):
    """What is to be done."""

    name: ActionName
    #: Unix time, seconds, as text, or "": the server's clock.
    now: str = ""
    #: Why it is buried; empty: the job's last error.
    reason: bytes = b""
    #: delete only: "waiting", "morgue" or "" for both.
    where: str = ""

    def call(self, prefix: str, ids: Sequence[bytes], not_after: str) -> Call:
        if self.name == "perform_now":
            return Call("run_now", prefix, [self.now, not_after, *ids])
        if self.name == "kick":
            return Call("kick", prefix, [self.now, not_after, *ids])
        if self.name == "delete":
            return Call("delete", prefix, [self.now, self.where, not_after, *ids])
        items = [part for job_id in ids for part in (job_id, self.reason, 0)]
        return Call("bury", prefix, [self.now, "", "", not_after, *items])


def act(client: Client, prefix: str, action: Action, ids: Sequence[bytes], not_after: str = "") -> Acted:
    """Does it to the ids of one shard, in bounded calls. ``not_after``: only to jobs whose perform_at, or burial,
    is not after this (Unix time, seconds, as text; "" = any).

    Raises:
        RedisUnavailable, RedisRefused, ScriptError: ``done`` tells to how many it was done before.
    """
    done = in_flight = missing = 0
    left: list[tuple[str, str]] = []
    for start in range(0, len(ids), MAX_IDS):
        pending = ids[start : start + MAX_IDS]
        while pending:
            call = action.call(prefix, pending, not_after)
            try:
                reply = client.run(call.script, prefix, *call.args)
            except LowqError as error:
                error.done += done
                raise
            again = []
            for job_id, code in zip(pending, reply, strict=True):
                if code == _DONE:
                    done += 1
                    continue
                if code == _AGAIN:
                    again.append(job_id)
                    continue
                if code == _IN_FLIGHT:
                    in_flight += 1
                else:
                    missing += 1
                if len(left) < MAX_LEFT:
                    why = IN_FLIGHT if code == _IN_FLIGHT else MISSING[action.name]
                    left.append((job_id.decode("utf-8", "surrogateescape"), why))
            pending = again
    return Acted(done, in_flight, missing, tuple(left))
