"""What a job costs Redis, exactly: commands, those inside of scripts too, and bytes.

The costs are those of Redis's own counters, so they are the same on any machine, however busy. Whoever adds a command
to each job, or to each round trip, finds it here; whoever saves one writes down the new cost. The node and the
producer of these tests do nothing by the clock: what is left is what the jobs cost.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any
from unittest import mock

import pytest
import redis
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, Sampler

import lowq
import lowq.contrib.otel
from lowq.node.node import Node
from lowq.node.schedules import take_turn
from lowq.schedules import Schedule
from lowq.store import Client
from lowq.store.keys import shard_prefix
from tests.processes.support import NEVER, until
from tests.rows import case

MakeCosts = Callable[..., "Costs"]


class Costs:
    """One worker on an emptied server, and the commands that Redis counts."""

    def __init__(
        self, url: str, *, batch_size: int = 1, shards_count: int = 1, later: bool = False, **options: Any
    ) -> None:
        self._redis: Any = redis.Redis.from_url(url, decode_responses=True)
        self.app = lowq.Lowq(redis_url=url, poll_interval=NEVER, lease_ttl=NEVER, durability_timeout=0.001)
        self._stop = ExitStack()
        self._pushed = 0

        @self.app.worker(queue_name="Costs", batch_size=batch_size, shards_count=shards_count, **options)
        class Blank(lowq.Worker[Any]):
            def perform(self, payloads_by_id: dict[str, list[Any]]) -> None:
                pass

        self.worker = Blank
        self._shards_count = shards_count
        # Registers the queue, loads the scripts, makes what stays for good.
        self.push(["warm-up"], delay=NEVER if later else 0.0)

    def close(self) -> None:
        self._stop.close()
        self._redis.close()
        self.app.close()

    def push(self, ids: Sequence[str], size: int = 20, **when: float) -> None:
        """Ids that don't wait yet, each with a payload of so many bytes."""
        pad = "x" * (size - len('{"p":""}'))
        self._pushed += len(ids)
        self.worker.perform_async({"id": job_id, "payload": {"p": pad}, **when} for job_id in ids)

    def words(self) -> bytes:
        """What a push says of the queue's options."""
        said: list[bytes] = []
        start = Client.start

        def noted(client: Client, calls: Sequence[Any], **options: Any) -> Any:
            said.extend(call.data[4] for call in calls if call.script == "push")
            return start(client, calls, **options)

        with mock.patch.object(Client, "start", noted):
            self.push(["asked"])
        return said[-1].removeprefix(b"2")

    def commands(self, action: Callable[[], object]) -> Counter[str]:
        """How often each command was executed meanwhile."""
        self._redis.config_resetstat()
        action()
        return self._counted()

    def _counted(self) -> Counter[str]:
        counted = self._redis.info("commandstats")
        return Counter(
            {
                name.removeprefix("cmdstat_"): figures["calls"]
                for name, figures in counted.items()
                if not name.startswith(("cmdstat_config", "cmdstat_info", "cmdstat_hscan"))  # our own
            }
        )

    def keys(self) -> set[str]:
        return set(self._redis.keys())

    def used_memory(self) -> int:
        """Without that of Lua, which newer servers count, with all that it has not collected yet."""
        self._redis.script_flush("SYNC")
        return int(self._redis.info("memory")["used_memory"])

    def allowed_bytes(self, least: int, most: int) -> tuple[float, float]:
        """Bounds measured with Redis, as this server may have them: from 8.1 on Valkey needs up to a quarter less."""
        return (least * 0.7 if "valkey_version" in self._redis.info("server") else least), most

    def start_node(self, *, prefetch: bool) -> None:
        """A node with one thread, which has nothing left to do when this returns."""
        node = Node(self.app, threads=1, prefetch=prefetch)
        node.start()
        self._stop.callback(node.stop)
        self.drain(10)  # behind it is what a node does once
        until(self._listens, "its subscriptions")
        self._until_heartbeat()
        until(lambda: self._quiet_for(0.3), "the end of what it does once, also in other threads")

    def stop_node(self) -> None:
        self._stop.close()

    def due(self) -> tuple[str, set[str]]:
        """How Redis encodes the first shard's `due`, and the ids in it."""
        key = shard_prefix("lowq", "Costs", 0) + "due"
        return self._redis.object("encoding", key), set(self._redis.zrange(key, 0, -1))

    def drain(self, jobs: int) -> Counter[str]:
        """What the node's work costs: from before the jobs are due until they are acknowledged."""
        ahead = 0.25
        while True:
            # Due all at once, in a moment: the node knows when, and nothing wakes it before.
            due = time.time() + ahead
            self.push(ids(jobs), perform_at=due)
            self._redis.config_resetstat()
            in_time = time.time() < due
            self._until_processed(self._pushed)
            if in_time:
                return self._counted()
            ahead *= 2  # a slow machine: some were taken before the counting began

    def _until_processed(self, jobs: int) -> None:
        until(lambda: self._processed() == jobs, "an acknowledgement of every job")

    def until_consumer_has_settled(self) -> None:
        """It listens, and the registry says what it holds: nothing of its start is left to be done."""
        until(self._listens, "its subscription")
        self._until_heartbeat()
        until(lambda: self._quiet_for(0.3), "the end of what it does once")

    def _until_heartbeat(self) -> None:
        """The one that says what it holds: its first one comes before it has any shard."""
        held = [{"Costs": [*range(self._shards_count)]}]
        until(lambda: [node.shards for node in self.app.nodes()] == held, "its heartbeat")

    def _listens(self) -> bool:
        """Whether somebody has subscribed to the wake-ups of each shard."""
        channels = [shard_prefix("lowq", "Costs", shard) + "wake" for shard in range(self._shards_count)]
        return all(count == 1 for _, count in self._redis.pubsub_shardnumsub(*channels))

    def _quiet_for(self, seconds: float) -> bool:
        """Whether nobody speaks to Redis meanwhile."""
        before = self._redis.info("stats")["total_commands_processed"]
        time.sleep(seconds)
        return int(self._redis.info("stats")["total_commands_processed"]) == int(before) + 1

    def _processed(self) -> int:
        # By a command that lowq doesn't use, so that it can be left out.
        return sum(
            int(dict(self._redis.hscan_iter(shard_prefix("lowq", "Costs", shard) + "meta")).get("processed", 0))
            for shard in range(self._shards_count)
        )


