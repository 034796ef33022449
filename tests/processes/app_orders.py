"""The application under test: a worker that does what its payloads say and writes down what happened.

    python -m tests.processes.app_orders run                                   a node
    python -m tests.processes.app_orders produce SEED FIRST IDS VERSIONS ROUNDS PAUSE     a producer

With 0 rounds a producer goes on until the test makes the file `<history>.enough`.

A payload is `{"version": n, "do": "sleep", "for": 0.5, "once": true}`: what `do` names is done for so many seconds,
with `once` only the first time. Settings come from lowq's own environment variables and from those of `SETTINGS`.

Some private attributes of batches and consumers are read for the checker: which layout a shard is of, and until when
its lease is surely held. Nobody who performs jobs is told that.
"""

import asyncio
import ctypes
import itertools
import json
import logging
import math
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import lowq
from lowq.consumer import AsyncConsumer, AsyncConsumerJob, Consumer, ConsumerJob
from lowq.node.node import Node
from lowq.shards.scheduler import Schedulable, SeqScheduler
from lowq.shards.shard import Shard
from lowq.shards.splitter import DefaultSplitter
from tests.history import History, PushedJob

#: Environment variable -> default.
SETTINGS = {
    "ORDERS_HISTORY": "history",  # the file
    "ORDERS_SHARDS": "5",
    "ORDERS_BATCH": "1",
    "ORDERS_MAX_PAYLOADS": "1000",
    "ORDERS_MAX_CRASHES": "3",
    "ORDERS_MAX_RETRIES": "3",
    "ORDERS_TTR": "",  # seconds; "": none
    "ORDERS_CAPACITY": "",  # ids; "": any number
    "ORDERS_KEEP_FINISHED": "",  # seconds; "": nothing is kept
    "ORDERS_CONCURRENCY": "",  # batches at once over all nodes; "": any number
    "ORDERS_CALLS": "",  # batches within a limit around their work at once, over all nodes; "": any number
    "ORDERS_WORK": "0",  # seconds that each perform takes at least
    "ORDERS_PREFETCH": "1",
    "ORDERS_ASYNC": "",  # "1": an async worker
    # "1": a consumer takes the jobs, no node; "thread": in one thread; "async"; "mixed": each second process is one;
    # "storm": of four processes one is a node, and each of the others one of these consumers
    "ORDERS_CONSUMER": "",
    "ORDERS_NUMBER": "0",  # of the process, among those of a run
    "ORDERS_TAKES": "",  # of a consumer, how many jobs its takes ask for, by chance one of these; "": ORDERS_BATCH
    "ORDERS_RECEIPTS": "",  # of a consumer that has come back: [session, [shard, id, receipt, perform]...]
    "ORDERS_SCHEDULER": "",  # "", seq, own
    "ORDERS_SPLITTER": "",  # "", all, own
    "ORDERS_SPANS": "",  # a file: what is traced goes there, a line of JSON for each span
}


def setting(name: str) -> str:
    return os.environ.get(name, SETTINGS[name])


log = logging.getLogger("app")
history = History(setting("ORDERS_HISTORY"))
app = lowq.Lowq()
calls: Any = nullcontext()
if setting("ORDERS_CALLS"):
    calls = app.limit("orders", lowq.Concurrency(int(setting("ORDERS_CALLS"))))
if setting("ORDERS_SPANS"):
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

    import lowq.contrib.otel

    _spans = Path(setting("ORDERS_SPANS")).open("a")  # noqa: SIM115  # as long as the process lives
    _exporter = ConsoleSpanExporter(out=_spans, formatter=lambda span: f"{span.to_json(indent=None)}\n")
    _provider = TracerProvider()
    _provider.add_span_processor(SimpleSpanProcessor(_exporter))
    lowq.contrib.otel.instrument(app, tracer_provider=_provider)
libc = ctypes.PyDLL(None)  # PyDLL: its functions are called with the GIL held


def hold_the_gil(seconds: float) -> None:
    ends_at = time.monotonic() + seconds
    while (left := ends_at - time.monotonic()) > 0:
        libc.usleep(int(left * 1e6) + 1)  # a signal ends it early


