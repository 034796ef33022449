"""Names that were given up don't come back: the glossary has the words that are used instead."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.rows import case

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("lowq", "web/lowq_web", "docs", "tests", "examples", "benchmarks")
SUFFIXES = {".py", ".lua", ".md", ".html", ".js"}

#: As a regular expression -> what it is called now.
GIVEN_UP = {
    r"\b[Kk]eeper": "maintenance loop",
    r"\b[Mm]end(s|ed|ing|able)?\b": "repair",
    r"\bTrip\b|(?<![Rr]ound )\btrips?\b(?! =)": "Delivery; `round trip` for the network",
    r"\b(Seat|Rider|EarlyAcks)\b|\bclass (Home|Bench|Held)\b(?!\(lowq)": "ThreadActivity, NodeContext, LeaseDenied",
    r"\b[Ll]one\b|_lone\b|\blone_": "inline",
    r"\b(lay_out|become_set)\b": "materialize, promote_to_zset",
    r"\b(horizon|ailments?|vitals|Ward)\b": "due_cutoff, integrity_error, shard_snapshot, JobScanner",
    r"\b(run_now|mend_shard)\b|\b(look|walk|extent|note|record)\.lua\b": "see the scripts in docs/design.md",
    r"[.'\"]died\b|lowq_died": "buried",
    r"\bspoiled\b": "undecodable",
    r"\bleft_out\(|\bspared\b|\.apart\(": "log_skipped, uncharged, with_own_pool",
    r"\b[Rr]etire[sd]?\b": "drain",
    r"\b(Lookout|Slots|Asked)\b|\bclass Figures\b": "StatsCache, ConcurrencyLimit, JobQuery, Snapshot",
    r"\bis_void\b|local function forgive\b|['\"`]void['\"`]": "is_superseded, leave_uncharged",
    r"\bseen_since\b": "server_time, server_time_since",
    r"\btake\.lua\b|Call\(['\"]take['\"]|\btest_take\b": "ack_and_take",
    r"\bfates?\b|\b_words\b(?=\[|:)": "outcomes",
    r"\blowq[./](connection|keys|scripts|foreign|keeper|seat|batch|dispatch|rates|why|registry)\b": "see design.md",
}

#: The same for words that are given up only below some folders, as elsewhere they have their plain meaning.
GIVEN_UP_BELOW = {
    r"\b([Tt]ell(s|er|ing)?|[Tt]old|TOLD)\b|_tells?\b|\btells?_|_told\b|\btold_": (
        "send_command, sent", ("web/lowq_web", "tests/rules/web", "tests/browser", "lowq/cli", "lowq/supervisor"),
    ),
    r"\b_tell\b|tell_worker|_told\b|_told_|_TOLD\b|\bTOLD_|\.told\b": (
        "wake, requested, logged, notify", ("lowq/node", "lowq/store", "lowq/broker", "lowq/metrics"),
    ),
    r"\b(COME_AGAIN|LOOK)\b": ("RECONNECT_AFTER, an event", ("web/lowq_web",)),
}  # fmt: skip


@cache
def texts() -> dict[Path, str]:
    return {
        path.relative_to(ROOT): path.read_text("utf-8")
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in SUFFIXES
        and path != Path(__file__).resolve()
        and "uplot" not in path.name
        and ".peers" not in path.parts  # the systems that lowq is compared with, where they are installed
    }


def lines_with(pattern: re.Pattern[str]) -> Iterator[str]:
    for path, text in texts().items():
        for found in pattern.finditer(text):
            number = text.count("\n", 0, found.start()) + 1
            yield f"{path}:{number}: {text.splitlines()[number - 1].strip()}"


def test_a_name_that_was_given_up_is_not_used() -> None:
    everywhere = {name: (now, FOLDERS) for name, now in GIVEN_UP.items()}
    for name, (now, folders) in {**everywhere, **GIVEN_UP_BELOW}.items():
        with case(name):
            found = [line for line in lines_with(re.compile(name)) if line.startswith(folders)]
            assert found == [], f"it is called {now} now"


def test_no_file_of_the_dashboard_means_two_things_by_snapshot() -> None:
    """`lowq.Snapshot` are the jobs that an action is bound to, `stats_cache.Snapshot` are the figures of all queues."""
    both = [
        path.name
        for path in (ROOT / "web/lowq_web").rglob("*.py")
        if re.search(
            r"^from lowq_web.stats_cache import .*\bSnapshot\b|^class Snapshot\b", path.read_text(), re.MULTILINE
        )
        and re.search(r"\blowq\.Snapshot\b(?!`)", path.read_text())
    ]
    assert both == []
