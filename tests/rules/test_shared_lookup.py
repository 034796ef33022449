"""A lookup for all coroutines that want it at the same time."""

import asyncio
import contextvars
import gc
import threading
import weakref
from typing import Any

import pytest

from lowq.coroutines import in_own_thread
from lowq.push import target
from lowq.push.target import SharedLookup
from tests.waiting import NEVER, PATIENCE, auntil, until

setting: contextvars.ContextVar[str] = contextvars.ContextVar("setting", default="unset")


class LookedUp:
    """What is looked up: it counts how often, and waits until it may go on."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[str] = []
        self.goes_on = threading.Event()
        self.error = error
        self.found: str | None = None
        self.shared = SharedLookup()

    def look_up(self) -> str:
        self.calls.append(setting.get())
        assert self.goes_on.wait(PATIENCE)
        if self.error is not None:
            raise self.error
        self.found = "found"
        return self.found

    def is_found(self) -> bool:
        return self.found is not None

    async def get(self, timeout: float = NEVER) -> str:
        return await self.shared.get(lambda: self.found, self.look_up, timeout)


def test_it_runs_once_for_all_who_wait_and_in_nobodys_context() -> None:
    lookup = LookedUp()

    async def main() -> list[str]:
        setting.set("of a caller")
        tasks = [asyncio.create_task(lookup.get()) for _ in range(5)]
        await auntil(lambda: lookup.calls, "it runs")
        assert lookup.shared.is_under_way()
        lookup.goes_on.set()
        found = await asyncio.gather(*tasks)
        assert not lookup.shared.is_under_way()
        return found

    assert asyncio.run(main()) == ["found"] * 5
    assert lookup.calls == ["unset"]


def test_those_who_wait_when_it_fails_share_its_error_and_whoever_comes_later_tries_again() -> None:
    lookup = LookedUp(ConnectionError("away"))
    lookup.error.__cause__ = OSError("refused")  # type: ignore[union-attr]  # it was given

    async def main() -> None:
        waiting = [asyncio.create_task(lookup.get()) for _ in range(3)]
        await auntil(lambda: lookup.calls, "it runs")
        lookup.goes_on.set()
        results: list[Any] = await asyncio.gather(*waiting, return_exceptions=True)
        assert [str(result) for result in results] == ["away"] * 3
        assert [str(result.__cause__) for result in results] == ["refused"] * 3
        assert len(set(map(id, results))) == 3  # each has its own, with its own traceback
        assert len(lookup.calls) == 1
        again = [asyncio.create_task(lookup.get()) for _ in range(2)]
        results = await asyncio.gather(*again, return_exceptions=True)
        assert [str(result) for result in results] == ["away"] * 2
        assert len(lookup.calls) == 2
        lookup.error = None
        assert await lookup.get() == "found"

    asyncio.run(main())
    assert len(lookup.calls) == 3


def test_who_comes_when_the_result_is_gone_again_looks_it_up_anew_however_many_come() -> None:
    """One comes in each turn of the loop, so that there is always one who has not gone on yet."""
    lookup = LookedUp()
    lookup.goes_on.set()

    async def main() -> list[str]:
        tasks: list[asyncio.Task[str]] = []
        for calls in (1, 2):
            lookup.found, left = None, 100
            while left:
                tasks.append(asyncio.create_task(lookup.get()))
                await asyncio.sleep(0)
                left -= lookup.is_found()
            assert len(lookup.calls) == calls
        return await asyncio.gather(*tasks)

    assert set(asyncio.run(main())) == {"found"}
    assert len(lookup.calls) == 2


def test_who_waits_for_a_lookup_that_hangs_leaves_in_time_and_the_next_one_makes_it_anew() -> None:
    lookup = LookedUp()

    async def main() -> None:
        hanging = [asyncio.create_task(lookup.get(0.01)) for _ in range(2)]
        for result in await asyncio.gather(*hanging, return_exceptions=True):
            assert isinstance(result, TimeoutError)
        assert not lookup.shared.is_under_way()
        again = asyncio.create_task(lookup.get())
        await auntil(lambda: len(lookup.calls) >= 2, "it runs anew")
        lookup.goes_on.set()
        assert await again == "found"

    asyncio.run(main())


def test_they_go_on_in_the_order_in_which_they_came() -> None:
    lookup = LookedUp()

    async def main() -> list[int]:
        went_on: list[int] = []

        async def get(number: int) -> None:
            await lookup.get()
            went_on.append(number)

        tasks = [asyncio.create_task(get(number)) for number in range(5)]
        await auntil(lambda: lookup.calls, "it runs")
        tasks[1].cancel()
        lookup.goes_on.set()
        while lookup.shared.is_under_way():  # and one comes in each turn of the loop
            if len(tasks) < 50:
                tasks.append(asyncio.create_task(get(len(tasks))))
            await asyncio.sleep(0)
        await asyncio.gather(*tasks, return_exceptions=True)
        return went_on

    went_on = asyncio.run(main())
    assert went_on == sorted(went_on)
    assert 1 not in went_on


def test_who_finds_the_result_though_the_lookup_hangs_has_it() -> None:
    """Somebody else has found it."""
    lookup = LookedUp()

    async def main() -> str:
        hanging = asyncio.create_task(lookup.get(0.05))
        await asyncio.sleep(0)  # it has begun to wait; its time is not over, as the loop has not turned again
        lookup.found = "found otherwise"
        found = await hanging
        lookup.goes_on.set()
        return found

    assert asyncio.run(main()) == "found otherwise"


def test_a_loop_that_is_closed_while_it_runs_is_forgotten() -> None:
    lookup = LookedUp()
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)  # asyncio says of the task that it was pending
    task = loop.create_task(lookup.get())

    async def begun() -> None:
        await auntil(lambda: lookup.calls, "it runs")

    loop.run_until_complete(begun())
    loop.close()
    reference = weakref.ref(loop)
    del loop, task
    lookup.goes_on.set()
    assert asyncio.run(lookup.get()) == "found"
    until(lambda: gc.collect() or reference() is None, "it is gone")


class Interrupted(Exception):
    """What a signal handler raises."""


@pytest.mark.parametrize("runs", [False, True], ids=["before its thread runs", "when it runs"])
def test_a_signal_handler_that_raises_while_the_lookup_begins_keeps_nobody_waiting(
    runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lookup = LookedUp()

    async def interrupted(work: Any) -> None:
        if runs:
            asyncio.create_task(in_own_thread(work))  # noqa: RUF006 - its result is lost
            await asyncio.sleep(0)
        raise Interrupted

    async def main() -> None:
        with monkeypatch.context() as patched:
            patched.setattr(target, "in_own_thread", interrupted)
            with pytest.raises(Interrupted):
                await lookup.get()
        lookup.goes_on.set()
        assert await lookup.get() == "found"
        assert not lookup.shared.is_under_way()

    asyncio.run(main())
