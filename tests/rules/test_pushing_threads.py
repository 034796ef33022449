"""Pushes and the threads and processes that belong to the application: forks, signal handlers, the loop's executor.

Private locks are held on purpose: a fork, or a signal, comes while they are held only now and then.
"""

import asyncio
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import lowq
from tests.waiting import NEVER, PATIENCE


def test_pushes_that_wait_for_room_hold_no_thread_of_the_loops_executor(store_url: str) -> None:
    app = lowq.Lowq(redis_url=store_url)
    queue = app.queue("full", 1, capacity=1)
    queue.push({"id": "first"})

    async def scenario() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        pushes = [
            asyncio.ensure_future(
                queue.apush(f"{number}", timeout=NEVER, durability="replicated" if number % 2 else "none")
            )
            for number in range(4)
        ]
        many = [{"id": f"m{n}", "payload": "x" * 1000} for n in range(5000)]
        pushes.append(asyncio.ensure_future(queue.apush(many, timeout=NEVER)))
        for _ in range(5):
            assert await asyncio.wait_for(asyncio.to_thread(lambda: "free"), PATIENCE) == "free"
        for push in pushes:
            push.cancel()
        await asyncio.gather(*pushes, return_exceptions=True)

    asyncio.run(scenario())
    app.close()


FORKS = """
import os, signal, sys, threading, time
import lowq
from lowq.codec.jobs import fresh_id

app = lowq.Lowq(redis_url="memory://")
queue = app.queue("mail", 1)
held, forked = threading.Event(), threading.Event()

def hold():
    with fresh_id._lock, app._lock:
        held.set()
        forked.wait()

threading.Thread(target=hold, daemon=True).start()
held.wait()
child = os.fork()
if child == 0:  # where nobody has the locks, and nobody will give them back
    lowq.Lowq(redis_url="memory://").queue("mail", 1).put("in the child")
    app.with_own_pool(1)
    os._exit(0)
forked.set()
give_up_at = time.monotonic() + 60
code = None
while code is None and time.monotonic() < give_up_at:
    pid, status = os.waitpid(child, os.WNOHANG)
    code = os.waitstatus_to_exitcode(status) if pid else time.sleep(0.01)
if code is None:
    os.kill(child, signal.SIGKILL)
print("child", code, flush=True)

signal.signal(signal.SIGALRM, lambda *_: queue.put("in a handler"))
with fresh_id._lock, app._lock:
    signal.raise_signal(signal.SIGALRM)
print("handler", queue.stats().length, flush=True)
os._exit(0)
"""


def test_a_forked_child_and_a_signal_handler_put_whoever_has_the_locks() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=2 * PATIENCE, check=False
    )
    assert done.stdout.splitlines() == ["child 0", "handler 1"], done.stderr
