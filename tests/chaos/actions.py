"""The harm that can be done to a stage, by name."""

import signal
import time
from collections.abc import Callable

import redis

from tests.chaos.replicated import HARM
from tests.chaos.stage import NODES, Stage
from tests.history import read
from tests.processes.support import NodeProcess

#: What the log of a consumer says that takes and performs in one thread.
ONE_THREAD = " starts: 1 threads"

# --- nodes ---


def kill(stage: Stage, number: int) -> None:
    """SIGKILL. Another node is started in its place."""
    node = stage.chosen(number)
    if node is not None:
        stage.kill(node)


def reattach(stage: Stage, number: int) -> None:
    """A consumer detaches with jobs in hand, and comes back with its session as a new program of the same process."""
    node = stage.chosen(number)
    if node is not None and " starts: " in node.log:
        node.signal(signal.SIGUSR1)


def freeze(stage: Stage, number: int) -> None:
    """SIGSTOP, and SIGCONT well past the lease."""
    node = stage.chosen(number)
    if node is not None:
        node.freeze()
        stage.frozen[node] = time.monotonic() + stage.ttl * (1.3 + number % 5 / 5)


def freeze_in_take(stage: Stage, number: int) -> None:
    """SIGSTOP to a consumer with one thread, while that waits for a reply with a job in it; and SIGCONT well past the
    lease, with the reply there.
    """
    able = [node for node in stage.live() if node not in stage.frozen and ONE_THREAD in node.log]
    if not able:
        return
    node = able[number % len(able)]
    proxy, give_up_at = stage.proxies[node.pid], time.monotonic() + 2 * stage.ttl
    proxy.hold_reply(b'"version":')  # of a payload
    while not proxy.is_holding and time.monotonic() < give_up_at:
        stage.tend()
        time.sleep(0.001)
    if proxy.is_holding and node in stage.live():
        node.freeze(in_call=True)
        stage.frozen[node] = time.monotonic() + stage.ttl * (1.3 + number % 5 / 5)
    proxy.heal()


def blink(stage: Stage, number: int) -> None:
    """SIGSTOP, and SIGCONT within the lease or about when it ends."""
    node = stage.chosen(number)
    if node is not None:
        node.freeze()
        stage.frozen[node] = time.monotonic() + stage.ttl * (0.2 + number % 9 / 9)


def term(stage: Stage, number: int) -> None:
    """SIGTERM. Another node is started in its place."""
    node = stage.chosen(number)
    if node is not None:
        _dismiss(stage, node)


def term_all(stage: Stage, number: int) -> None:
    """SIGTERM to all of them, twice to some."""
    for position, node in enumerate(stage.live()):
        _dismiss(stage, node)
        if (number + position) % 3 == 0:
            node.signal(signal.SIGTERM)


def quiet(stage: Stage, number: int) -> None:
    """SIGTSTP: it takes nothing more. Another one is started, and soon it gets its SIGTERM."""
    node = stage.chosen(number)
    if node is not None:
        stage.dismiss(node)
        node.signal(signal.SIGTSTP)
        stage.later.append((time.monotonic() + 0.5, lambda: node.signal(signal.SIGTERM)))


def join(stage: Stage, number: int) -> None:
    """One node more, up to twice as many as usual."""
    stage.nodes_wanted = min(stage.nodes_wanted + 1, 2 * NODES)


def leave(stage: Stage, number: int) -> None:
    """One node less: SIGTERM, unless it were the last that is there."""
    ready = stage.ready()
    if stage.nodes_wanted > 1 and len(ready) > 1:
        stage.nodes_wanted -= 1
        _dismiss(stage, ready[number % len(ready)])


def roll(stage: Stage, number: int) -> None:
    """A new node for each old one: the new one first, then SIGTERM to the old one once the new one has started."""
    for position, old in enumerate(stage.live()):
        stage.later.append((time.monotonic() + position * 1.0, lambda old=old: _replace(stage, old)))  # type: ignore[misc]


def deploy(stage: Stage, number: int) -> None:
    """SIGHUP to the supervisor: new processes for the old ones, one after the other."""
    node = stage.chosen(number)
    if node is not None:
        node.signal(signal.SIGHUP)


def reload(stage: Stage, number: int) -> None:
    """SIGHUP to a node: it goes on with new code, in the same process. Each fourth time to all of them at once."""
    node = stage.chosen(number)
    for chosen in stage.live() if number % 4 == 0 else [node]:
        if chosen is not None and " starts: " in chosen.log:  # before, it has no handler for that
            chosen.signal(signal.SIGHUP)