@pytest.fixture
def make_costs(redis_url: str) -> Iterator[MakeCosts]:
    made: list[Costs] = []

    def make(**options: Any) -> Costs:
        if made:
            made[-1].close()
            with redis.Redis.from_url(redis_url) as client:
                client.execute_command("FLUSHALL", "SYNC")
        made.append(Costs(redis_url, **options))
        return made[-1]

    yield make
    made[-1].close()


def ids(count: int, word: str = "id") -> list[str]:
    return [f"{word}{number:06}" for number in range(count)]


def more(larger: Counter[str], smaller: Counter[str]) -> dict[str, int]:
    """What the larger took in addition: everything that has to be done once cancels out."""
    assert not smaller - larger, "the smaller took more of something"
    return dict(larger - smaller)


# --- pushing ----------------------------------------------------------------------------------------------------------

#: A round trip that finds nothing due.
LOOK = {"evalsha": 1, "get": 1, "time": 1, "hmget": 1, "exists": 1, "hlen": 1, "zrange": 1}

#: A call of `push`: one round trip to Redis, for up to 1,000 jobs of a shard.
PUSH_CALL = {
    "evalsha": 1, "hmget": 2, "exists": 1, "time": 1, "zrange": 1, "zadd": 1, "hset": 2, "lpush": 1,
}  # fmt: skip


