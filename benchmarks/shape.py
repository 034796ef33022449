"""The shape of the code: how many functions and files one push and one job run through, and how large lowq is.

    python -m benchmarks.shape            # prints the figures; exit code 1 when one is above its limit
    python -m benchmarks.shape --list     # and the functions of each trip

Each figure has a goal, and a limit that it may not pass: what it is today. Whoever makes a figure smaller lowers its
limit; a change that needs a higher one says why.

The trips are traced on a real Redis, in threads and on an event loop, when everything has run before: what is counted
are functions of lowq that were called, and the files that they are in. Of several trips the shortest counts: the others
met something on their way, as a thread that had not fallen asleep yet.
"""

import ast
import asyncio
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import lowq
from benchmarks.server import Server
from lowq.node.node import Node

ROOT = Path(lowq.__file__).parent
#: Threads that have no part in the trip of a job.
BESIDE = ("lowq-maintenance", "lowq-watchdog", "lowq-permits", "lowq-events", "lowq-reload")
#: Seconds that a job may take.
PATIENCE = 30.0
#: Trips of which the shortest counts.
TRIPS = 10


class Figure(NamedTuple):
    """Something that was counted."""

    name: str
    value: int
    goal: int
    limit: int
    #: Which one it is, of the longest.
    which: str = ""

    @property
    def is_above(self) -> bool:
        return self.value > self.limit


# --- the trips ---


class Tracer:
    """Notes which functions of lowq are called, in all threads that are started while it is there."""

    def __init__(self) -> None:
        self._called: set[tuple[str, str, int]] | None = None

    def __call__(self, frame: Any, event: str, _argument: object) -> None:
        called = self._called
        if called is not None and event == "call" and threading.current_thread().name not in BESIDE:
            code = frame.f_code
            if code.co_filename.startswith(str(ROOT)) and not code.co_name.startswith("<"):
                called.add((code.co_filename, code.co_qualname, code.co_firstlineno))

    @contextmanager
    def tracing(self) -> Iterator[set[tuple[str, str, int]]]:
        called = self._called = set()
        try:
            yield called
        finally:
            self._called = None


def trips(url: str) -> dict[str, set[tuple[str, str, int]]]:
    """Trip -> the functions that it ran through."""
    tracer = Tracer()
    threading.setprofile(tracer)
    sys.setprofile(tracer)
    try:
        found = {"push": _push(url, tracer)}
        found["job, in a thread"] = _job(url, tracer, _thread_worker)
        found["job, on an event loop"] = _job(url, tracer, _loop_worker)
        return found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def _push(url: str, tracer: Tracer) -> set[tuple[str, str, int]]:
    with closing(lowq.Lowq(redis_url=url, namespace="push")) as app:
        queue = app.queue("Orders", 5)
        for _ in range(3):
            queue.push({"id": 1, "payload": {"version": 1}})
        found = []
        for version in range(TRIPS):
            with tracer.tracing() as called:
                queue.push({"id": 1, "payload": {"version": version}})
            found.append(called)
        return min(found, key=len)


def _thread_worker(app: lowq.Lowq, performed: Callable[[], object]) -> None:
    @app.worker(queue_name="Orders", shards_count=5)
    def orders(payloads_by_id: dict[str, list[Any]]) -> None:
        if payloads_by_id:
            performed()


def _loop_worker(app: lowq.Lowq, performed: Callable[[], object]) -> None:
    @app.worker(queue_name="Orders", shards_count=5)
    async def orders(payloads_by_id: dict[str, list[Any]]) -> None:
        await asyncio.sleep(0)
        if payloads_by_id:
            performed()


def _job(
    url: str, tracer: Tracer, make_worker: Callable[[lowq.Lowq, Callable[[], object]], None]
) -> set[tuple[str, str, int]]:
    """From the wake-up until it is acknowledged."""
    namespace = make_worker.__name__.strip("_")
    with (
        closing(lowq.Lowq(redis_url=url, namespace=namespace)) as app,
        closing(lowq.Lowq(redis_url=url, namespace=namespace)) as producer,
    ):
        done = threading.Event()
        make_worker(app, done.set)
        queue = producer.queue("Orders", 5)
        with running(Node(app, threads=1)):
            for _ in range(3):
                _perform(queue, done)
            sys.setprofile(None)  # what this thread does is not the job's
            found = []
            try:
                for _ in range(TRIPS):
                    with tracer.tracing() as called:
                        _perform(queue, done)
                    found.append(called)
            finally:
                sys.setprofile(tracer)
            return min(found, key=len)


