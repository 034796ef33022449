"""Failures in groups of alike errors, with their numbers and times.

`ErrorCounts` counts the failures that nodes and consumers report, and the next heartbeat takes the counts to Redis, one
call for each queue that had any: ``lua/record_errors.lua``. Counts of the time in which Redis was away are lost; the
exact number of failures is that of `Stats`.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lowq.backend import Backend
from lowq.clock import Lock
from lowq.codec import decode_id
from lowq.observe.events import Observer, QueueEvents
from lowq.store import Call, Command, registry, untrusted
from lowq.store.calls import time_of
from lowq.store.keys import error_groups_key

#: Groups of a queue that Redis keeps, and that are counted between two heartbeats.
MOST_GROUPS = 200
#: Characters of a group's text.
TEXT_CHARACTERS = 300
#: Seconds after the last failure of a queue until its groups expire.
_FORGET = 30 * 86400
#: Hours that failures are counted by.
HOURS = 24
#: Queues whose groups are read in one write: each has at most some 150 kB.
_TOGETHER = 20

#: The parts in which alike errors differ: quoted parts, addresses and hexadecimal numbers, numbers.
_VARYING = re.compile(
    r"""'[^']*'|"[^"]*"|`[^`]*`"""
    r"|\b0x[0-9a-fA-F]+|\b(?=[a-fA-F-]*\d)[0-9a-fA-F-]{8,}\b"
    r"|\d+(?:[.,:]\d+)*"
)
#: A line of a traceback that names an exception, mostly with the first line of its message.
_NAMED = re.compile(r"[A-Za-z_][\w.<>]*(?::|: .*)?")
#: The first line of a traceback; the margin of an exception group, and the lines between its tracebacks.
_TRACEBACK = "Traceback (most recent call last):"
_MARGIN, _BORDER = re.compile(r" *\| ?"), re.compile(r" *\+[-+]")


def error_text(error: str) -> str:
    """The exception's class and the first line of its message, from an error as it is kept with a job. Further lines,
    such as the DETAIL of a database or a link to its documentation, differ from job to job or say nothing more. From a
    chain it is the last exception, and from an exception group the last within it.
    """
    lines = [line.rstrip() for line in error.splitlines() if line.strip()]
    if any(map(_BORDER.match, lines)):
        lines = [_MARGIN.sub("", line, count=1) for line in lines if not _BORDER.match(line)]
    begins = [number for number, line in enumerate(lines) if line.endswith(_TRACEBACK)]
    said = lines[begins[-1] + 1 :] if begins else lines
    if begins:  # behind the frames, which are indented
        first = next((number for number, line in enumerate(said) if _NAMED.fullmatch(line)), len(said) - 1)
        said = said[first:]
    if not said:
        return lines[-1].strip()[:TEXT_CHARACTERS] if lines else ""
    text = said[0].strip()
    if text.endswith(":") and len(said) > 1 and _NAMED.fullmatch(text):  # its message begins with an empty line
        text = f"{text} {said[1].strip()}"
    return text[:TEXT_CHARACTERS]


def fingerprint(text: str) -> str:
    """The same 12 characters for alike errors, in every process. Numbers, hexadecimal ones and quoted parts don't
    count.
    """
    return hashlib.blake2b(_VARYING.sub("#", text).encode("utf-8", "surrogatepass"), digest_size=6).hexdigest()


#: The form of a fingerprint.
FINGERPRINT = re.compile(r"[0-9a-f]{12}")


def error_fingerprint(error: str) -> str:
    """The group of an error, as it is kept with a job."""
    return fingerprint(error_text(error))


@dataclass(slots=True)
class _Gathered:
    text: str
    count: int
    #: The id that failed last.
    sample_id: bytes


class ErrorCounts(Observer):
    """The failures of a queue that this process has reported since the last heartbeat. Safe for threads.

    ``load_error``: as of the settings; an error that it can't read is shown as its bytes.
    """

    def __init__(self, load_error: Callable[[bytes], str]) -> None:
        self._load_error = load_error
        self._lock = Lock()
        self._groups: dict[str, _Gathered] = {}

    def jobs_failed(self, failures: Iterable[tuple[bytes, bytes]]) -> None:
        for job_id, error in failures:
            text = error_text(self._read(error))
            key = fingerprint(text)
            with self._lock:
                group = self._groups.get(key)
                if group is not None:
                    group.count += 1
                    group.sample_id, group.text = job_id, text
                elif len(self._groups) < MOST_GROUPS:
                    self._groups[key] = _Gathered(text, 1, job_id)

    def take(self) -> list[str | bytes | int]:
        """Removes the counts, and returns them as the script takes them."""
        with self._lock:
            groups, self._groups = self._groups, {}
        words: list[str | bytes | int] = []
        for key, group in groups.items():
            words += (key, group.count, group.sample_id, group.text.encode("utf-8", "backslashreplace"))
        return words

    def _read(self, error: bytes) -> str:
        try:
            return "".join((self._load_error(error),))
        except Exception:  # of the application's own function
            return error.decode("utf-8", "backslashreplace")


