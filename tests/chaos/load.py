"""What producers push: jobs that a seed tells, and what each is to do when it is performed."""

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import lowq
from tests.history import History, PushedJob

#: What jobs do in most loads: nothing as a rule, and some take a little longer.
USUAL: Mapping[str, tuple[int, float]] = {"sleep": (100, 0.003), "sleep 2": (10, 0.03)}


@dataclass(frozen=True, slots=True)
class Load:
    """What all producers of a run do together."""

    producers: int = 4
    ids: int = 1000
    #: Jobs a second.
    rate: float = 800.0
    seconds: float = 6.0
    #: What jobs do -> how many of a thousand, and for how many seconds. "sleep 2" does what "sleep" does.
    mix: Mapping[str, tuple[int, float]] = field(default_factory=lambda: USUAL)
    #: Bytes that each payload is made longer by.
    padding: int = 0
    #: One of so many ids is pushed without scores, so that Redis gives them: 1 is all, 0 none. The others have their
    #: version as the score, beyond those that are refused beside such.
    unscored: int = 4
    #: Seconds after which the payloads of every second id expire; 0: none do.
    ttl: float = 0.0
    #: Seconds for which a push waits for room in a queue with a capacity; 0: it doesn't.
    waits: float = 0.0

    #: What pushes wait for; "": Redis's answer.
    durability: lowq.Durability | None = None

    #: Pushes of one producer in a second.
    PUSHES = 20


#: What a job does only the first time that it is performed.
ONCE = {"late", "raise", "hang", "stall", "exit", "die", "busy", "allocate", "devour", "release"}


def chunks(seed: int, producer: int, load: Load) -> Iterator[list[dict[str, Any]]]:
    """The pushes of one producer: each a list of jobs, with duplicates thrown in and versions shuffled, except of ids
    that have no scores. A producer has ids of its own, so that the order of their versions is known.
    """
    chance = random.Random(f"{seed}/{producer}")
    ids = [str(number) for number in range(load.ids) if number % load.producers == producer]
    unscored = set(ids[:: load.unscored]) if load.unscored else set()
    expiring = expiring_ids(load)
    versions = dict.fromkeys(ids, 0)
    size = max(round(load.rate / load.producers / Load.PUSHES), 1)
    doings = [(name.partition(" ")[0], thousandth, seconds) for name, (thousandth, seconds) in load.mix.items()]
    for _ in range(round(load.seconds * Load.PUSHES)):
        chunk: list[dict[str, Any]] = []
        while len(chunk) < size:
            # Some ids change all the time, most now and then.
            job_id = ids[min(int(chance.expovariate(4 / len(ids))), len(ids) - 1)]
            for _ in range(chance.choice((1, 1, 1, 2, 3))):
                versions[job_id] += 1
                payload: dict[str, Any] = {"version": versions[job_id]}
                dice = chance.randrange(1000)
                for name, thousandth, seconds in doings:
                    if dice < thousandth:
                        payload |= {"do": name, "for": seconds * chance.uniform(0.5, 1.5)}
                        if name in ONCE:
                            payload["once"] = True
                        break
                    dice -= thousandth
                if load.padding:
                    payload["padding"] = "x" * load.padding
                job: dict[str, Any] = {"id": job_id, "payload": payload}
                if job_id in expiring:
                    job["ttl"] = load.ttl
                chunk.append(job if job_id in unscored else job | {"score": 2**40 + versions[job_id]})
        # Without scores the order in which they arrive is all that there is: those keep it among themselves.
        in_order = iter([job for job in chunk if "score" not in job])
        chance.shuffle(chunk)
        chunk = [job if "score" in job else next(in_order) for job in chunk]
        yield chunk + [job for job in chunk if "score" in job][: len(chunk) // 10]


def expiring_ids(load: Load) -> set[str]:
    """The ids whose payloads have a ttl."""
    return {str(number) for number in range(load.ids) if number % 2} if load.ttl else set()


def poisonous_ids(seed: int, load: Load) -> set[str]:
    """The ids with payloads that kill whoever performs them, every time."""
    jobs = (job for producer in range(load.producers) for chunk in chunks(seed, producer, load) for job in chunk)
    return {job["id"] for job in jobs if job["payload"].get("do") == "poison"}


def produce(worker: type[lowq.Worker[Any]], history: History, seed: int, producer: int, load: Load) -> None:
    """Pushes in time; a push that takes long is followed by the next at once."""
    began = time.monotonic()
    for number, chunk in enumerate(chunks(seed, producer, load)):
        time.sleep(max(began + number / Load.PUSHES - time.monotonic(), 0))
        push_until_accepted(worker, history, chunk, load.waits, load.durability)


def push_until_accepted(
    worker: type[lowq.Worker[Any]],
    history: History,
    jobs: Sequence[Mapping[str, Any]],
    waits: float,
    durability: lowq.Durability | None,
) -> None:
    """Pushes, and pushes again what Redis has not surely accepted."""
    pending = list(jobs)
    while pending:
        try:
            with history.pushing(pushed(pending)):
                worker.perform_async(pending, timeout=waits or None, durability=durability)
            return
        except lowq.PushError as error:
            rest = [*error.unsafe, *error.rest]
            kept = {id(job) for job in rest}
            history.write("pushed", push="part", jobs=pushed([job for job in pending if id(job) not in kept]))
            _refused(history, error)
            pending = rest
        except (lowq.RedisUnavailable, lowq.RedisFull) as error:
            _refused(history, error)
        time.sleep(0.05)


def _refused(history: History, error: Exception) -> None:
    history.write("refused", kind=type(error).__name__, error=str(error))


def pushed(jobs: Sequence[Mapping[str, Any]]) -> list[PushedJob]:
    """What the history keeps of jobs."""
    return [(job["id"], job["payload"]["version"], job.get("score")) for job in jobs]
