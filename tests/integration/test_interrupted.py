"""Exceptions that a signal handler raises in the middle of a push: the usual timeout by SIGALRM, Ctrl-C."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: Each push gets a signal after a time of its own, half of them more while they clean up. The answers must be its own:
#: a connection on which another one was left would show.
HAMMER = """
    import json, random, signal, sys, threading, lowq
    from lowq.store import Call
    from lowq.store.keys import shard_prefix

    url, name = sys.argv[1], sys.argv[2]
    kind = {"Interrupted": type("Interrupted", (Exception,), {}), "KeyboardInterrupt": KeyboardInterrupt}[name]

    def interrupt(*_):
        raise kind

    app = lowq.Lowq(redis_url=url, client_pool_size=2, pool_timeout=1)
    queue = app.queue("Orders", 3)
    queue.push({"id": "first"})
    signal.signal(signal.SIGALRM, interrupt)
    chance, interrupted, strange = random.Random(1), 0, 0
    for number in range(4000):
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-6, 6e-4), chance.choice([0, 5e-5]))
                strange += queue.push({"id": number, "payload": number}) != 1
                strange += app.client.command("ECHO", number + 7) != b"%d" % (number + 7)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except (kind, lowq.PushError, UnboundLocalError) as error:
            # A push that has more to prepare says what is in, and why it ended. When redis-py 6 is interrupted while it
            # makes a connection it raises an UnboundLocalError of its own instead.
            hidden = error.__context__ if isinstance(error, UnboundLocalError) else error.__cause__
            assert isinstance(error, kind) or isinstance(hidden, kind), repr(error)
            interrupted += 1
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    # Both connections are to be had, at the same time.
    finish = [app.client.start([Call("stats", shard_prefix("lowq", "Orders", 0), [""])]) for _ in range(2)]
    free = [not isinstance(reply, Exception) for done in finish for reply in done()]
    print(json.dumps([interrupted > 0, strange, free, queue.push({"id": "last"})]))
"""


@pytest.mark.parametrize("kind", [pytest.param("Interrupted", marks=pytest.mark.slow), "KeyboardInterrupt"])
def test_pushes_that_signals_interrupt_neither_crash_nor_lose_connections(redis_url: str, kind: str) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(HAMMER), redis_url, kind],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [True, 0, [True, True], 1]
