"""The listener: receives wake-ups of the shards held, releases of wanted leases, and changes of the members."""

import threading
from collections.abc import Callable, Collection, Sequence

from lowq.errors import LowqError, RedisRefused, RedisUnavailable
from lowq.logs import get_log
from lowq.shards.shard import Shard
from lowq.store import Client
from lowq.store.untrusted import finite

log = get_log("lowq.shards")


class Listener:
    """Reads a subscription, and reconnects. Messages may have been lost before a subscription is confirmed, so each
    confirmation counts as a wake-up. ``limits``: channels of limits over all nodes, for ``on_permits``, which gets ""
    where messages may have been lost.
    """

    def __init__(
        self,
        client: Client,
        shards: Sequence[Shard],
        nodes_channel: str,
        on_wake: Callable[[Shard, float, int], object],
        on_lease_released: Callable[[Shard, float], object],
        on_nodes: Callable[[str], object],
        on_trouble: Callable[[LowqError], object],
        limits: Collection[str] = (),
        on_permits: Callable[[str, str], object] = lambda _channel, _holders: None,
        on_sealed: Callable[[Shard], object] = lambda _shard: None,
    ) -> None:
        self._thread = threading.Thread(target=self._run, name="lowq-listener", daemon=True)
        self._subscription = client.subscribe()
        self._wakes: dict[str, Shard] = {}
        self._released: dict[str, Shard] = {}
        self.add_shards(shards)
        self._on_sealed = on_sealed
        self._nodes_channel = nodes_channel
        self._on_wake = on_wake
        self._on_lease_released = on_lease_released
        self._on_nodes = on_nodes
        self._on_trouble = on_trouble
        self._limits = frozenset(limits)
        self._on_permits = on_permits
        self._closed = threading.Event()
        self._subscription.add([nodes_channel, *limits])

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def add_shards(self, shards: Sequence[Shard]) -> None:
        """Adds shards."""
        self._wakes.update({f"{shard.prefix}wake": shard for shard in shards})
        self._released.update({f"{shard.prefix}lease_released": shard for shard in shards})

    def listen_for_wakes(self, shards: Sequence[Shard]) -> None:
        """Listens to the wake-ups of these shards, which are held now."""
        self._subscription.remove([f"{shard.prefix}lease_released" for shard in shards])
        self._subscription.add([f"{shard.prefix}wake" for shard in shards])

    def listen_for_releases(self, shards: Sequence[Shard]) -> None:
        """Listens to the releases of these shards, which others hold."""
        self._subscription.remove([f"{shard.prefix}wake" for shard in shards])
        self._subscription.add([f"{shard.prefix}lease_released" for shard in shards])

    def ignore(self, shards: Sequence[Shard]) -> None:
        """Listens to nothing of these shards, which are neither held nor wanted."""
        self._subscription.remove([f"{shard.prefix}{name}" for shard in shards for name in ("wake", "lease_released")])

    def _run(self) -> None:
        try:
            self._listen()
        finally:
            self._subscription.close()  # `close` may have come just before it was opened

    def _listen(self) -> None:
        failures, said = 0, ""
        while not self._closed.is_set():
            try:
                event = self._subscription.get(1.0)
                failures = 0
                if event is not None:
                    self._handle(*event)
            except Exception as error:
                if self._closed.is_set():
                    return
                if isinstance(error, RedisUnavailable):
                    failures += 1
                    if failures > 1:  # else perhaps only this connection was cut: at once a fresh one
                        self._on_trouble(error)
                        self._closed.wait(0.2)
                elif isinstance(error, RedisRefused):
                    if str(error) != said:  # not every few seconds for as long as it lasts
                        said = str(error)
                        log.warning(
                            "Redis does not let this user listen: jobs start up to poll_interval later; %s",
                            error, extra={"event": "unheard"},
                        )  # fmt: skip
                    self._closed.wait(5.0)
                else:
                    log.exception("listening for wake-ups failed; jobs start up to poll_interval later meanwhile")
                    self._closed.wait(5.0)

    def _handle(self, kind: str, channel: str, data: bytes) -> None:
        first, _, level = data.partition(b" ")
        number = finite(first, 0.0)  # a message that is no number is not ours; to look is always right
        if kind not in ("subscribe", "message"):
            return
        if channel in self._wakes and data == b"sealed":
            self._on_sealed(self._wakes[channel])
        elif channel in self._wakes:
            self._on_wake(self._wakes[channel], number, int(level) if level.isdigit() else 0)
        elif channel in self._released:
            self._on_lease_released(self._released[channel], number / 1000)
        elif channel == self._nodes_channel:
            self._on_nodes(data.decode("utf-8", "replace"))
        elif channel in self._limits:
            self._on_permits(channel, data.decode("utf-8", "replace") if kind == "message" else "")

    def close(self) -> None:
        """Ends the thread, which reads until its connection is closed."""
        self._closed.set()
        self._subscription.close()
        if self._thread.is_alive():
            self._thread.join(1.5)
