"""Simulates whole systems, each from one seed (`tests.simulation.story`).

    python -m tests.simulation --seeds 1000            # seeds 0 to 999
    python -m tests.simulation --seeds 500-999
    python -m tests.simulation --seed 7                # one story, with all that it logs
    python -m tests.simulation --seed 7 --shrink       # and which of its faults it takes to fail
    python -m tests.simulation --seeds 2000 --break fencing --until-found

The exit code is 1 when a guarantee did not hold in some story, and with ``--break`` when it held in all of them.
"""

import argparse
import json
import os
import queue
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

#: Stories of one process, which grows with each.
CHUNK = 25
#: Seconds that a story may take.
PATIENCE = 120.0


def tell(first: int, last: int, *options: str) -> Iterator[dict[str, Any]]:
    """What came of these stories, told by a process of their own."""
    command = [sys.executable, "-m", "tests.simulation.worker", str(first), str(last), *options]
    env = {**os.environ, "PYTHONHASHSEED": "0"}
    seed = first
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        for line in process.stdout:
            yield json.loads(line)
            seed += 1
    if process.returncode and seed == first:  # not even the first: it is not the story
        raise SystemExit(f"{' '.join(command)}: ended with {process.returncode} before a story")
    if seed <= last:
        yield {"seed": seed, "problems": [f"its process ended with {process.returncode}"], "took": 0.0, "performs": 0}
        if seed < last:
            yield from tell(seed + 1, last, *options)


def tell_all(first: int, last: int, jobs: int, *options: str) -> Iterator[dict[str, Any]]:
    """The same, by several processes at a time."""
    with ThreadPoolExecutor(jobs) as pool:
        found: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

        def tell_chunk(begin: int) -> None:
            for each in tell(begin, min(begin + CHUNK - 1, last), *options):
                found.put(each)

        chunks = [pool.submit(tell_chunk, begin) for begin in range(first, last + 1, CHUNK)]
        try:
            for _ in range(first, last + 1):
                yield found.get()
        finally:
            for chunk in chunks:
                chunk.cancel()


def one(seed: int, *options: str) -> dict[str, Any]:
    return next(tell(seed, seed, *options))


def shrink(seed: int, faults: Sequence[int], *options: str) -> list[int]:
    """The faults of a failing story that it takes to fail: as few as leaving out some at a time finds."""
    needed, size = list(faults), max(len(faults) // 2, 1)
    while size:
        start = 0
        while start < len(needed):
            kept = needed[:start] + needed[start + size :]
            left_out = ",".join(str(fault) for fault in faults if fault not in kept)
            if one(seed, "--without", left_out, *options)["problems"]:
                needed = kept
            else:
                start += size
        size //= 2
    return needed


def main() -> int:
    parser = argparse.ArgumentParser(prog="make simulate", description="whole systems, each from one seed")
    parser.add_argument("--seeds", default="200", metavar="N", help="so many, or FIRST-LAST")
    parser.add_argument("--seed", type=int, metavar="N", help="one story, with all that it logs")
    parser.add_argument("--shrink", action="store_true", help="which of its faults it takes to fail")
    parser.add_argument("--without", default="", metavar="N,N", help="leave these faults out")
    parser.add_argument("--break", dest="broken", default="", metavar="NAME", help="a build of tests/chaos/broken.py")
    parser.add_argument("--until-found", action="store_true", help="end with the first story that fails")
    parser.add_argument("--twice", action="store_true", help="tell each twice, and compare")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    options = ["--break", given.broken] if given.broken else []
    if given.without:
        options += ["--without", given.without]
    if given.seed is not None:
        return _one(given.seed, options, shrinks=given.shrink)
    head, _, tail = given.seeds.rpartition("-")
    first, last = (int(head), int(tail)) if head else (0, int(tail) - 1)
    began, failed, told = time.monotonic(), list[int](), list[dict[str, Any]]()
    for found in tell_all(first, last, given.jobs, *options, *(["--twice"] if given.twice else [])):
        if found.get("again", found.get("fingerprint")) != found.get("fingerprint"):
            found["problems"].append("it went otherwise when it was told again")
        told.append(found)
        if found["problems"]:
            failed.append(found["seed"])
            more = f" (and {len(found['problems']) - 1} more)" if len(found["problems"]) > 1 else ""
            print(f"seed {found['seed']}: {found['problems'][0][:400]}{more}", flush=True)
            if given.until_found:
                break
    seconds = time.monotonic() - began
    print(
        f"{len(told)} stories, {sum(each['performs'] for each in told)} performs, {len(failed)} failed; "
        f"{seconds:.0f} s, {sum(each['took'] for each in told) / max(len(told), 1):.2f} s of a core a story"
    )
    return bool(failed) != bool(given.broken)


def _one(seed: int, options: Sequence[str], *, shrinks: bool) -> int:
    found = one(seed, "--tell", *options)
    if shrinks and found["problems"]:
        needed = shrink(seed, found["faults"], *options)
        left_out = ",".join(str(fault) for fault in found["faults"] if fault not in needed)
        found = one(seed, "--tell", *options, "--without", left_out)
        print(f"it takes the faults {needed}; the same without the others: --seed {seed} --without {left_out}")
    print(*found["log"], sep="\n")
    print(found["plan"])
    print(*found["problems"], sep="\n")
    return bool(found["problems"])


if __name__ == "__main__":
    sys.exit(main())
