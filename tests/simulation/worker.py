"""Tells stories in this process: started by `tests.simulation`, one JSON line for each story.

python -m tests.simulation.worker FIRST LAST [--break NAME] [--faults JSON] [--without 3,5] [--tell] [--twice]
"""

# Before anything else: what is imported takes the machine's parts out of the modules.
import time

real_clock = time.process_time
from tests.simulation import machine  # noqa: E402

machine.install()

import argparse  # noqa: E402
import gc  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402

from lowq.store.calls import load_scripts  # noqa: E402
from tests.chaos import broken  # noqa: E402
from tests.mutants import MUTATIONS, OF_STORIES  # noqa: E402
from tests.simulation.story import changed, draw, tell  # noqa: E402

MUTATIONS_BY_NAME = {mutation.name: mutation for mutation in (*MUTATIONS, *OF_STORIES)}
#: Stories in which everybody who may perform has a part.
WARM_UP = (3, 5, 1)


def put_in(fault: str) -> None:
    """Breaks lowq, by a build of `tests.chaos.broken` or a mutation of its scripts. "": leaves it as it is."""
    if fault in MUTATIONS_BY_NAME:
        load_scripts().update(MUTATIONS_BY_NAME[fault].scripts_with_it())
    else:
        broken.apply(fault)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int)
    parser.add_argument("--break", dest="broken", default="")
    parser.add_argument("--faults", default="", help="JSON, name -> what of the plans is other: when is each found?")
    parser.add_argument("--without", default="")
    parser.add_argument("--tell", action="store_true")
    parser.add_argument("--twice", action="store_true")
    given = parser.parse_args()
    if not given.faults:
        put_in(given.broken)
    for seed in WARM_UP:  # what is imported or kept at the first use is there when the first story begins
        tell(seed)
    gc.freeze()
    gc.set_threshold(50_000)  # little of a story becomes garbage before its end, and much is kept for good
    for fault, changes in json.loads(given.faults or "{}").items():
        if os.fork() == 0:  # each is put into a process of its own, which has been warmed up
            put_in(fault)
            plans = (changed(draw(seed), changes) for seed in range(given.first, given.last + 1))
            failing = (plan.seed for plan in plans if tell(plan.seed, plan=plan).problems)
            told = {"fault": fault, "found": next(failing, None), "of": given.last - given.first + 1}
            print(json.dumps(told), flush=True)
            os._exit(0)
        os.wait()
    if given.faults:
        return
    without = {int(each) for each in given.without.split(",") if each}
    for seed in range(given.first, given.last + 1):
        began = real_clock()
        outcome = tell(seed, without)
        found = {
            "seed": seed, "problems": outcome.problems, "seconds": outcome.seconds, "took": real_clock() - began,
            "steps": outcome.steps, "commands": outcome.commands, "fingerprint": outcome.fingerprint,
            "performs": outcome.report.performs if outcome.report else 0,
            "faults": [fault.number for fault in outcome.plan.faults if fault.number not in without],
        }  # fmt: skip
        if given.twice:
            found["again"] = tell(seed, without).fingerprint
        if given.tell:
            found["log"], found["plan"] = outcome.log, str(outcome.plan)
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
