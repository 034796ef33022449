"""A producer that keeps to a timetable: jobs arrive at random moments, whatever becomes of the ones before.

    python -m benchmarks.figures.arrivals --url URL --rate 100 --seconds 5 [--queue Q] [--shards N] [--id ID]

The moments are those of a Poisson process. A job carries the moment at which it was *to be* sent, and its delay counts
from there: should a push take long, those behind it are late, and their delay says so. Otherwise whoever measures
would wait together with what it measures, and would not see it. Says 'done' with the number of jobs sent and how late
the latest one was sent.
"""

import argparse
import random
import time
from contextlib import closing

import lowq
from benchmarks.peers.handler import say
from benchmarks.peers.work import QUEUE


def timetable(rate: float, seconds: float, seed: int) -> list[float]:
    """Moments between 0 and `seconds`, on average `rate` a second."""
    draw = random.Random(seed)
    moments: list[float] = []
    moment = draw.expovariate(rate)
    while moment < seconds:
        moments.append(moment)
        moment += draw.expovariate(rate)
    return moments


def main() -> None:
    """Sends them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--rate", type=float, required=True, help="jobs per second")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--queue", default=QUEUE)
    parser.add_argument("--shards", type=int, default=5)
    parser.add_argument("--id", default="", help="all of this id, and not pings; default: all different")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    moments = timetable(options.rate, options.seconds, options.seed)
    with closing(lowq.Lowq(redis_url=options.url)) as app:
        queue = app.queue(options.queue, options.shards)
        queue.stats()  # connects
        latest = 0.0
        say("begins", count=len(moments))
        begin = time.monotonic() + 0.05
        for number, moment in enumerate(moments):
            intended = begin + moment
            ahead = intended - time.monotonic()
            if ahead > 0:
                time.sleep(ahead)
            else:
                latest = max(latest, -ahead)
            if options.id:
                queue.push({"id": options.id, "payload": {"v": number}})
            else:
                queue.push({"id": number, "payload": {"v": number, "sent": intended}})
    say("done", sent=len(moments), latest=latest)


if __name__ == "__main__":
    main()
