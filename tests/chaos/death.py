"""Ends this process at one exact moment of a batch's life: the n-th time that it comes there.

``CHAOS_DIE=ack_and_take:sent:17`` in the environment of the application under test:

==========  =========================================================================================
moment      of a script's call, for example ``ack_and_take:sent``; or of a perform: ``perform:begin``
==========  =========================================================================================
unsent      before the call is sent
sent        after Redis has executed it, before any of the reply is read
answered    after its reply was read, before anything is made of it
begin       in the middle of perform
end         after perform, before its outcome is told
==========  =========================================================================================
"""

import os
import re
import selectors
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import redis.connection

from lowq.store.calls import load_scripts
from tests.history import History

_EVALSHA = re.compile(rb"EVALSHA\r\n\$40\r\n([0-9a-f]{40})")

#: script -> the moments that a node can die at. Those of a batch's life, and of a lease's.
BOUNDARIES = {
    **dict.fromkeys(
        ("ack_and_take", "fail", "release", "acquire", "renew", "surrender", "heartbeat"),
        ("unsent", "sent", "answered"),
    ),
    "perform": ("begin", "end"),
}


class Death:
    """Counts down to the moment, and kills."""

    def __init__(self, script: str, moment: str, times: int) -> None:
        self._script = script
        self._moment = moment
        self._left = times
        self._lock = threading.Lock()

    def at(self, script: str, moment: str, before: Callable[[], object] = lambda: None) -> None:
        """The process is at that moment; ``before`` it dies there, that is still done."""
        if (script, moment) != (self._script, self._moment):
            return
        with self._lock:  # for ever, when it is the time: no other thread counts on
            self._left -= 1
            if self._left == 0:
                before()
                os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(10)


def arm(specification: str, history: History) -> None:
    """Makes this process die as it is written there; '' doesn't."""
    if not specification:
        return
    script, moment, times = specification.split(":")
    death = Death(script, moment, int(times))
    if script == "perform":
        _wrap_performing(death, history)
    else:
        _wrap_connections(death)


def _wrap_performing(death: Death, history: History) -> None:
    performing = history.performing

    @contextmanager
    def dying(shard: int, fence: int, jobs: Mapping[str, Sequence[int]], **options: Any) -> Iterator[str]:
        with performing(shard, fence, jobs, **options) as name:
            death.at("perform", "begin")
            yield name
        death.at("perform", "end")

    history.performing = dying  # type: ignore[method-assign]  # only in this process


def _wrap_connections(death: Death) -> None:
    names = {item.for_server(shebang=True)[1]: name for name, item in load_scripts().items()}
    kind: Any = redis.connection.AbstractConnection
    send, read = kind.send_packed_command, kind.read_response
    #: Calls on their way, of each connection; redis-py's connections can't be subclassed from here, only changed.
    asked: dict[int, deque[str]] = {}

    def send_packed_command(self: Any, command: Any, check_health: bool = True) -> None:
        data = b"".join(command) if isinstance(command, list) else bytes(command)
        scripts = [names.get(sha, "") for sha in _EVALSHA.findall(data)]
        for script in scripts:
            death.at(script, "unsent")
        send(self, command, check_health=check_health)
        if scripts:
            asked[id(self)] = deque(scripts)
        for script in scripts:
            death.at(script, "sent", lambda: _executed(self))

    def read_response(self: Any, *args: Any, **kwargs: Any) -> Any:
        waiting = asked.get(id(self))
        try:
            return read(self, *args, **kwargs)
        finally:
            if waiting:
                death.at(waiting.popleft(), "answered")

    kind.send_packed_command, kind.read_response = send_packed_command, read_response


def _executed(connection: Any) -> None:
    """Waits until Redis has answered: then it has executed all that came in this write, or will without us."""
    with selectors.PollSelector() as selector:
        selector.register(connection._sock, selectors.EVENT_READ)
        selector.select(2.0)
    time.sleep(0.002)
