"""Runs the faults and writes the matrix.

    python -m tests.chaos --seed 1 --out docs/proof.md
    python -m tests.chaos --only kill,freeze --runs 10
    python -m tests.chaos --only kill --schedule                 # what would be done when, and no more

A run that breaks a guarantee keeps its folder (history, logs, Redis) and says where; the exit code is 1 then.
"""

import argparse
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.chaos import clocks, matrix
from tests.chaos.faults import BY_NAME, FAULTS
from tests.chaos.measures import measure_all
from tests.chaos.stage import Fault, Outcome, run
from tests.debian import version_of
from tests.redis_server import executable


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1, help="of the first run; the next one has the next number")
    parser.add_argument("--runs", type=int, default=2, help="of each fault (default: %(default)s)")
    parser.add_argument(
        "--only", default="", help="faults, separated by commas; cluster, sentinel: all of these: " + ", ".join(BY_NAME)
    )
    parser.add_argument(
        "--out", type=Path, help="a file with the markers of the matrix; with --only its other rows stay"
    )
    parser.add_argument("--schedule", action="store_true", help="show what is planned, and end")
    parser.add_argument("--no-measures", dest="measures", action="store_false", help="leave out what is only measured")
    return parser.parse_args(arguments)


def chosen(names: str) -> list[Fault]:
    if not names:
        return FAULTS
    found: list[Fault] = []
    for name in names.split(","):
        some = [fault for fault in FAULTS if fault.name == name or fault.servers == name]
        if not some:
            sys.exit(f"unknown fault {name!r}; there are: {', '.join(BY_NAME)}")
        found += some
    return found


def show_schedule(faults: Sequence[Fault], seed: int) -> None:
    for fault in faults:
        say(f"{fault.name}, seed {seed}: {fault.title}")
        for step in fault.steps(seed):
            say(f"  {step}")
        for death in fault.deaths(seed):
            say(f"  a node dies at {death}")


def tell(outcome: Outcome) -> None:
    report = outcome.report
    say(
        f"{outcome.fault} seed {outcome.seed} {outcome.persistence}: {outcome.seconds:.0f} s, harm {outcome.harm}, "
        f"accepted {report.accepted}, lost {len(report.lost)}, again {report.repeats} "
        f"({report.repeats_of_finished} finished, {report.repeated_work * 1000:.0f} ms), "
        f"out of order {report.out_of_order}, overlaps {len(report.overlaps)}, fenced {len(report.fenced)}, "
        f"buried {outcome.buried}, refused {outcome.refused}, recovery {outcome.recovery:.2f} s, "
        f"bystanders {outcome.bystanders:.2f} s, "
        f"settled in {outcome.settled:.1f} s"
    )
    if outcome.missed:
        say(f"    no node came to {', '.join(outcome.missed)}")
    for problem in outcome.problems[:10]:
        say(f"    PROBLEM {problem}")
    if outcome.problems:
        say(f"    {len(outcome.problems)} problems; all about it is in {outcome.folder}")


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    faults = chosen(options.only)
    if options.schedule:
        show_schedule(faults, options.seed)
        return 0
    began = time.monotonic()
    outcomes: list[Outcome] = []
    for fault in faults:
        if fault.clocks and not clocks.available():
            say(f"{fault.name}: skipped, clocks can only be made wrong on Linux with a C compiler")
            continue
        for seed in range(options.seed, options.seed + options.runs):
            for persistence in fault.persistence:
                outcomes.append(run(fault, seed, persistence))
                tell(outcomes[-1])
    measures = measure_all(outcomes) if options.measures else []
    lines = [*introduction(options.seed, options.runs), "", *matrix.table(faults, outcomes)]
    if measures:
        lines += ["", *matrix.measures_table(measures)]
    say("")
    say("\n".join(lines))
    say(f"\n{time.monotonic() - began:.0f} s")
    if options.out and options.only:
        matrix.put_rows(options.out, FAULTS, outcomes)
    elif options.out:
        matrix.put(options.out, lines)
    broken = [measure for measure in measures if not measure.holds]
    for measure in broken:
        say(f"DOES NOT HOLD: {measure.what}: {measure.measured}, must be {measure.bound}")
    return 1 if broken or any(outcome.problems for outcome in outcomes) else 0


def introduction(seed: int, runs: int) -> list[str]:
    seeds = f"seeds {seed} to {seed + runs - 1}" if runs > 1 else f"seed {seed}"
    versions = f"{version_of(executable())}, Python {platform.python_version()}"
    command = f"`make chaos ARGS='--seed {seed} --runs {runs}'`"
    kinds = "Workers are async at even seeds, in threads at odd ones, where the row doesn't say."
    return [f"{command}: {seeds}, leases of 1 s, {versions}, {os.cpu_count()} cores. {kinds}"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
