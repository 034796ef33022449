"""Subscriptions in signal handlers."""

import signal

import pytest

from lowq.store import Client


@pytest.mark.parametrize("kind", ["redis", "redis+cluster"])
def test_a_signal_handler_may_change_what_is_being_changed(kind: str) -> None:
    subscription = Client(f"{kind}://127.0.0.1:1", size=1, timeout=1.0).subscribe()
    strikes = 0

    class Name(str):
        __slots__ = ()

        def __hash__(self) -> int:  # whoever keeps it asks for it, also in the midst of a change
            signal.raise_signal(signal.SIGUSR1)
            return super().__hash__()

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
            subscription.add([Name("a")])
            subscription.remove([Name("a")])
    finally:
        signal.signal(signal.SIGUSR1, before)