def kill_child(stage: Stage, number: int) -> None:
    """SIGKILL to one of the supervisor's processes, which starts another."""
    children = stage.children()
    if children:
        stage.kill_child(children[number % len(children)])


def _replace(stage: Stage, old: NodeProcess) -> None:
    new = stage.start_node()

    def hand_over() -> None:
        if " starts: " not in new.log and new.process.poll() is None:
            stage.later.append((time.monotonic() + 0.02, hand_over))
        elif old.process.poll() is None:
            _dismiss(stage, old)

    hand_over()


def _dismiss(stage: Stage, node: NodeProcess) -> None:
    stage.dismiss(node)
    node.signal(signal.SIGTERM)


# --- another number of shards ---


def cancel(stage: Stage, number: int) -> None:
    """Somebody cancels some ids, most of which run or wait: those that change all the time."""
    ids, name = [str(number % 40 + step) for step in range(0, 40, 7)], f"cancel {time.monotonic()}"
    stage.history.cancelling(name, ids)
    stage.app.queue(stage.queue_name, stage.shards_count).cancel(ids)
    stage.history.cancelled(name)


def reshard(stage: Stage, number: int) -> None:
    """`lowq reshard`, to one number of shards after the other; started anew whenever it is killed."""
    stage.reshard()


def kill_reshard(stage: Stage, number: int) -> None:
    """SIGKILL to the command that is at it."""
    if stage.resharder is not None and stage.resharder.poll() is None:
        stage.resharder_killed = True
        stage.resharder.kill()


def remake(stage: Stage, number: int) -> None:
    """`lowq drop` while producers stand still, and new code with another number of shards. The producers then go on,
    and know the old one.
    """
    for producer in stage.producers:
        producer.send_signal(signal.SIGSTOP)
    stage.wait_for(stage.is_drained, "end of the work before the drop")
    wanted, stage.nodes_wanted = stage.nodes_wanted, 0
    for node in stage.live():
        _dismiss(stage, node)
    stage.wait_for(lambda: not stage.live(), "end of the nodes before the drop")
    stage.drop()
    stage.remade([count for count in (5, 12, 33) if count != stage.shards_count][number % 2])
    stage.nodes_wanted = wanted
    stage.wait_for(stage.all_leased, "lease of every new shard")
    for producer in stage.producers:
        producer.send_signal(signal.SIGCONT)


# --- Redis ---


def redis_kill(stage: Stage, number: int) -> None:
    """SIGKILL, and a start at once; without persistence all is lost."""
    stage.history.trouble()
    if stage.persistence == "none":
        stage.history.lapse(stage.ttl)
    stage.server.kill()
    stage.server.start()
    _back(stage)


def redis_away(stage: Stage, number: int) -> None:
    """SIGKILL, and a start after longer than a lease."""
    stage.history.trouble()
    if stage.persistence == "none":
        stage.history.lapse(3 * stage.ttl)
    stage.server.kill()
    stage.wait_until(time.monotonic() + stage.ttl * (1.2 + number % 3 / 3))
    stage.server.start()
    _back(stage)


def redis_power(stage: Stage, number: int) -> None:
    """What Redis wrote in the last second is gone, as its fsync of every second had not come yet."""
    stage.history.trouble()
    stage.history.lapse(stage.ttl)
    stage.lose_power()
    stage.server.start()
    _back(stage)


def redis_read_only(stage: Stage, number: int) -> None:
    """A replica of a server that is not there, for part of a lease or for longer; then a primary again."""
    stage.history.trouble()
    stage.client.execute_command("REPLICAOF", "127.0.0.1", "1")
    stage.wait_until(time.monotonic() + stage.ttl * (0.3 + number % 5 / 3))
    stage.client.execute_command("REPLICAOF", "NO", "ONE")
    _back(stage)


def memory_full(stage: Stage, _number: int) -> None:
    """Redis may have no more memory than it uses, until a push was refused."""
    before = stage.client.config_get("maxmemory")["maxmemory"]
    stage.client.config_set("maxmemory", stage.client.info("memory")["used_memory"])
    stage.wait_for(lambda: any(event["event"] == "refused" for event in read(stage.history.path)), "refused push")
    stage.client.config_set("maxmemory", before)


