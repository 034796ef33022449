"""Subscriptions in signal handlers."""

import subprocess
import sys

import pytest

from tests.waiting import PATIENCE

SCRIPT = """
import signal, sys
from lowq.store.cluster_pubsub import ClusterSubscription, Nodes
from lowq.store.pubsub import ServerSubscription

def nothing(*args):
    return None

made = {
    "server": lambda: ServerSubscription(nothing, nothing),
    "cluster": lambda: ClusterSubscription(Nodes(nothing, nothing, nothing, nothing, nothing)),
}[sys.argv[1]]()
strikes = 0

class Name(str):
    def __hash__(self):  # whoever keeps it asks for it, also in the midst of a change
        signal.raise_signal(signal.SIGUSR1)
        return super().__hash__()

def on_signal(*_):
    global strikes
    strikes += 1
    made.add(["in a handler"])
    made.remove(["in a handler"])
    if strikes == 10:
        made.close()

signal.signal(signal.SIGUSR1, on_signal)
while strikes < 10:
    made.add([Name("a")])
    made.remove([Name("a")])
print("done")
"""


@pytest.mark.parametrize("kind", ["server", "cluster"])
def test_a_signal_handler_may_change_what_is_being_changed(kind: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, kind], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.stdout == "done\n", done.stderr
