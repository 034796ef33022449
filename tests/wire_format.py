"""The record of the wire format: which keys and fields there were, so that none changes unnoticed.

    .venv/bin/python -m tests.wire_format

It compares `lowq/store/keys.py` with `tests/wire_format.txt`, adds what differs to the record, and a row for each to
the table of changes in docs/compatibility.md. A person writes into the row what an older release does with it: a test
fails until that is done.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from lowq.sharding import shard_of
from lowq.store.keys import FORMAT, NAMESPACE_KEYS, SHARD_KEYS, shard_prefix

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "tests" / "wire_format.txt"
PAGE = ROOT / "docs" / "compatibility.md"
#: What stands in a row until somebody has written something.
MISSING = "TODO"
#: The line of the record behind which changes follow: before it are the keys as they were when the record began.
CHANGES = "# changes"
_TABLE = re.compile(r"(<!-- changes of keys: begin.*? -->\n)(.*?)(<!-- changes of keys: end -->)", re.DOTALL)
_ROW = re.compile(r"^\| `([^`]+)` \| (added|removed) \| (.*) \|$", re.MULTILINE)


class Change(NamedTuple):
    """A line of the record."""

    #: ``added`` or ``removed``.
    what: str
    #: Where it is, its name, and its type: ``shard due zset``, ``shard meta.owner field``.
    item: str


def items() -> list[str]:
    """The keys and fields as the code has them, and where some ids and shards are."""
    found = [f"format {FORMAT}"]
    found += [f"id {job_id} of 24 in shard {shard_of(job_id.encode(), 24)}" for job_id in ("42", "order 7", "ä")]
    found += [
        f"shard {shard} of {queue}, epoch {epoch}, in {shard_prefix('lowq', queue, shard, epoch)}"
        for queue, shard, epoch in (("Orders", 0, 0), ("Orders", 3, 0), ("Orders", 3, 1), ("mail", 16383, 12))
    ]
    for place, keys in (("shard", SHARD_KEYS), ("namespace", NAMESPACE_KEYS)):
        for key in keys:
            found.append(f"{place} {key.name} {' or '.join(key.types)}")
            found += [f"{place} {key.name}.{name} field" for name in key.fields]
    return found


def read(record: str) -> tuple[list[str], list[Change]]:
    """What there is by the record, and the changes of it."""
    begin, _, rest = record.partition(f"{CHANGES}\n")
    there = [line for line in begin.splitlines() if line and not line.startswith("#")]
    changes = []
    for line in rest.splitlines():
        sign, _, item = line.partition(" ")
        changes.append(Change({"+": "added", "-": "removed"}[sign], item))
        if sign == "+":
            there.append(item)
        else:
            there.remove(item)
    return there, changes


def differences(there: Iterable[str], now: Iterable[str]) -> list[Change]:
    """What the record does not have yet."""
    there, now = list(there), list(now)
    added = [Change("added", item) for item in now if item not in there]
    return [*(Change("removed", item) for item in there if item not in now), *added]


def notes(page: str) -> dict[Change, str]:
    """What is written about each change."""
    table = _TABLE.search(page)
    assert table is not None, "the page has no place for the changes of keys"
    return {Change(what, item): text.strip() for item, what, text in _ROW.findall(table[2])}


def renewed(record: str, page: str, now: Iterable[str]) -> tuple[str, str]:
    """The record with what differs, and the page with a row for each."""
    there, changes = read(record)
    new = differences(there, now)
    record += "".join(f"{'+' if change.what == 'added' else '-'} {change.item}\n" for change in new)
    known = notes(page)
    rows = [f"| `{item}` | {what} | {MISSING} |\n" for what, item in [*changes, *new] if (what, item) not in known]
    return record, _TABLE.sub(lambda found: f"{found[1]}{found[2]}{''.join(rows)}{found[3]}", page)


def problems(record: str, page: str, now: Iterable[str]) -> list[str]:
    """What is to be done before a change of keys or fields is complete; empty: nothing."""
    there, changes = read(record)
    found = [
        f"{item} is {what} and not recorded: run python -m tests.wire_format" for what, item in differences(there, now)
    ]
    known = notes(page)
    found += [
        f"docs/compatibility.md has no note about `{change.item}` ({change.what}): say there what an older release "
        "does with it, and what follows for upgrades"
        for change in changes
        if known.get(change, MISSING) in ("", MISSING)
    ]
    found += [
        f"docs/compatibility.md has a note about `{item}`, {what}: no such change"
        for what, item in known.keys() - set(changes)
    ]
    return found


def main() -> None:
    record, page = renewed(RECORD.read_text("utf-8"), PAGE.read_text("utf-8"), items())
    RECORD.write_text(record, "utf-8")
    PAGE.write_text(page, "utf-8")


if __name__ == "__main__":
    main()