def test_a_push_of_a_shard_is_one_call_however_many_jobs_and_says_what_options_the_queue_has(
    make_costs: MakeCosts,
) -> None:
    rows: list[tuple[int, dict[str, Any], bytes]] = [
        (1, {}, b""), (1000, {}, b""), (100, {"max_payloads": 7, "ttr": 60}, b""),
        (100, {"merge": "append"}, b" merge=append"), (100, {"merge": "latest"}, b" merge=latest"),
    ]  # fmt: skip
    for jobs, options, words in rows:
        with case(jobs, options):
            costs = make_costs(**options)
            assert costs.commands(lambda costs=costs, jobs=jobs: costs.push(ids(jobs))) == PUSH_CALL  # type: ignore[misc]
            assert costs.words() == words


def test_debounce_costs_three_commands_a_call(make_costs: MakeCosts) -> None:
    costs = make_costs(debounce=1000, later=True)
    costs.push(["first"])
    counted = costs.commands(lambda: costs.push(ids(100)))
    assert counted == Counter(PUSH_CALL) + Counter({"zmscore": 2, "zadd": 1})


def test_capacity_costs_two_commands_a_call_and_one_more_where_it_gets_tight(make_costs: MakeCosts) -> None:
    for capacity, tight in ((1000, {}), (100, {"zmscore": 1})):
        costs = make_costs(capacity=capacity)
        costs.push(ids(99))
        counted = costs.commands(lambda costs=costs: costs.push(ids(99)))  # type: ignore[misc]
        # All of them wait, each with the same payload: it is read, and nothing is written of them.
        more = {"zcard": 1, "hlen": 1, **tight}
        assert counted == Counter(PUSH_CALL) - Counter({"hset": 1}) + Counter(more)


def test_to_many_shards_it_is_a_call_each_and_durability_one_command_a_server(make_costs: MakeCosts) -> None:
    costs = make_costs(shards_count=5)
    costs.push(ids(200))  # now all shards have a head that doesn't move

    def push(prefix: str, **options: Any) -> Callable[[], None]:
        jobs = [{"id": job_id, "payload": "x"} for job_id in ids(200, prefix)]

        def send() -> None:
            with suppress(lowq.NotReplicated):  # there is no replica
                costs.worker.perform_async(jobs, **options)

        return send

    push("first", durability="replicated")()  # asks the server whether it can do that
    counted = costs.commands(push("second", durability="replicated"))
    assert counted == _times(PUSH_CALL, 5) + Counter({"wait": 1})
    assert costs.commands(push("third")) == _times(PUSH_CALL, 5)
    assert costs.commands(push("fourth", durability="none")) == _times(PUSH_CALL, 5)


def test_a_push_that_moves_the_head_of_a_shard_wakes_its_owner_once(make_costs: MakeCosts) -> None:
    costs = make_costs(later=True)
    counted = costs.commands(lambda: costs.push(ids(100)))
    assert counted == Counter(PUSH_CALL) + Counter({"zrange": 1, "exists": 1, "spublish": 1})


def test_many_jobs_for_an_empty_shard_spare_the_compact_encoding(make_costs: MakeCosts) -> None:
    # Redis would search it from its beginning for each of the first 128 ids.
    costs = make_costs()
    costs.start_node(prefetch=True)  # empties it
    costs.stop_node()
    counted = costs.commands(lambda: costs.push(ids(100)))
    assert counted == Counter(PUSH_CALL) + Counter({"zrem": 1, "hdel": 1, "zrange": 1, "exists": 1, "spublish": 1})
    assert costs.due() == ("skiplist", set(ids(100)))


def test_trace_contexts_cost_a_command_a_call_and_one_a_job(make_costs: MakeCosts) -> None:
    costs = make_costs()
    instrument(costs, ALWAYS_ON)
    costs.push(["first"])  # notes that the shard has them
    counted = costs.commands(lambda: costs.push(ids(100)))
    assert counted == Counter(PUSH_CALL) + Counter({"mget": 1, "set": 100})