def fail(_seconds: float) -> None:
    raise RuntimeError("told to fail")


def leave(_seconds: float) -> None:
    raise KeyboardInterrupt("told to exit")


def die(_seconds: float) -> None:
    os._exit(9)


def start_and_end_a_process(_seconds: float) -> None:
    context = multiprocessing.get_context("fork")
    started = context.Event()

    def run() -> None:
        started.set()
        time.sleep(60)

    process = context.Process(target=run)
    process.start()
    started.wait(10)  # Python drops signals that come in the very moment of a fork
    process.terminate()
    process.join(10)
    if process.exitcode != -signal.SIGTERM:
        process.kill()
        raise RuntimeError("a process that a handler had started did not end when told to")


def wait_for_go(_seconds: float) -> None:
    """Until the test makes the file `<history>.go`."""
    while not exists("go"):
        time.sleep(0.002)


def exists(suffix: str) -> bool:
    """Whether the test has made that file beside the history."""
    return Path(f"{history.path}.{suffix}").exists()


ACTIONS: dict[str, Callable[[float], None]] = {
    "sleep": time.sleep,
    "wait": wait_for_go,
    "hold": hold_the_gil,
    "raise": fail,
    "exit": leave,
    "die": die,
    "fork": start_and_end_a_process,
}


def is_to_be_done(job_id: str, payload: Mapping[str, Any]) -> bool:
    if payload.get("once"):
        try:
            os.close(os.open(f"{history.path}.once-{job_id}-{payload['version']}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
    return "do" in payload


def act(job_id: str, payload: Mapping[str, Any]) -> None:
    if payload["do"] == "push":  # the next version of the same id, and this one again
        version = payload["version"]
        push_until_accepted([(job_id, version, version), (job_id, version + 1, version + 1)])
        return
    ACTIONS[payload["do"]](payload.get("for", 0.0))


def number_of(shard: Shard | None) -> int:
    """A shard as the history names it: no two of a queue have one number, also when it was resharded."""
    assert shard is not None
    return shard.index + 100_000 * shard.epoch


def version_of(payload: object) -> int:
    assert isinstance(payload, dict)
    version = payload["version"]
    assert isinstance(version, int)
    return version


@app.worker(
    shards_count=int(setting("ORDERS_SHARDS")),
    batch_size=int(setting("ORDERS_BATCH")),
    max_payloads=int(setting("ORDERS_MAX_PAYLOADS")),
    max_crash_count=int(setting("ORDERS_MAX_CRASHES")),
    max_retry_count=int(setting("ORDERS_MAX_RETRIES")),
    ttr=float(setting("ORDERS_TTR") or 0) or None,
    capacity=int(setting("ORDERS_CAPACITY") or 0) or None,
    keep_finished=int(setting("ORDERS_KEEP_FINISHED") or 0) or None,
    limit=lowq.Concurrency(int(setting("ORDERS_CONCURRENCY"))) if setting("ORDERS_CONCURRENCY") else None,
)
class Orders(lowq.Worker[dict[str, Any]]):
    def perform_in_thread(self, payloads_by_id: dict[str, list[dict[str, Any]]]) -> None:
        batch = lowq.current()
        versions = {job_id: [*map(version_of, payloads)] for job_id, payloads in payloads_by_id.items()}
        with calls, history.performing(number_of(batch._source), batch.fence, versions):
            time.sleep(float(setting("ORDERS_WORK")))
            for job_id, payloads in payloads_by_id.items():
                for payload in payloads:
                    if is_to_be_done(job_id, payload):
                        act(job_id, payload)

    async def perform_in_loop(self, payloads_by_id: dict[str, list[dict[str, Any]]]) -> None:
        batch = lowq.current()
        versions = {job_id: [*map(version_of, payloads)] for job_id, payloads in payloads_by_id.items()}
        async with calls:
            with history.performing(number_of(batch._source), batch.fence, versions):
                await asyncio.sleep(float(setting("ORDERS_WORK")))
                for job_id, payloads in payloads_by_id.items():
                    for payload in payloads:
                        if not is_to_be_done(job_id, payload):
                            continue
                        if payload["do"] in ("sleep", "stall"):
                            await asyncio.sleep(payload.get("for", 0.0))
                        elif payload["do"] in ("wait", "push"):
                            await asyncio.to_thread(act, job_id, payload)
                        else:
                            act(job_id, payload)

    perform = perform_in_loop if setting("ORDERS_ASYNC") else perform_in_thread

    def retry_in(self, retry_count: int) -> float:
        return 0.1


class LatestFirst:
    """A scheduler of the user's own: the shard with the most recent work."""

    def __call__(self, shards: Sequence[Any], now: float, ready: Callable[[Any], bool]) -> Any:
        return max(filter(ready, shards), key=_due, default=None)


def _due(shard: Schedulable) -> float:
    return shard.next_due or 0.0


def own_splitter(shards: Sequence[Any]) -> list[list[Any]]:
    """A splitter of the user's own that gives every shard to two threads, in more groups than threads."""
    return [[shard, shards[number - 1]] for number, shard in enumerate(shards)]


def configure() -> None:
    scheduler, splitter = setting("ORDERS_SCHEDULER"), setting("ORDERS_SPLITTER")
    if scheduler:
        app.config.build_scheduler = {"seq": SeqScheduler, "own": LatestFirst}[scheduler]
    if splitter == "own":
        app.config.build_splitter = lambda: own_splitter
    elif splitter == "all":  # one node holds everything, the others stand by
        app.config.build_splitter = lambda: DefaultSplitter(app.config.threads_per_node)
    app.config.on_server_stop = lambda: history.write("server_stop")
    app.config.last_words = lambda error: history.write("last_words", error=repr(error))


def run() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(threadName)s %(message)s")
    configure()
    kind = setting("ORDERS_CONSUMER")
    if kind == "storm":
        kind = ("", "thread", "async", "1")[int(setting("ORDERS_NUMBER")) % 4]
    elif kind == "mixed":
        kind = "1" if os.getpid() % 2 else ""
    if kind == "async":
        return asyncio.run(AsyncConsuming().run())
    if kind:
        return Consuming(1 if kind == "thread" else 5).run()
    return Node(app, prefetch=setting("ORDERS_PREFETCH") == "1").run()


# --- consuming ---


class Consuming:
    """A consumer in this process, and threads that do what its jobs say. TERM ends it. USR1 makes it detach with
    finished jobs in hand, and come back as a new process that acknowledges them.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        # No events: a signal's handler that sets one may have interrupted the wait for it, which has its lock.
        self._ends = self._detaches = False
        self._unacknowledged: list[tuple[int, str, str, str]] = []
        session, *receipts = json.loads(setting("ORDERS_RECEIPTS") or "[null]")
        signal.signal(signal.SIGTERM, self._end)
        signal.signal(signal.SIGUSR1, self._detach)
        self._consumer = Orders.queue.consumer(session=session)
        log.info("consumer %s starts: %d threads", self._consumer.name, threads)
        for shard, job_id, receipt, perform in receipts:
            self._acknowledge(shard, job_id, receipt, perform)

    def _end(self, *_: object) -> None:
        self._ends = True

    def _detach(self, *_: object) -> None:
        self._detaches = self._ends = True

    def run(self) -> int:
        threads = [threading.Thread(target=self._work, args=(number,)) for number in range(self._threads)]
        for thread in threads:
            thread.start()
        while not self._ends:
            time.sleep(0.02)
        self._consumer.quiet()
        for thread in threads:
            thread.join()
        if self._detaches:
            self._come_back()
        self._consumer.close()
        log.info("the consumer has stopped")
        return 0

    def _come_back(self) -> None:
        while True:
            try:
                self._consumer.detach()
                break
            except lowq.RedisUnavailable:
                return
        receipts = json.dumps([self._consumer.session, *self._unacknowledged])
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # as long as the new program has no handler
        words = [sys.executable, "-m", sys.modules["__main__"].__spec__.name, *sys.argv[1:]]  # type: ignore[union-attr]  # -m
        os.execve(sys.executable, words, os.environ | {"ORDERS_RECEIPTS": receipts})

    def _work(self, number: int) -> None:
        limits = limits_of_takes(number)
        while jobs := self._consumer.take(next(limits)):
            for job in jobs:
                self._perform(job, is_first=job is jobs[0])

    def _perform(self, job: ConsumerJob, *, is_first: bool) -> None:
        begun = begin(self._consumer, job, is_first=is_first)
        if begun is None:
            self._until_reported(job.release)
            return
        shard, versions, until = begun
        try:
            with history.performing(shard, job.fence, versions, by_hand=True, until=until) as perform:
                time.sleep(float(setting("ORDERS_WORK")))
                for payload in job.payloads:
                    if is_to_be_done(job.id, payload):
                        act(job.id, payload)
        except Exception as error:
            self._until_reported(partial(job.fail, error, 0.1))
            return
        if self._detaches:
            self._unacknowledged.append((shard, job.id, job.receipt, perform))
        else:
            self._acknowledge(shard, job.id, job.receipt, perform)

    def _acknowledge(self, shard: int, job_id: str, receipt: str, perform: str) -> None:
        if self._until_reported(lambda: self._consumer.ack(receipt)):
            history.acked(shard, [job_id], perform)

    def _until_reported(self, report: Callable[[], object]) -> bool:
        while True:
            try:
                report()
                return True
            except (lowq.NotTaken, lowq.ConsumerClosed) as error:
                history.write("refused", kind=type(error).__name__, error=str(error))
                return False
            except lowq.RedisUnavailable:
                time.sleep(0.05)


def limits_of_takes(number: int) -> Iterator[int]:
    """How many jobs are asked for by one take after the other, of a thread or task with that number."""
    sizes = [*map(int, setting("ORDERS_TAKES").split())] or [int(setting("ORDERS_BATCH"))]
    chance = random.Random(f"{setting('ORDERS_NUMBER')}/{number}")
    while True:
        yield chance.choice(sizes)


def begin(
    consumer: Consumer, job: ConsumerJob | AsyncConsumerJob, *, is_first: bool
) -> tuple[int, dict[str, list[int]], float | None] | None:
    """What the history is to know of the perform: shard, versions, when its ttr passes. None: it is not begun, as the
    lease is not surely held any more. Should that be resumed, the job is still in hand. The first job of a list was
    handed out just now: it is the consumer's part not to hand out what is not its own.
    """
    held = consumer._hand.held.get(job.receipt)
    if held is None or (time.monotonic() > held.shard.lease.deadline and not is_first):
        return None
    until = held.deadline
    versions = {job.id: [*map(version_of, job.payloads)]}
    return number_of(held.shard), versions, until if until < math.inf else None


class AsyncConsuming:
    """As `Consuming`, in an event loop, with takes that are cancelled all the time. It comes back in this process."""

    TASKS = 5

    def __init__(self) -> None:
        self._ends = self._detaches = False
        self._taking: set[asyncio.Task[None]] = set()
        self._unacknowledged: list[tuple[int, str, str, str]] = []

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._leave, False)
        loop.add_signal_handler(signal.SIGUSR1, self._leave, True)
        session: str | None = None
        while not self._ends:
            session = await self._attend(session)
        log.info("the consumer has stopped")
        return 0

    def _leave(self, detaches: bool) -> None:
        self._detaches, self._ends = detaches and not self._ends, self._ends or not detaches
        for task in self._taking:
            task.cancel()

    async def _attend(self, session: str | None) -> str | None:
        """Consumes until it is told to end or to detach; returns the session to come back with."""
        async with Orders.queue.aconsumer(session=session) as consumer:
            log.info("consumer %s starts: %d tasks", consumer._consumer.name, self.TASKS)
            self._detaches = False
            for shard, job_id, receipt, perform in self._unacknowledged:
                await self._acknowledge(consumer, shard, job_id, receipt, perform)
            self._unacknowledged.clear()
            await asyncio.gather(*(self._work(consumer, number) for number in range(self.TASKS)))
            if self._detaches:
                try:
                    await consumer.detach()
                    return consumer.session
                except lowq.RedisUnavailable:
                    self._unacknowledged.clear()
            return None

    async def _work(self, consumer: AsyncConsumer, number: int) -> None:
        limits, chance = limits_of_takes(number), random.Random(f"{setting('ORDERS_NUMBER')}/{number}/cancels")
        task = asyncio.current_task()
        assert task is not None
        while not (self._ends or self._detaches):
            self._taking.add(task)
            try:
                async with asyncio.timeout(chance.choice((0.001, 0.003, 0.01, 0.5))):
                    jobs = await consumer.take(next(limits))
            except TimeoutError:
                continue
            except asyncio.CancelledError:  # by `_leave`
                return
            finally:
                self._taking.discard(task)
            for job in jobs:
                await self._perform(consumer, job, is_first=job is jobs[0])

    async def _perform(self, consumer: AsyncConsumer, job: AsyncConsumerJob, *, is_first: bool) -> None:
        begun = begin(consumer._consumer, job, is_first=is_first)
        if begun is None:
            await self._until_reported(job.release)
            return
        shard, versions, until = begun
        try:
            with history.performing(shard, job.fence, versions, by_hand=True, until=until) as perform:
                for payload in job.payloads:
                    if not is_to_be_done(job.id, payload):
                        continue
                    if payload["do"] == "sleep":
                        await asyncio.sleep(payload["for"])
                    else:
                        act(job.id, payload)
        except Exception as error:
            await self._until_reported(partial(job.fail, error, 0.1))
            return
        if self._detaches:
            self._unacknowledged.append((shard, job.id, job.receipt, perform))
        else:
            await self._acknowledge(consumer, shard, job.id, job.receipt, perform)

    async def _acknowledge(self, consumer: AsyncConsumer, shard: int, job_id: str, receipt: str, perform: str) -> None:
        if await self._until_reported(lambda: consumer.ack(receipt)):
            history.acked(shard, [job_id], perform)

    async def _until_reported(self, report: Callable[[], Awaitable[object]]) -> bool:
        while True:
            try:
                await report()
                return True
            except (lowq.NotTaken, lowq.ConsumerClosed) as error:
                history.write("refused", kind=type(error).__name__, error=str(error))
                return False
            except lowq.RedisUnavailable:
                await asyncio.sleep(0.05)


# --- producing ---


def as_job(item: PushedJob) -> Any:
    job_id, version, score = item
    job = {"id": job_id, "payload": {"version": version}}
    return job if score is None else job | {"score": score}


def push_until_accepted(items: Sequence[PushedJob]) -> None:
    """Pushes, and pushes again what Redis being away kept out."""
    pending = {(str(item[0]), item[1]): item for item in items}
    while pending:
        try:
            with history.pushing(list(pending.values())):
                Orders.perform_async([as_job(item) for item in pending.values()])
            return
        except lowq.PushError as error:
            rest = {(str(job["id"]), job["payload"]["version"]) for job in error.rest}
            history.write("pushed", push="part", jobs=[pending[key] for key in pending.keys() - rest])
            pending = {key: item for key, item in pending.items() if key in rest}
        except lowq.RedisUnavailable:
            pass
        time.sleep(0.05)


def changes(seed: int, first: int, ids: int, versions: int, rounds: int) -> Iterator[list[PushedJob]]:
    """Chunks of changes: in each one every id gets its next versions, all shuffled, with duplicates thrown in. Without
    end if ``rounds`` is 0.
    """
    chance = random.Random(seed)
    for number in range(rounds) if rounds else itertools.count():
        chunk: list[PushedJob] = [
            (str(job_id), version, float(version))
            for job_id in range(first, first + ids)
            for version in range(number * versions + 1, (number + 1) * versions + 1)
        ]
        chance.shuffle(chunk)
        yield chunk + chunk[: len(chunk) // 10]


def produce(seed: str, first: str, ids: str, versions: str, rounds: str, pause: str) -> int:
    for chunk in changes(int(seed), int(first), int(ids), int(versions), int(rounds)):
        push_until_accepted(chunk)
        if exists("enough"):
            break
        time.sleep(float(pause))
    return 0


def main(arguments: Iterable[str]) -> int:
    verb, *rest = arguments
    return run() if verb == "run" else produce(*rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
