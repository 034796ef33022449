"""Subscriptions in signal handlers."""

import signal
from collections.abc import Iterator

import pytest

from lowq.store import Client


@pytest.mark.parametrize("kind", ["redis", "redis+cluster"])
def test_a_signal_handler_may_change_what_is_being_changed(kind: str) -> None:
    subscription = Client(f"{kind}://127.0.0.1:1", size=1, timeout=1.0).subscribe()
    strikes = 0

    def names() -> Iterator[str]:
        yield "a"
        signal.raise_signal(signal.SIGUSR1)  # in the midst of a change
        yield "b"

    def on_signal(*_: object) -> None:
        nonlocal strikes
        strikes += 1
        subscription.add(["in a handler"])
        subscription.remove(["in a handler"])
        if strikes == 10:
            subscription.close()

    before = signal.signal(signal.SIGUSR1, on_signal)
    try:
        while strikes < 10:
            subscription.add(names())
            subscription.remove(names())
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert subscription.get(0.0) is None
