"""The client: scripts and commands, on the primaries that have their keys."""

import os
import re
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import Any

from redis import exceptions

from lowq import clock
from lowq.errors import START_REDIS, LowqError, RedisRefused, RedisUnavailable, ScriptError
from lowq.store.calls import Call, Command, Deadline, R_co, Wait, deadlines
from lowq.store.connection import LoopConnection, ask, fits_loop, pack, parse_info
from lowq.store.pool import Pipeline, Pool
from lowq.store.pubsub import Subscription
from lowq.store.topology import Address
from lowq.store.translate import UNANSWERED, translate, with_guess
from lowq.store.urls import topology_of

#: Seconds that a connection attempt, or the wait for one reply, may take.
SOCKET_TIMEOUT = 5.0
#: How often a call is tried anew on a fresh connection when its connection broke.
REPEATS = 2


def _replicas_in(info: dict[str, str]) -> int:
    """The replicas in ``INFO replication``. One that is being filled may have two connections. Programs that only copy
    the data, as ``redis-cli --rdb`` does, tell no port, and never confirm anything.
    """
    lines = [value.split(",") for name, value in info.items() if re.fullmatch(r"slave[0-9]+", name)]
    others = sum("port=0" in line or "type=rdb-channel" in line for line in lines)
    return max(int(info.get("connected_slaves", 0)) - others, 0)


