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
    #: Whether Redis assigns the scores; else it is the version.
    unscored: bool = False

    #: Pushes of one producer in a second.
    PUSHES = 20


#: What a job does only the first time that it is performed.
ONCE = {"raise", "hang", "exit", "die", "busy", "allocate", "devour", "release"}


def chunks(seed: int, producer: int, load: Load) -> Iterator[list[dict[str, Any]]]:
    """The pushes of one producer: each a list of jobs, with duplicates thrown in and versions shuffled. A producer has
    ids of its own, so that the order of their versions is known.
    """
    chance = random.Random(f"{seed}/{producer}")
    ids = [str(number) for number in range(load.ids) if number % load.producers == producer]
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
                chunk.append({"id": job_id, "payload": payload, "score": versions[job_id]})
        if load.unscored:  # the order in which they arrive is all that there is
            for job in chunk:
                del job["score"]
        else:
            chance.shuffle(chunk)
            chunk += chunk[: len(chunk) // 10]
        yield chunk


def produce(worker: type[lowq.Worker[Any]], history: History, seed: int, producer: int, load: Load) -> None:
    """Pushes in time; a push that takes long is followed by the next at once."""
    began = time.monotonic()
    for number, chunk in enumerate(chunks(seed, producer, load)):
        time.sleep(max(began + number / Load.PUSHES - time.monotonic(), 0))
        push_until_accepted(worker, history, chunk)


def push_until_accepted(worker: type[lowq.Worker[Any]], history: History, jobs: Sequence[Mapping[str, Any]]) -> None:
    """Pushes, and pushes again what Redis has not surely accepted."""
    pending = list(jobs)
    while pending:
        try:
            with history.pushing(pushed(pending)):
                worker.perform_async(pending)
            return
        except lowq.PushError as error:
            rest = list(error.rest)
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
    return [(job["id"], job["payload"]["version"], float(job["payload"]["version"])) for job in jobs]