def _perform(queue: Any, done: threading.Event) -> None:
    done.clear()
    queue.push({"id": 1})
    if not done.wait(PATIENCE):
        raise RuntimeError("the job was not performed")
    give_up_at = time.monotonic() + PATIENCE
    while queue.peek(1) is not None:
        if time.monotonic() > give_up_at:
            raise RuntimeError("the job was not acknowledged")
        time.sleep(0.01)


@contextmanager
def running(node: Node) -> Iterator[None]:
    node.start()
    try:
        yield
    finally:
        node.stop()


# --- sizes ---


def sizes() -> list[Figure]:
    code = {path: _lines(path, "#") for path in sorted(ROOT.rglob("*.py"))}
    lua = {path: _lines(path, "--") for path in sorted(ROOT.rglob("*.lua"))}
    longest = max(code, key=lambda path: len(path.read_text().splitlines()))
    widest, methods = max(((name, count) for path in code for name, count in _classes(path)), key=lambda item: item[1])
    callers = {path for path in code if "store" not in path.parts and _names_scripts(path)}
    return [
        # 40 more since whether a deploy is safe is said here, and not by the dashboard alone; 20 for errors of URLs; 32
        # for locks of Python 3.14, the threshold of garbage collection, and two hashes that the doctor walks.
        Figure("lines of Python", sum(code.values()), 20_000, 30_421),
        Figure("lines of Lua", sum(lua.values()), 3_700, 4_493),
        Figure("files of Python", len(code), 130, 171),
        Figure("longest file", len(longest.read_text().splitlines()), 450, 450, str(longest.relative_to(ROOT))),
        Figure("methods of a class", methods, 30, 30, widest),
        Figure(
            "files outside the store that name a script", len(callers), 0, 0, ", ".join(sorted(p.name for p in callers))
        ),
    ]


def _lines(path: Path, comment: str) -> int:
    """Lines that are neither blank nor a comment, nor in a docstring."""
    text = path.read_text()
    inside: set[int] = set()
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(text)):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                inside.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(text.splitlines(), 1)
    return sum(
        1 for number, line in lines if line.strip() and not line.strip().startswith(comment) and number not in inside
    )


def _classes(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef):
            yield node.name, sum(isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) for item in node.body)


def _names_scripts(path: Path) -> bool:
    """Whether it makes a call of a script by name."""
    return re.search(r"\bCall(\[[^\]]*\])?\(\s*\"", path.read_text()) is not None


def main() -> int:
    with Server() as server:
        found = trips(server.url)
    # The limits of trips have room for what depends on the moment: a thread that waits, or has not fallen asleep yet.
    # Ten functions of a job read replies from the socket, and send a take while the thread wakes up.
    bounds = {
        "push": ((40, 9), (42, 12)),
        "job, in a thread": ((50, 12), (55, 19)),
        "job, on an event loop": ((60, 13), (59, 19)),
    }
    figures = []
    for trip, called in found.items():
        goals, limits = bounds[trip]
        figures.append(Figure(f"functions, {trip}", len(called), goals[0], limits[0]))
        figures.append(Figure(f"files, {trip}", len({file for file, *_ in called}), goals[1], limits[1]))
    figures += sizes()
    for figure in figures:
        mark = f"above its limit of {figure.limit:,}" if figure.is_above else ""
        sys.stdout.write(
            f"{figure.name:44} {figure.value:7,}, goal {figure.goal:7,}  {figure.which} {mark}".rstrip() + "\n"
        )
    if "--list" in sys.argv:
        for trip, called in found.items():
            sys.stdout.write(f"\n{trip}\n")
            for file, name, _ in sorted(called):
                sys.stdout.write(f"  {Path(file).relative_to(ROOT)}  {name}\n")
    return int(any(figure.is_above for figure in figures))


if __name__ == "__main__":
    sys.exit(main())
