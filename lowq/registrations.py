"""The registry of queues in Redis, as a process writes it: queues, their options, and their layouts."""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lowq.clock import seconds_of
from lowq.errors import ScriptError, ShardsCountError
from lowq.logs import get_log
from lowq.options import QUEUE_OPTIONS, QueueOptions
from lowq.settings import Config
from lowq.sharding import Layout, Layouts, Routes
from lowq.store import Client, Refusal, untrusted
from lowq.store.keys import is_queue_name, queues_key
from lowq.store.registry import Registration

log = get_log("lowq")

#: The options that an entry always has.
_SHOWN = ("shards_count", "batch_size", "max_retry_count", "max_payloads", "max_crash_count", "max_threads")


@dataclass(frozen=True, slots=True)
class QueueInfo:
    """A queue's entry in the registry."""

    name: str
    shards_count: int
    #: The options of its worker that were registered.
    options: Mapping[str, Any]
    #: The number of reshards that have ended.
    epoch: int = 0
    #: While a reshard is under way: its layouts, and its entry in the registry.
    reshard: Layouts | None = None

    @property
    def layouts(self) -> Layouts:
        """The layout of the queue, and during a reshard the next one."""
        return self.reshard or Layouts(Layout(self.shards_count, self.epoch))


def queue_info(name: bytes, data: bytes) -> QueueInfo | None:
    """Decodes an entry of the registry; None: it can't be read, or the name is none of a queue."""
    text, entry = name.decode("utf-8", "replace"), untrusted.json_object(data) or {}
    layouts = Layouts.read(entry)
    if not is_queue_name(text) or text.encode() != name or layouts is None:
        return None
    options = entry.get("options")
    return QueueInfo(
        text,
        layouts.current.shards_count,
        untrusted.plain(options) if isinstance(options, dict) else {},
        layouts.current.epoch,
        None if layouts.next is None else layouts,
    )