def test_what_is_not_sampled_costs_no_command_and_no_word(make_costs: MakeCosts) -> None:
    costs = make_costs()
    instrument(costs, ALWAYS_OFF)
    assert costs.commands(lambda: costs.push(ids(100, "other"))) == PUSH_CALL
    assert costs.words() == b""
    costs.start_node(prefetch=False)
    few, many = (without_looks(costs.drain(batches), batches + 1) for batches in (2, 22))
    assert more(many, few) == _times(Counter(TRIP) + Counter(TAKEN_16), 20)


def instrument(costs: "Costs", sampler: Sampler) -> None:
    lowq.contrib.otel.instrument(costs.app, tracer_provider=TracerProvider(sampler=sampler))


# --- draining ---------------------------------------------------------------------------------------------------------

#: A round trip to Redis: acknowledge what was performed, take the next.
TRIP = {
    "evalsha": 1, "get": 1, "time": 1, "hmget": 2, "hlen": 1, "exists": 1, "zrange": 1, "zrem": 1, "hset": 2,
    "hdel": 2,
}  # fmt: skip
#: Each 16 jobs of it. A job of its own costs no command.
TAKEN_16 = {"hmget": 1}


def test_a_batch_costs_one_trip(make_costs: MakeCosts) -> None:
    for batch_size in (1, 40):
        costs = make_costs(batch_size=batch_size)
        costs.start_node(prefetch=False)
        # A round trip for each batch, and one that acknowledges the last.
        few, many = (without_looks(costs.drain(batches * batch_size), batches + 1) for batches in (2, 22))
        per_round_trip = Counter(TRIP) + _times(TAKEN_16, -(-batch_size // 16))
        with case(batch_size):
            assert more(many, few) == _times(per_round_trip, 20)


def test_keep_finished_costs_four_commands_a_trip_however_many_jobs(make_costs: MakeCosts) -> None:
    costs = make_costs(batch_size=40, keep_finished=3600)
    costs.start_node(prefetch=False)
    few, many = (without_looks(costs.drain(batches * 40), batches + 1) for batches in (2, 22))
    kept = {"hlen": 1, "exists": 1, "pttl": 1, "hset": 1}
    assert more(many, few) == _times(Counter(TRIP) + _times(TAKEN_16, 3) + Counter(kept), 20)


def test_with_prefetch_each_job_costs_the_same(make_costs: MakeCosts) -> None:
    # How many round trips there are depends on how fast the jobs are performed; what each job costs does not.
    costs = make_costs()
    costs.start_node(prefetch=True)
    few, many = (costs.drain(jobs) for jobs in (10, 1010))
    round_trips = many["evalsha"]
    # Also when a thread was held up, and acknowledges before it has performed all that it took.
    assert set(few) == set(many) == {*TRIP, *TAKEN_16}
    assert many.total() <= round_trips * sum(TRIP.values()) + (1010 // 16 + round_trips)


def test_trace_contexts_cost_three_commands_a_trip_and_one_a_job(make_costs: MakeCosts) -> None:
    costs = make_costs(batch_size=16)
    instrument(costs, ALWAYS_ON)
    costs.start_node(prefetch=False)
    few, many = (without_looks(costs.drain(batches * 16), batches + 1) for batches in (2, 22))
    traces = {"mget": 1, "exists": 1, "unlink": 1, "rename": 16}
    assert more(many, few) == _times(Counter(TRIP) + Counter(TAKEN_16) + Counter(traces), 20)


# --- memory -----------------------------------------------------------------------------------------------------------


def test_a_queued_job_takes_so_many_bytes_and_a_trace_context_some_more(make_costs: MakeCosts) -> None:
    for size, is_traced, least, most in ((20, False, 190, 240), (100, False, 260, 310), (20, True, 390, 520)):
        costs = make_costs(shards_count=5)
        if is_traced:
            instrument(costs, ALWAYS_ON)
        before = costs.used_memory()
        costs.push(ids(16_000), size)
        least_here, most_here = costs.allowed_bytes(least, most)
        with case(size, is_traced):
            assert least_here <= (costs.used_memory() - before) / 16_000 <= most_here


def without_looks(counted: Counter[str], round_trips: int) -> Counter[str]:
    """What so many round trips cost: without those that came a moment before the jobs were due, and found nothing."""
    looks = counted["evalsha"] - round_trips
    assert 0 <= looks <= 2
    return counted - _times(LOOK, looks)


def _times(costs: Mapping[str, int], count: int) -> Counter[str]:
    return Counter({name: calls * count for name, calls in costs.items()})


# --- by hand ----------------------------------------------------------------------------------------------------------


def test_a_job_taken_by_hand_costs_a_round_trip_to_take_and_one_to_acknowledge(make_costs: MakeCosts) -> None:
    costs = make_costs()
    with costs.worker.queue.consumer(ttr=60) as consumer:
        costs.push(ids(40))
        until(lambda: len(consumer.take(20, timeout=0)) == 20, "that it has been woken")
        costs.until_consumer_has_settled()

        def work() -> None:
            for _ in range(10):
                (job,) = consumer.take(timeout=0)
                job.ack()

        # With 20 others in hand: an `hmget` says which of those that wait next are in flight, too.
        take = {**LOOK, "evalsha": 1, "hmget": 3, "zrem": 1, "hset": 2, "hdel": 1}
        ack = {**LOOK, "hmget": 3, "hdel": 1, "hset": 1}
        assert costs.commands(work) == _times(Counter(take) + Counter(ack), 10)


def test_batches_taken_by_hand_cost_a_take_and_an_acknowledgement_each_in_one_write(
    make_costs: MakeCosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = make_costs()
    with costs.worker.queue.consumer(ttr=60) as consumer:
        costs.push(ids(1000))
        batches = consumer.batches(100, timeout=0)
        until(lambda: next(batches), "the first batch")
        writes: list[int] = []
        run_many = Client.run_many

        def counted(self: Client, calls: Sequence[Any], *args: Any, **options: Any) -> list[Any]:
            if threading.current_thread() is threading.main_thread():  # what renews its lease has its own
                writes.append(len(calls))
            return run_many(self, calls, *args, **options)

        monkeypatch.setattr(Client, "run_many", counted)
        for _ in range(5):
            assert len(next(batches)) == 100
        assert writes == [2] * 5


# --- schedules --------------------------------------------------------------------------------------------------------


def test_without_schedules_a_node_has_no_thread_queue_or_key_for_them(make_costs: MakeCosts) -> None:
    costs = make_costs()
    costs.start_node(prefetch=True)
    assert not [thread for thread in threading.enumerate() if "schedules" in thread.name]
    assert [node.schedules for node in costs.app.nodes()] == [{}]
    costs.stop_node()
    kept = costs.keys()
    assert {key.rpartition(":")[2] for key in kept} == {"queues", "Costs", "meta", "pushed"}
    assert all("schedules" not in key for key in kept)


def test_a_tick_costs_a_push_and_two_commands_and_a_look_costs_two(make_costs: MakeCosts) -> None:
    costs = make_costs()
    costs.push(["a"])  # so that the tick does not become the head
    queue, known = costs.worker.queue, {"s": Schedule("s", 3600)}
    now = 1_800_000_000.0
    take_turn(costs.app, queue, "s", lambda: known, now=now)
    read = {"hget": 1, "time": 1}
    assert costs.commands(lambda: take_turn(costs.app, queue, "s", lambda: known, now=now + 1)) == read
    counted = costs.commands(lambda: take_turn(costs.app, queue, "s", lambda: known, now=now + 3600))
    assert counted == Counter(PUSH_CALL) + Counter(read) + Counter({"hget": 1, "hset": 1})
