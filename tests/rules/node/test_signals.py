"""What signals and other threads ask of the thread in `Node.run`, and what becomes of signals around an exec."""

import os
import signal
import threading
from collections.abc import Iterator, Sequence

import pytest

from lowq.node.signals import HeldSignals, Request, Signals

#: What HUP, TSTP, TTIN and USR2 do to a process that has no handler of them would end or stop the tests.
HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGTSTP, signal.SIGTTIN, signal.SIGUSR2, signal.SIGHUP)


@pytest.fixture
def stopping() -> threading.Event:
    return threading.Event()


@pytest.fixture
def signals(stopping: threading.Event) -> Iterator[Signals]:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup make test` has it ignored
    made = Signals(stopping.is_set, lambda: True)
    made.install()
    yield made
    made.restore(block=False)
    signal.signal(signal.SIGHUP, before)


def received(signals: Signals) -> list[Request]:
    """What has come; nothing more is to come."""
    found = []
    while some := signals.wait(0.0):
        found += some
    return found


def test_a_full_pipe_keeps_nobody(signals: Signals) -> None:
    for _ in range(70_000):
        signals.wake(Request.DUMP)
    assert set(received(signals)) == {Request.DUMP}


def test_an_int_counts_as_the_second_when_the_node_stops_already(signals: Signals, stopping: threading.Event) -> None:
    stopping.set()
    signal.raise_signal(signal.SIGTERM)
    assert not signals.cut_short
    signal.raise_signal(signal.SIGINT)
    assert signals.cut_short


def test_a_hup_of_a_terminal_that_was_closed_stops(signals: Signals) -> None:
    signal.raise_signal(signal.SIGHUP)
    assert received(signals) == [Request.STOP]
    assert signals.stop_requested


def test_what_was_there_before_is_there_after() -> None:
    before = {number: signal.getsignal(number) for number in HANDLED}
    wakeup_fd = signal.set_wakeup_fd(-1)
    signals = Signals(lambda: False, lambda: False)
    signals.install()
    assert all(signal.getsignal(number) != handler for number, handler in before.items())
    signals.restore(block=False)
    assert {number: signal.getsignal(number) for number in HANDLED} == before
    assert signal.set_wakeup_fd(wakeup_fd) == -1


def test_another_thread_than_the_main_one_installs_nothing() -> None:
    before = {number: signal.getsignal(number) for number in HANDLED}
    signals = Signals(lambda: False, lambda: False)

    def both() -> None:
        signals.install()
        signals.restore(block=False)

    thread = threading.Thread(target=both)
    thread.start()
    thread.join()
    assert {number: signal.getsignal(number) for number in HANDLED} == before


def test_a_signal_to_a_forked_child_ends_the_child_and_not_the_node(signals: Signals) -> None:
    child = os.fork()
    if child == 0:
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
    assert received(signals) == []
    assert not signals.stop_requested


def come_to_new_code(*, while_it_loads: Sequence[signal.Signals] = ()) -> list[Request]:
    """What new code gets of the signals before its node runs. All handlers are those of before then."""
    before = {number: signal.getsignal(number) for number in HANDLED}
    held = HeldSignals(stops=True)
    try:
        for number in while_it_loads:
            signal.raise_signal(number)
        new = Signals(lambda: False, lambda: False, held)
        new.install()
        try:
            return received(new)
        finally:
            new.restore(block=False)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_signals_while_code_loads_come_to_its_node_in_order() -> None:
    numbers = (signal.SIGTTIN, signal.SIGHUP, signal.SIGTSTP, signal.SIGUSR2, signal.SIGTERM)
    assert come_to_new_code(while_it_loads=numbers) == [
        Request.DUMP, Request.RELOAD, Request.QUIET, Request.DRAIN, Request.STOP,
    ]  # fmt: skip


def test_signals_around_an_exec_wait_for_the_new_code() -> None:
    """Those that come between `restore` and the exec are blocked, and come when the new code installs its handlers."""
    old = Signals(lambda: False, lambda: False)
    old.install()
    old.restore(block=True)
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)  # other threads of the tests don't block it
    assert come_to_new_code() == [Request.STOP]


def test_a_stop_that_came_too_late_for_this_code_is_the_new_codes() -> None:
    old = Signals(lambda: False, lambda: False)
    old.install()
    signal.raise_signal(signal.SIGTERM)
    old.restore(block=True)
    assert come_to_new_code() == [Request.STOP]
