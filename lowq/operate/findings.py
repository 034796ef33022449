"""What the doctor finds. What there is to say of each kind of finding is in ``findings.toml``."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal, NamedTuple

Severity = Literal["ok", "warning", "error"]
#: Ids that a finding names; how many there are says its count.
MAX_NAMED = 10
#: A cause that many kinds share.
_BY_HAND = "keys were removed or written by hand or by another program, evicted by Redis (maxmemory-policy), or lost"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at, or that is wrong."""

    #: What kind it is: a short name that stays the same, such as "orphan_payloads".
    code: str
    #: "ok": as it should be. "warning": it may become a problem. "error": jobs are stuck, lost, or about to be.
    severity: Severity
    #: What is wrong, in a sentence.
    what: str
    #: How it may have come; what it means for jobs; what to do now. Empty when the severity is "ok".
    cause: str = ""
    effect: str = ""
    advice: str = ""
    queue: str | None = None
    shards: tuple[int, ...] = ()
    #: Some of the ids, at most 10.
    ids: tuple[str, ...] = ()
    #: Nodes that it is about.
    nodes: tuple[str, ...] = ()
    #: How many ids, shards or nodes it is about.
    count: int = 1
    #: Whether a repair can put it right, or a part of it, without risk.
    repairable: bool = False
    #: How many of them were put right by this examination.
    repaired: int = 0

    @property
    def wrong(self) -> bool:
        """Whether something of it is wrong still."""
        return self.severity != "ok" and self.repaired < self.count


class Kind(NamedTuple):
    """What all findings of one kind have in common. The texts are filled in with `str.format`."""

    severity: Severity
    what: str
    cause: str = ""
    effect: str = ""
    advice: str = ""

    @property
    def repairable(self) -> bool:
        return "lowq doctor --repair" in self.advice


@cache
def read_kinds() -> dict[str, Kind]:
    """The kinds by code, or by ``code.variant`` where the texts of one code differ."""
    table = tomllib.loads((resources.files(__package__) / "findings.toml").read_text(encoding="utf-8"))
    kinds: dict[str, Kind] = {}
    for code, entry in table.items():
        for name, fields in {code: entry}.items() if "what" in entry else entry.items():
            kinds[code if name == code else f"{code}.{name}"] = Kind(**fields)
    return kinds


def codes() -> frozenset[str]:
    """The codes of findings."""
    return frozenset(name.partition(".")[0] for name in read_kinds())


def make_finding(
    name: str,
    fields: Mapping[str, Any],
    *,
    severity: Severity | None = None,
    queue: str | None = None,
    shards: Sequence[int] = (),
    nodes: Sequence[str] = (),
    count: int = 1,
) -> Finding:
    """A finding of the kind with this name. ``fields``: what its texts are filled in with."""
    kind = read_kinds()[name]
    what, cause, effect, advice = (text.format(by_hand=_BY_HAND, queue=queue, **fields) for text in kind[1:])
    return Finding(
        name.partition(".")[0], severity or kind.severity, what, cause, effect, advice, queue=queue,
        shards=tuple(shards), nodes=tuple(nodes), count=count, repairable=kind.repairable,
    )  # fmt: skip
