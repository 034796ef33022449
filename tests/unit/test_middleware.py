from collections.abc import Callable
from typing import Any

import pytest

from lowq.errors import LowqError
from lowq.middleware import Middleware, wrap

Next = Callable[[], Any]


class Recorder:
    """What happened, in order."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def around(self, name: str) -> Middleware:
        def middleware(worker: Any, batch: Any, call_next: Next) -> None:
            self.events.append(f"{name} in")
            try:
                call_next()
            finally:
                self.events.append(f"{name} out")

        return middleware

    def inner(self, batch: Any) -> None:
        self.events.append(f"performed {batch}")


def veto(worker: Any, batch: Any, call_next: Next) -> None:
    """Returns without a word."""


def twice(worker: Any, batch: Any, call_next: Next) -> None:
    call_next()
    call_next()


def test_without_middlewares_nothing_is_in_between() -> None:
    inner = Recorder().inner
    assert wrap([], None, inner) == inner


def test_the_first_is_outermost() -> None:
    recorder = Recorder()
    wrap([recorder.around("a"), recorder.around("b")], None, recorder.inner)("batch")
    assert recorder.events == ["a in", "b in", "performed batch", "b out", "a out"]


def test_each_gets_the_worker_and_the_batch_itself() -> None:
    batch: dict[str, list[int]] = {"1": [7]}
    got: list[Any] = []

    def look(worker: Any, given: Any, call_next: Next) -> None:
        got.extend([worker, given])
        given["2"] = [8]
        call_next()

    inner: list[Any] = []
    wrap([look, look], "the worker", inner.append)(batch)
    assert got == ["the worker", batch, "the worker", batch]
    assert got[1] is got[3] is inner[0] is batch
    assert inner == [{"1": [7], "2": [8]}]


def test_one_that_does_not_call_the_next_fails_the_batch_by_its_name() -> None:
    recorder = Recorder()
    with pytest.raises(LowqError, match=r"middleware veto returned without call_next\(\) and without raising"):
        wrap([recorder.around("a"), veto, recorder.around("b")], None, recorder.inner)("batch")
    assert recorder.events == ["a in", "a out"]


def test_one_that_raises_instead_fails_the_batch_with_its_own_error() -> None:
    def refuse(worker: Any, batch: Any, call_next: Next) -> None:
        raise PermissionError("closed on Sundays")

    recorder = Recorder()
    with pytest.raises(PermissionError, match="closed on Sundays"):
        wrap([recorder.around("a"), refuse], None, recorder.inner)("batch")
    assert recorder.events == ["a in", "a out"]


def test_an_error_goes_out_through_all_of_them() -> None:
    recorder = Recorder()

    def fail(batch: Any) -> None:
        raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        wrap([recorder.around("a"), recorder.around("b")], None, fail)("batch")
    assert recorder.events == ["a in", "b in", "b out", "a out"]


def test_an_outer_one_may_handle_the_error_of_an_inner() -> None:
    def forgive(worker: Any, batch: Any, call_next: Next) -> None:
        with pytest.raises(ZeroDivisionError):
            call_next()

    def fail(batch: Any) -> None:
        raise ZeroDivisionError

    wrap([forgive], None, fail)("batch")


def test_to_call_the_next_twice_is_an_error_as_the_batch_would_be_performed_twice() -> None:
    recorder = Recorder()
    with pytest.raises(LowqError, match=r"middleware twice called call_next\(\) twice"):
        wrap([twice], None, recorder.inner)("batch")
    assert recorder.events == ["performed batch"]


def test_each_batch_counts_anew_and_changes_to_the_list_afterwards_do_not() -> None:
    recorder = Recorder()
    middlewares = [recorder.around("a")]
    call = wrap(middlewares, None, recorder.inner)
    middlewares.append(veto)
    call("one")
    call("two")
    assert recorder.events == ["a in", "performed one", "a out", "a in", "performed two", "a out"]


def test_a_callable_object_is_a_middleware_too() -> None:
    class Veto:
        def __call__(self, worker: Any, batch: Any, call_next: Next) -> None: ...

        def __repr__(self) -> str:
            return "<the veto>"

    with pytest.raises(LowqError, match="middleware <the veto> returned"):
        wrap([Veto()], None, print)("batch")