class ErrorRecorder:
    """Makes the calls that a heartbeat adds: one for each queue that had failures. ``counts``: queue -> its failures.
    ``events_of``: emits that errors are of a new group.
    """

    def __init__(
        self, namespace: str, counts: Mapping[str, ErrorCounts], events_of: Callable[[str], QueueEvents] = QueueEvents
    ) -> None:
        self._namespace = namespace
        self._counts = counts
        self._events = {error_groups_key(namespace, queue): events_of(queue) for queue in counts}

    def __call__(self) -> list[Call[Any]]:
        calls: list[Call[Any]] = []
        for queue, counts in self._counts.items():
            words = counts.take()
            if words:
                key = error_groups_key(self._namespace, queue)
                calls.append(registry.RecordErrors(key, MOST_GROUPS, _FORGET, words))
        return calls

    def answered(self, call: Call[Any], reply: Sequence[bytes]) -> None:
        """Emits which groups are new: once for all nodes, as Redis names them to the first that records them."""
        if not reply:
            return
        assert isinstance(call, registry.RecordErrors)
        args: Sequence[Any] = call.groups
        fresh = {name.decode() for name in reply}
        for name, job_id, text in zip(args[::4], args[2::4], args[3::4], strict=True):
            if name in fresh:
                self._events[call.key].jobs_changed("new_error", [job_id], error=text.decode())


@dataclass(frozen=True, slots=True)
class ErrorGroup:
    """Failures that are alike."""

    queue: str
    #: Names it, within its queue.
    fingerprint: str
    #: The exception's class and the first line of its message, the last time.
    text: str
    #: Failures, and the times of the first and the last (Unix time, seconds), as heartbeats have recorded them.
    count: int
    first_seen: float
    last_seen: float
    #: The id that failed last.
    sample_id: str
    #: Failures in each of the last 24 hours, the present one last.
    hours: tuple[int, ...]


def read_error_groups(backend: Backend, queues: Sequence[str]) -> list[ErrorGroup]:
    """The groups of these queues' failures, the one that was seen last first.

    Raises:
        RedisUnavailable, RedisRefused, ScriptError
    """
    if not queues:
        return []
    hour = int(time_of(backend.client.command("TIME"))) // 3600
    found: list[ErrorGroup] = []
    for start in range(0, len(queues), _TOGETHER):
        some = queues[start : start + _TOGETHER]
        keys = [error_groups_key(backend.config.namespace, queue) for queue in some]
        replies = backend.client.run_many([Command(key, "HGETALL", key) for key in keys])
        for queue, reply in zip(some, replies, strict=True):
            if isinstance(reply, Exception):
                raise reply
            groups = (_group(queue, name, data, hour) for name, data in zip(reply[::2], reply[1::2], strict=True))
            found += [group for group in groups if group is not None]
    return sorted(found, key=lambda group: -group.last_seen)


def most_frequent_first(groups: Iterable[ErrorGroup]) -> list[ErrorGroup]:
    """Groups with the most failures in the last 24 hours first; among equals the one that was seen last."""
    return sorted(groups, key=lambda group: (-sum(group.hours), -group.last_seen))


def _group(queue: str, name: bytes, data: bytes, hour: int) -> ErrorGroup | None:
    """A field of the hash: "count first last hours size sample_id text"."""
    try:
        count, first, last, hours, size, rest = data.split(b" ", 5)
        counts: dict[int, int] = {}
        for pair in hours.split(b";"):
            number, _, failures = pair.partition(b":")
            counts[int(number)] = int(failures)
        length = int(size)
        first_seen, last_seen = untrusted.finite(first), untrusted.finite(last)
        if first_seen is None or last_seen is None or length < 0:
            raise ValueError
    except ValueError:
        untrusted.log_skipped("error_group", name, "it is none of ours")
        return None
    return ErrorGroup(
        queue,
        name.decode("utf-8", "replace"),
        rest[length:].decode("utf-8", "replace"),
        untrusted.count(count),
        first_seen,
        last_seen,
        decode_id(rest[:length]),
        tuple(max(counts.get(each, 0), 0) for each in range(hour - HOURS + 1, hour + 1)),
    )