class Client:
    """Runs scripts and commands on a server, or on the primaries of a cluster. Safe for threads and forks.

    ``size``: connections to a server; ``timeout``: seconds to wait for a free one; ``socket_timeout``: seconds for one
    connection attempt, or one reply.
    """

    def __init__(
        self, url: str, *, size: int, timeout: float, socket_timeout: float = SOCKET_TIMEOUT, store: Any = None
    ) -> None:
        self.url = url
        self._topology = topology_of(url, size, timeout, socket_timeout, store)
        #: Whether there may be several primaries, of which one may be away while others serve.
        self.has_several_primaries = self._topology.has_several_primaries
        _clients.add(self)

    # --- scripts ---

    def call(self, call: Call[R_co], *, timeout: float | None = None) -> R_co:
        """Runs one script and returns its named reply. ``timeout`` is as for `run_many`.

        Raises:
            RedisUnavailable, RedisRefused, LeaseLost, Refusal, ScriptError
        """
        (result,) = self.run_many([call], timeout=timeout)
        if isinstance(result, Exception):
            raise result
        reply: R_co = result
        return reply

    def run_many(
        self,
        calls: Sequence[Call[Any]],
        repeats: int = REPEATS,
        timeout: float | None = None,
        *,
        pool: Pool | None = None,
    ) -> list[Any]:
        """Runs several scripts, and plain commands if there are any among them, in one write per server; they don't
        wait for each other's replies.

        Returns each call's reply, with its fields named, or the exception (of ours) that it ended with. Calls without
        an answer are repeated on a fresh connection, so a script must allow that. ``timeout``: seconds without an
        answer after which that ends, repeats and all. ``pool``: where all of them go, whatever their keys are.
        """
        attempts: Iterator[Deadline | None] = (
            repeat(None, repeats + 1) if timeout is None else deadlines(timeout, repeats + 1)
        )
        results = self.start(calls, deadline=next(attempts), pool=pool)()
        for deadline in attempts:
            again = [i for i, result in enumerate(results) if type(result) in UNANSWERED]
            if not again:
                break
            replies = self.start([calls[i] for i in again], deadline=deadline, pool=pool)()
            for i, result in zip(again, replies, strict=True):
                results[i] = result
        return results

    def start(
        self,
        calls: Sequence[Call[Any]],
        *,
        lend: bool = False,
        deadline: Deadline | None = None,
        wait: Wait | None = None,
        pool: Pool | None = None,
    ) -> Callable[[], list[Any]]:
        """Sends scripts, once; the function returned waits for the replies. It must be called, once. ``lend``: foreign
        code runs meanwhile, so the connections don't count as in use, and the time doesn't count for the deadline.
        ``wait``: the confirmation that each server is to give behind its calls; without it, they get a `NotConfirmed`.
        ``pool``: as of `run_many`.
        """
        if not calls:
            return list
        results: list[Any] = [None] * len(calls)
        pool = pool or self._topology.only_pool
        if pool is not None:
            pipelines = [Pipeline(pool, list(enumerate(calls)), results, deadline, wait)]
        else:
            groups = self._by_primary(calls, results, deadline)
            pipelines = [Pipeline(to, group, results, deadline, wait) for to, group in groups.items()]
        try:
            for pipeline in pipelines:
                pipeline.send(lend=lend)
        except BaseException:
            _give_up(pipelines)
            raise

        def finish() -> list[Any]:
            if lend and deadline is not None:
                deadline.restart()
            has_errors = self.has_several_primaries  # there may be some of calls that no primary was known for
            try:
                for pipeline in pipelines:
                    pipeline.receive()
                    has_errors = has_errors or pipeline.has_errors
            except BaseException:
                _give_up(pipelines)
                raise
            if has_errors:
                for pipeline in pipelines:
                    self._note(pipeline)
                self.repair(calls, results, deadline, wait)
            return results

        return finish

    def _by_primary(
        self, calls: Sequence[Call[Any]], results: list[Any], deadline: Deadline | None
    ) -> dict[Pool, list[tuple[int, Call[Any]]]]:
        groups: dict[Pool, list[tuple[int, Call[Any]]]] = {}
        for position, call in enumerate(calls):
            try:
                groups.setdefault(self._topology.pool_for(call.key, deadline), []).append((position, call))
            except (exceptions.RedisError, RedisUnavailable) as error:
                results[position] = error
        return groups

    def _note(self, pipeline: Pipeline) -> None:
        """Notes whether a primary answered: if not, the next call to it asks the cluster first where its slots are."""
        if pipeline.error is not None:
            self._topology.failed(pipeline.pool, pipeline.error, pipeline.deadline)
        elif self._topology.is_partial:
            self._topology.answered(pipeline.pool)

    def repair(
        self, calls: Sequence[Call[Any]], results: list[Any], deadline: Deadline | None, wait: Wait | None = None
    ) -> None:
        """Sends calls again whose error can be put right at once: scripts were flushed, a slot has moved. Makes the
        other errors ours.
        """
        for position, result in enumerate(results):
            if isinstance(result, Exception):
                results[position] = self._repair(calls[position], result, deadline, wait)

    def _repair(self, call: Call[Any], error: Exception, deadline: Deadline | None, wait: Wait | None) -> Any:
        topology = self._topology
        if isinstance(error, exceptions.ClusterDownError) and (known := topology.known_pool(call.key)) is not None:
            topology.failed(known, error, deadline)
        for _ in range(5):
            prelude: Callable[[Any], object] | None = None
            try:
                if isinstance(error, exceptions.NoScriptError):
                    pool = topology.pool_for(call.key, deadline)
                    prelude = pool.load
                elif isinstance(error, exceptions.MovedError):  # which redis-py makes a kind of AskError
                    pool = topology.redirected(call.key, error, deadline)
                elif isinstance(error, exceptions.AskError) and not call.key.endswith(":"):
                    # A shard is many keys, and its prefix is none of them: while its slot is being moved they are on
                    # both sides, and the importing one would let a script see those that are not there yet as absent,
                    # and write them anew. So the shard rests until the slot has moved. A registry is one key, which is
                    # here or there.
                    pool = topology.redirected(call.key, error, deadline)
                    prelude = _ask_importing
                else:
                    break
            except (exceptions.RedisError, LowqError) as next_error:
                error = next_error
                continue
            results: list[Any] = [None]
            pipeline = Pipeline(pool, [(0, call)], results, deadline, wait)
            try:
                pipeline.send(prelude=prelude)
                pipeline.receive()
            except BaseException:
                pipeline.close(is_whole=False)
                raise
            self._note(pipeline)
            if not isinstance(results[0], Exception):
                return results[0]
            error = results[0]
        translated = self._translate(error, call)
        if isinstance(translated, RedisRefused) and (known := topology.known_pool(call.key)) is not None:
            known.rights.forget()
        return translated

    @property
    def is_partial(self) -> bool:
        """Whether one of the primaries of a cluster does not answer or serve, while others may."""
        return self._topology.is_partial

    @property
    def is_known(self) -> bool:
        """Whether the URL is known to lead to a cluster: a primary of it that does not answer may be replaced soon."""
        return self._topology.is_known

    # --- event loops, group commit ---

    def address_of(self, key: str) -> Address | None:
        """The server that serves the key, as far as that is known without asking. None: it is not, or it is always the
        same URL.
        """
        return self._topology.address_of(key)

    @property
    def is_embedded(self) -> bool:
        """Whether it is the embedded store, which answers at once."""
        return self.url.startswith("memory://")

    def connect_for_loop(self, deadline: Deadline, server: Address | None = None) -> LoopConnection | None:
        """A connection of its own for an event loop, besides the ``size`` that there are for threads. It blocks.
        ``server``: a primary of a cluster. None: there is none for this kind of URL, or no primary was named.

        Raises:
            redis-py's errors, RedisUnavailable, RedisRefused
        """
        is_named = server is not None or not self.has_several_primaries
        if not is_named or self.is_embedded or sys.platform == "win32":  # whose loop watches no sockets
            return None
        connection = self._topology.pool_at(server).connect_dedicated(deadline)
        if fits_loop(connection):
            return LoopConnection(connection)
        connection.disconnect()
        return None

    def allows(self, script: str, server: Address | None = None) -> bool:
        """Whether the user is known to have the rights for a script on that server. `pack` does not check them."""
        return self._topology.pool_at(server).rights.allows(script)

    def follow(self) -> None:
        """Has a connection of `connect_for_loop` that is about to be used break, like all others, when sentinels name
        another primary. It does not block.
        """
        self._topology.follow()

    def pack(
        self,
        calls: Sequence[Call[Any]],
        server: Address | None = None,
        wait: Wait | None = None,
        deadline: Deadline | None = None,
    ) -> bytes:
        """Calls as a server gets them, on a cluster that primary, and behind them the wait for its confirmation."""
        pool = self._topology.pool_at(server)
        packed = [call.pack(pool.scripts) for call in calls]
        if wait is not None:
            packed.append(pack(wait.command(deadline)))
        return b"".join(packed)

    # --- plain commands ---

    def command(self, *args: str | bytes | int | float, key: str | None = None, timeout: float | None = None) -> Any:
        """Runs one Redis command, reading or otherwise fit to be repeated. ``key`` routes it in a cluster.

        Raises:
            RedisUnavailable, RedisRefused, ScriptError
        """
        return self.commands([args], key=key, timeout=timeout)[0]

    def commands(
        self, commands: Sequence[Sequence[Any]], key: str | None = None, timeout: float | None = None
    ) -> list[Any]:
        """Runs several commands in one write, all on the server of ``key``. ``timeout`` is as for `run_many`.

        Raises:
            RedisUnavailable, RedisRefused, ScriptError: the first error among the replies.
        """
        return _raise_first(self.run_many([Command(key or "", *command) for command in commands], timeout=timeout))

    # --- every server ---

    def on_all(
        self, commands: Sequence[Sequence[Any]], silent: dict[str, RedisUnavailable] | None = None
    ) -> dict[str, list[Any]]:
        """The replies to commands of every primary, by its address; "" is the only one there is. ``silent``: primaries
        of a cluster that do not answer are entered there, and not asked if they are there already.

        Raises:
            RedisUnavailable, RedisRefused, ScriptError: the first error among the replies.
        """
        replies = {}
        pools = self._pools()
        for address, pool in pools.items():
            if silent is not None and address in silent:
                continue
            try:
                replies[address] = _raise_first(self.run_many([Command("", *each) for each in commands], pool=pool))
            except RedisUnavailable as error:
                if silent is None or len(pools) == 1:
                    raise
                silent[address] = error
        return replies

    def count_replicas(self, patience: int = 1000) -> dict[str, int]:
        """Counts the replicas of each primary, by its address; "" is the only one there is. In a cluster a replica
        counts also while its connection is broken, as long as the others don't say that it has failed. Programs that
        only copy the data do not count. ``patience``: milliseconds that replicas have for an answer, where the user may
        not ask the primary: it takes as long.

        Raises:
            RedisUnavailable. RedisRefused: the user may neither ask for them nor have them confirm anything.
        """
        if self.is_embedded:
            return {"": 0}
        try:
            infos = self.on_all([("INFO", "replication")])
            counts = {at: _replicas_in(parse_info(info)) for at, (info,) in infos.items()}
        except RedisRefused:  # then those count that answer in time
            counts = {at: count for at, (count,) in self.on_all([("WAIT", 1000, patience)]).items()}
        known = self._topology.replicas()
        return {at: max(count, known.get(at, 0)) for at, count in counts.items()}

    def replicas_of(self, keys: Sequence[str]) -> list[int]:
        """The number of replicas of each key's primary; errors as of `count_replicas`."""
        counts = self.count_replicas()
        if not self.has_several_primaries:
            return [counts[""]] * len(keys)
        places = map(self._topology.address_of, keys)
        return [0 if at is None else counts.get(f"{at[0]}:{at[1]}", 0) for at in places]

    def scan(self, match: str, count: int) -> Iterator[list[bytes]]:
        """The keys like ``match``, of all primaries, a step of about ``count`` keys at a time. A key that is there all
        the time comes, perhaps more than once. A step may be empty.

        Raises:
            RedisUnavailable, RedisRefused
        """
        for pool in self._pools().values():
            cursor = b"0"
            while True:
                step = Command("", "SCAN", cursor, "MATCH", match, "COUNT", count)
                ((cursor, keys),) = _raise_first(self.run_many([step], pool=pool))
                yield keys
                if int(cursor) == 0:
                    break

    def _pools(self) -> dict[str, Pool]:
        try:
            return self._topology.pools()
        except (exceptions.RedisError, RedisUnavailable) as error:
            raise self._translate(error, None) from error

    def server_info(self) -> dict[str, str]:
        """The fields of INFO; empty for the embedded store.

        Raises:
            RedisUnavailable. RedisRefused: the user may not ask for it, for one.
        """
        return {} if self.is_embedded else parse_info(self.command("INFO", "everything"))

    def server_age(self) -> float:
        """Seconds since the youngest server that this client has talked to was started; infinite when unknown. Where
        the user may not ask for INFO it is that since a server was found without lowq's scripts, if it was.
        """
        return clock.now() - self._topology.started_at()

    def subscribe(self) -> Subscription:
        """A connection of its own for wake-ups; on a cluster one to each primary that has some of the channels."""

        return Subscription(self._topology, lambda error: self._translate(error, None))

    def close(self) -> None:
        """Closes the connections that are not in use."""
        self._topology.close()

    def reset(self) -> None:
        """Forgets all connections: they belong to the parent of this process."""
        self._topology.reset()

    def _translate(self, error: Exception, call: Call[Any] | None) -> Exception:
        translated = translate(error, call, self.url)
        never_answered = False
        if "does not answer" in str(translated) and not hasattr(translated, "__notes__"):
            pool = self._topology.known_pool("" if call is None else call.key)
            never_answered = not (self.is_known or (pool is not None and pool.is_prepared))
        if never_answered:
            translated = with_guess(translated, error, self.url)
            translated.add_note(START_REDIS.format("redis_url"))  # the last line that a script prints
        if translated is not error:
            # Without its traceback: the frames of the connection are many, and tell the caller nothing.
            translated.__cause__, error.__context__ = None if never_answered else error.with_traceback(None), None
        if isinstance(translated, ScriptError) and call is not None:
            translated.key = call.key or None
        return translated


def _give_up(pipelines: Sequence[Pipeline]) -> None:
    for pipeline in pipelines:
        pipeline.close(is_whole=False)


def _ask_importing(connection: Any) -> None:
    """Says that a call goes to the server that imports its slot: the prelude after ASK."""
    reply = ask(connection, b"ASKING")
    if isinstance(reply, Exception):
        raise reply


def _raise_first(replies: list[Any]) -> list[Any]:
    """The replies, unless one of them is an error."""
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
    return replies


# --- forks ---

_clients: "weakref.WeakSet[Client]" = weakref.WeakSet()


def _forget_connections() -> None:
    for client in list(_clients):
        client.reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_connections)