def redis_hangs(stage: Stage, number: int) -> None:
    """SIGSTOP for part of a lease, or for longer."""
    stage.history.trouble()
    stage.server.pause()
    stage.wait_until(time.monotonic() + stage.ttl * (0.3 + number % 5 / 3))
    stage.server.cont()
    _back(stage)


def _back(stage: Stage) -> None:
    stage.history.calm()
    stage.outages.append(time.monotonic())


def script_flush(stage: Stage, number: int) -> None:
    stage.client.execute_command("SCRIPT", "FLUSH", "ASYNC" if number % 2 else "SYNC")


def client_kill(stage: Stage, number: int) -> None:
    """Cuts all connections of one kind, or all but ours."""
    stage.history.trouble()
    try:
        for kind in (("normal",), ("pubsub",), ("normal", "pubsub"))[number % 3]:
            stage.client.execute_command("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")
    except redis.ConnectionError:
        pass  # it was ours after all
    stage.history.calm()


def client_pause(stage: Stage, number: int) -> None:
    """Redis serves nobody for a while, or nobody who writes."""
    seconds = stage.ttl * (0.3 + number % 5 / 3)
    stage.history.trouble()
    stage.client.execute_command("CLIENT", "PAUSE", int(seconds * 1000), "ALL" if number % 2 else "WRITE")
    stage.later.append((time.monotonic() + seconds, lambda: _back(stage)))


def clock(stage: Stage, number: int) -> None:
    """Redis's clock jumps to up to 50 s before or after the true time."""
    seconds = number % 101 - 50
    stage.history.lapse(1.5 * stage.ttl, data=False)  # should it jump forward
    stage.step_clock(seconds)


# --- the network ---


def _proxied(stage: Stage, number: int, lasting: float, what: str, **more: object) -> None:
    """Harm to the connections of one node, for so many seconds."""
    node = stage.chosen(number)
    if node is None:
        return
    proxy = stage.proxies[node.pid]
    stage.history.trouble(node.pid)
    getattr(proxy, what)(**more)

    def heal() -> None:
        proxy.heal()
        stage.history.calm(node.pid)

    stage.later.append((time.monotonic() + lasting, heal))


def cut_off(stage: Stage, number: int) -> None:
    """No connection to Redis for longer than a lease."""
    _proxied(stage, number, stage.ttl * (1.5 + number % 5 / 5), "cut", refuse=True)


def hold(stage: Stage, number: int) -> None:
    """Nothing gets through for longer than a lease; then all of it does, late."""
    _proxied(stage, number, stage.ttl * (1.5 + number % 5 / 5), "hold")


def half_open(stage: Stage, number: int) -> None:
    """Replies, or requests, disappear for longer than a lease."""
    _proxied(stage, number, stage.ttl * (1.5 + number % 5 / 5), "half_open", direction=("reply", "request")[number % 2])


def slow(stage: Stage, number: int) -> None:
    """Everything takes 20 to 60 ms longer in each direction, for a while."""
    _proxied(stage, number, 2.0, "delay", seconds=0.02 + number % 5 / 100)


def cut(stage: Stage, number: int) -> None:
    """All connections of a node are reset."""
    _proxied(stage, number, 0.0, "cut")


def lose_replies(stage: Stage, number: int) -> None:
    """The next replies to a node are lost, their commands executed."""
    _proxied(stage, number, 0.3, "lose_replies", count=1 + number % 3)


def lose_pushes(stage: Stage, number: int) -> None:
    """The next replies to producers are lost, their pushes executed."""
    assert stage.producers_proxy is not None
    stage.producers_proxy.lose_replies(1 + number % 3)


def hold_pushes(stage: Stage, number: int) -> None:
    """Pushes are held for longer than a producer waits, and get through late."""
    proxy = stage.producers_proxy
    assert proxy is not None
    proxy.hold()
    stage.later.append((time.monotonic() + 0.5 + number % 5 / 5, proxy.heal))


ACTIONS: dict[str, Callable[[Stage, int], None]] = {
    action.__name__: action
    for action in (
        kill, freeze, freeze_in_take, blink, reattach, term, term_all, quiet, join, leave, roll, deploy, reload,
        kill_child,
        cancel,
        reshard, kill_reshard, remake,
        redis_kill, redis_away, redis_power, redis_hangs, redis_read_only, memory_full, script_flush, client_kill,
        client_pause,
        clock,
        cut_off, hold, half_open, slow, cut, lose_replies, lose_pushes, hold_pushes,
        *HARM,
    )
}  # fmt: skip