class Registrations:
    """The queues that a process has entered in the registry. Safe for threads.

    ``client``: the connections to use. ``accepts``: see `RegistryCheck.accepts`.
    """

    def __init__(
        self, config: Config, client: Callable[[], Client],
        accepts: Callable[[str, Layouts, Layouts | None, Collection[int]], bool],
    ) -> None:  # fmt: skip
        self._config = config
        self._client = client
        self._accepts = accepts
        #: (name, shards_count) -> the options that the registry has of a queue that was entered.
        self.entered: dict[tuple[str, int], QueueOptions] = {}
        #: Queue -> where its jobs go.
        self._routes: dict[str, Routes] = {}
        #: The numbers of shards that a warning was logged about: (queue, number in the code, number in Redis).
        self._warned: set[tuple[str, int, int]] = set()

    def enter(
        self, name: str, shards_count: int, worker: Any = None, declared: Mapping[str, Any] | None = None, *,
        anew: bool = False,
    ) -> QueueOptions:  # fmt: skip
        """Enters the queue in the registry, once per process, before anything of it is written. Returns its options.
        ``declared``: options to change there. ``anew``: asks Redis also when the options are known.

        Raises:
            ShardsCountError: there is another number of shards, and ``strict_shards_count`` is set. ConfigError: the
            declared options contradict the registered ones.
        """
        known = None if anew else self.entered.get((name, shards_count))
        if worker is not None:
            options: QueueOptions = worker._queue_options
            if known is not None and replace(known, shards_count=options.shards_count) == options:
                return known
            before = self._write(name, shards_count, worker)
            self._note_changed(name, shards_count, options, before)
        elif declared:
            if known is not None and known.declared(declared) == known:
                return known
            options, before = self._declare(name, shards_count, declared)
        elif known is not None:
            return known
        else:
            before = self._write(name, shards_count)
            options = _options_in(name, shards_count, before)
        layouts = self.note_layouts(name, _layouts_in(name, shards_count, before)).layouts
        self._warn_of_count(name, shards_count, layouts)
        options = self.entered[(name, shards_count)] = replace(options, shards_count=layouts.current.shards_count)
        return options

    def _warn_of_count(self, name: str, shards_count: int, layouts: Layouts) -> None:
        """Warns once that code and registry disagree about the number of shards; the registry counts."""
        counts = [layout.shards_count for layout in layouts.all]
        if shards_count not in counts and (name, shards_count, counts[-1]) not in self._warned:
            self._warned.add((name, shards_count, counts[-1]))
            log.warning(
                "queue %r has %d shards in Redis, and the code of this process says shards_count=%d: Redis is "
                "followed; write %d in the code", name, counts[-1], shards_count, counts[-1],
                extra={"event": "shards_count", "queue": name},
            )  # fmt: skip

    def layouts_in(
        self, call: Registration, reply: Any, served: Layouts | None, doubted: Collection[int]
    ) -> Layouts | None:
        """The layouts of a queue, from the reply to its registration. None: they contradict the ``served`` ones, and
        the shards are being asked.
        """
        name, shards_count = call.queue, call.shards_count
        layouts = _layouts_in(name, shards_count, reply if isinstance(reply, bytes) else b"")
        if not self._accepts(name, layouts, served, doubted):
            return None
        self.note_layouts(name, layouts)
        self._warn_of_count(name, shards_count, layouts)
        return layouts

    def routes_of(self, name: str) -> Routes | None:
        """Where the jobs of a queue go, without asking Redis; None: not known."""
        return self._routes.get(name)

    def note_layouts(self, name: str, layouts: Layouts) -> Routes:
        """Notes the layouts that the registry has now; returns where the jobs of the queue go."""
        routes = self._routes.setdefault(name, Routes(layouts))
        routes.note_read(layouts)
        return routes

    def _write(self, name: str, shards_count: int, worker: Any = None, entry: str = "", based_on: bytes = b"") -> bytes:
        """Writes the entry, and returns the earlier one if it was different."""
        call = self.call(name, shards_count, worker, entry, based_on)
        try:
            before = self._client().call(call, timeout=self._config.push_timeout)
        except (Refusal, ScriptError) as error:
            self._check_entry(name, call.key)
            if isinstance(error, Refusal):
                raise ShardsCountError(name, error.shards_count, shards_count) from None
            raise
        return before if isinstance(before, bytes) else b""

    def _check_entry(self, name: str, key: str) -> None:
        """Checks the entry of a queue that could not be entered.

        Raises:
            ScriptError: it can't be read; the message says how to remove it.
        """
        entry = self._client().command("HGET", key, name, key=key, timeout=self._config.push_timeout)
        if entry is None or queue_info(name.encode(), entry) is not None:
            return
        error = ScriptError(
            f"queue {name!r} has an entry in the registry that can't be read, so somebody else has written it: "
            f"{entry[:60]!r}. Nothing was written. Nodes and producers enter the queue anew once that is removed from "
            f"the hash {key}: HDEL {key} {name}"
        )
        error.key = key
        raise error from None

    def _declare(self, name: str, shards_count: int, declared: Mapping[str, Any]) -> tuple[QueueOptions, bytes]:
        """Changes options in the registry, and leaves the others. Returns all of them, and the earlier entry."""
        before = self._write(name, shards_count) or b'{"shards_count":%d,"options":{}}' % shards_count
        while True:
            options = _options_in(name, shards_count, before).declared(declared)
            info = queue_info(name.encode(), before)
            others = {} if info is None else {key: value for key, value in info.options.items() if key not in declared}
            entry = json.dumps({"shards_count": shards_count, "options": {**others, **options.shown()}})
            meanwhile = self._write(name, shards_count, entry=entry, based_on=before)
            if meanwhile in (b"", before):
                self._note_changed(name, shards_count, options, before)
                return options, before
            before = meanwhile  # another process has changed it just now

    def _note_changed(self, name: str, shards_count: int, options: QueueOptions, before: bytes) -> None:
        """Warns of the options that differ from an earlier declaration."""
        info = queue_info(name.encode(), before)
        if info is None or not info.options:
            return
        earlier, now = _options_in(name, shards_count, before).shown(), options.shown()
        changed = sorted(key for key in earlier.keys() | now.keys() if earlier.get(key) != now.get(key))
        if changed:
            log.warning(
                "queue %r is declared with other options than before, and the last declaration wins: %s", name,
                ", ".join(f"{key}: {_shown(earlier, key)} -> {_shown(now, key)}" for key in changed),
                extra={"event": "options", "queue": name},
            )  # fmt: skip

    def call(
        self, name: str, shards_count: int, worker: Any = None, entry: str = "", based_on: bytes = b""
    ) -> Registration:
        """The call that enters a queue in the registry, with the options of its worker, or with this entry."""
        if worker is not None and not entry:
            entry = json.dumps({"shards_count": shards_count, "options": options_of(worker)})
        routes = self._routes.get(name)
        is_plain = routes is None or routes.layouts == Layouts.plain(shards_count)
        return Registration(
            queues_key(self._config.namespace), name, shards_count, entry, based_on=based_on,
            strict=self._config.strict_shards_count,
            layout="" if is_plain or routes is None else json.dumps(routes.layouts.shown())[:-1] + ", ",
        )  # fmt: skip

    def forget(self) -> None:
        """Forgets all, so that each queue is entered again when it is next used: Redis may have lost its data."""
        self.entered = {}  # another one, by which handles of queues notice it
        self._routes.clear()


def options_of(worker: Any) -> dict[str, Any]:
    """The worker's options, as the registry has them."""
    options: dict[str, Any] = {name: getattr(worker, name) for name in _SHOWN}
    # The others only if they are used: the entry is sent with every heartbeat.
    time_limit = seconds_of(worker.time_limit)
    if time_limit is not None:
        options["time_limit"] = time_limit
    if worker._limits:
        options["limit"] = [limit.shown() for limit in worker._limits]
    return {**options, **worker._queue_options.shown()}


def _options_in(name: str, shards_count: int, entry: bytes) -> QueueOptions:
    """The options of a queue in an entry of the registry."""
    info = queue_info(name.encode(), entry)
    return QueueOptions(name, shards_count).registered({} if info is None else info.options)


def _layouts_in(name: str, shards_count: int, entry: bytes) -> Layouts:
    """The layouts of a queue in an entry of the registry."""
    info = queue_info(name.encode(), entry) if entry else None
    return Layouts.plain(shards_count) if info is None else info.layouts


def _shown(options: Mapping[str, Any], name: str) -> object:
    return options.get(name, QUEUE_OPTIONS[name].default)
