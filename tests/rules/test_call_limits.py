"""Limits around a call, in scripts and handlers, as several applications that share a store see them."""

import asyncio
import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from contextvars import Context
from datetime import timedelta
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

import lowq
from lowq import call_limit, testing
from lowq.clock import now as clock_now
from lowq.shards import call_limits
from lowq.shards.call_limits import Caller, CallLimits
from lowq.shards.wakeups import Listener
from lowq.store import Client
from lowq.store.keys import limit_key
from lowq.store.registry import TakePermits
from tests.redis_server import RedisServer
from tests.rows import case
from tests.waiting import NEVER, PATIENCE, auntil, until

MakeApp = Callable[[], lowq.Lowq]


@pytest.fixture
def make_app(store_url: str) -> Iterator[MakeApp]:
    """Makes applications on one store: each is as another process."""
    with ExitStack() as stack:

        def make() -> lowq.Lowq:
            app = lowq.Lowq(redis_url=store_url, push_timeout=PATIENCE, lease_ttl=NEVER)
            stack.callback(app.close)
            return app

        yield make


@pytest.fixture(autouse=True)
def redis_may_stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also before it answers a caller with a short timeout."""
    monkeypatch.setattr(call_limit, "ANSWER_SECONDS", PATIENCE)


class Blocks:
    """Threads that are in a block of a limit, or wait for it, until they are told to leave it."""

    def __init__(self) -> None:
        self.inside: list[str] = []
        self.outcomes: dict[str, BaseException] = {}
        self._leave: dict[str, threading.Event] = {}
        self._threads: dict[str, threading.Thread] = {}

    def enter(self, limit: lowq.Limit, name: str) -> None:
        self._leave[name] = threading.Event()

        def run() -> None:
            try:
                with limit:
                    self.inside.append(name)
                    self._leave[name].wait(PATIENCE)
                    self.inside.remove(name)
            except BaseException as error:
                self.outcomes[name] = error

        self._threads[name] = threading.Thread(target=run, daemon=True)
        self._threads[name].start()

    def leave(self, name: str) -> None:
        self._leave[name].set()
        self._threads[name].join(PATIENCE)


def test_so_many_are_in_the_block_over_all_processes_and_the_next_in_line_follows(make_app: MakeApp) -> None:
    limits = [make_app().limit("erp", lowq.Concurrency(2)) for _ in range(3)]
    blocks = Blocks()
    for number, limit in enumerate(limits[:2]):
        blocks.enter(limit, str(number))
    until(lambda: len(blocks.inside) == 2)
    blocks.enter(limits[2], "2")
    with pytest.raises(lowq.LimitTimeout), make_app().limit("erp", lowq.Concurrency(2), timeout=0):
        pass
    assert sorted(blocks.inside) == ["0", "1"]
    blocks.leave("0")
    until(lambda: "2" in blocks.inside)
    blocks.leave("1")
    blocks.leave("2")


def test_a_permit_is_returned_however_the_block_ends(make_app: MakeApp) -> None:
    app, other = make_app(), make_app()
    limit = app.limit("erp", lowq.Concurrency(1))
    for error in (ValueError, KeyboardInterrupt, SystemExit, lowq.TimeLimitExceeded, asyncio.CancelledError):
        with case(error):
            with pytest.raises(error), limit:
                raise error
            with other.limit("erp", lowq.Concurrency(1), timeout=PATIENCE):
                pass


def test_a_signal_that_strikes_while_a_block_ends_keeps_no_permit(make_app: MakeApp) -> None:
    limit = make_app().limit("erp", lowq.Concurrency(1), timeout=PATIENCE)
    # In a thread of its own: one in which something is raised as a `with` ends handles what that suppressed for ever.
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(strike_each_line_of_the_end, limit).result() > 5


def strike_each_line_of_the_end(limit: lowq.Limit) -> int:
    """Interrupts the end of a block at one line of lowq after the other; returns how many there are."""
    folder = str(Path(lowq.__file__).parent)
    # `leave` has the lock: no signal strikes between the end of that block and the release, nor between the two when it
    # is acquired, and a tracer would.
    beside = ("__exit__", "leave", "__enter__")
    steps = 0
    while True:
        left = steps

        def strike(frame: FrameType, event: str, _argument: object) -> Any:
            nonlocal left
            code = frame.f_code
            if event == "line" and code.co_name not in beside and code.co_filename.startswith(folder):
                left -= 1
                if left < 0:
                    raise KeyboardInterrupt  # and nothing is traced from here on
            return strike

        with case(steps):
            limit.__enter__()  # the permit is back
            before = sys.gettrace()
            sys.settrace(strike)
            try:
                limit.__exit__()
                return steps
            except KeyboardInterrupt:
                steps += 1
            finally:
                sys.settrace(before)


def test_a_block_that_ends_in_another_context_than_it_began_in_keeps_no_permit(make_app: MakeApp) -> None:
    limit = make_app().limit("erp", lowq.Concurrency(2), timeout=0)
    Context().run(limit.__enter__)
    with limit:
        Context().run(limit.__exit__)
        with limit:
            pass
    with limit, limit:
        pass


def test_who_waits_first_as_the_node_stops_is_sent_away_too(make_app: MakeApp) -> None:
    app, limits = make_app(), lowq.Concurrency(1)
    with make_app().limit("erp", limits):
        app.end_waits_by(time.monotonic())
        with pytest.raises(lowq.LimitTimeout, match="the node stops"):
            app.limit("erp", limits, timeout=PATIENCE).__enter__()


def test_a_rate_holds_over_all_processes_and_the_reply_says_when_there_is_more(make_app: MakeApp) -> None:
    rate = lowq.Rate(3, per=3600)
    for _ in range(3):
        with make_app().limit("erp", rate, timeout=PATIENCE):
            pass
    with pytest.raises(lowq.LimitTimeout, match="no permit of the limit 'erp' within 0 s"):
        make_app().limit("erp", rate, timeout=0).__enter__()
    for name, limit in (("other", rate), ("erp", lowq.Rate(3, per=60))):
        with case(name, limit), make_app().limit(name, limit, timeout=PATIENCE):
            pass


def test_those_who_wait_for_a_rate_go_on_when_its_time_has_passed(make_app: MakeApp) -> None:
    apps = [make_app(), make_app()]
    moments: list[float] = []

    def call(app: lowq.Lowq) -> None:
        for _ in range(5):
            with app.limit("erp", lowq.Rate(4, per=0.2, strict=True)):
                moments.append(time.monotonic())

    threads = [threading.Thread(target=call, args=(app,)) for app in apps for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    moments.sort()
    assert len(moments) == 20
    # Measured in the block, however busy the machine is: see `lowq.Rate.strict`.
    assert all(later - earlier > 0.2 for earlier, later in zip(moments, moments[4:], strict=False))


def test_a_strict_rate_counts_until_its_time_after_the_end_of_the_block(make_app: MakeApp) -> None:
    limit, blocks = lowq.Rate(1, per=0.05, strict=True), Blocks()
    blocks.enter(make_app().limit("erp", limit), "first")
    until(lambda: blocks.inside)
    with pytest.raises(lowq.LimitTimeout):  # though its time has passed long since
        make_app().limit("erp", limit, timeout=0.2).__enter__()
    ended_after = time.monotonic()
    blocks.leave("first")
    with make_app().limit("erp", limit):
        assert time.monotonic() - ended_after > 0.05


def test_several_rules_hold_together(make_app: MakeApp) -> None:
    app, other = make_app(), make_app()
    limit, blocks = app.limit("erp", lowq.Concurrency(1), lowq.Rate(2, per=3600)), Blocks()
    blocks.enter(limit, "first")
    until(lambda: blocks.inside)
    with pytest.raises(lowq.LimitTimeout):
        other.limit("erp", *limit.rules, timeout=0).__enter__()
    blocks.leave("first")
    with other.limit("erp", *limit.rules, timeout=PATIENCE):
        pass
    with pytest.raises(lowq.LimitTimeout):
        app.limit("erp", timeout=0).__enter__()


def test_coroutines_wait_without_a_thread_and_a_cancelled_one_keeps_nothing(make_app: MakeApp) -> None:
    app, rule = make_app(), lowq.Concurrency(2)
    limit, brief = app.limit("erp", rule), app.limit("erp", rule, timeout=0.05)
    other = make_app().limit("erp", rule, timeout=PATIENCE)

    async def main() -> None:
        inside, goes_on = list[int](), asyncio.Event()

        async def call(number: int) -> None:
            async with limit:
                inside.append(number)
                await goes_on.wait()

        tasks = [asyncio.create_task(call(number)) for number in range(50)]
        await auntil(lambda: len(inside) == 2, "two that are in")
        threads = threading.active_count()
        with pytest.raises(lowq.LimitTimeout):
            async with brief:
                pass
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01), limit:
                pass
        assert inside == [0, 1]
        assert threading.active_count() <= threads  # those of other tests may end
        for task in tasks[:10]:  # two that are in, and others that wait
            task.cancel()
        await auntil(lambda: len(inside) == 4, "the next in line")
        goes_on.set()
        await asyncio.gather(*tasks[10:])
        assert inside == [0, 1, *range(10, 50)]
        async with other, other:  # all are returned
            pass

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


@pytest.mark.filterwarnings("ignore")  # of tasks that were destroyed
def test_each_of_many_who_leave_the_line_is_found_without_looking_at_the_others(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit, compared = make_app().limit("erp", lowq.Concurrency(1)), list[Any]()

    def compare(caller: Caller, other: object) -> bool:
        compared.append(caller)
        return caller is other

    monkeypatch.setattr(Caller, "__eq__", compare)

    async def wait_and_leave() -> None:
        async with limit:
            tasks = [asyncio.create_task(limit.__aenter__()) for _ in range(30)]
            await auntil(lambda: len(limit._owner.call_limits.find("erp", limit.rules).line) == 30, "the line")  # type: ignore[union-attr]
            for task in (*tasks[::2], *tasks[::-2]):
                task.cancel()
            await asyncio.wait(tasks)
            assert all(task.cancelled() for task in tasks)

    asyncio.run(wait_and_leave())
    assert compared == []


def test_those_who_waited_in_a_loop_that_was_closed_hold_nobody_up(make_app: MakeApp) -> None:
    limit, loop = make_app().limit("erp", lowq.Concurrency(1)), asyncio.new_event_loop()
    tasks = []

    async def wait_in_line() -> None:
        async with limit:
            pass

    with limit:
        tasks += [loop.create_task(wait_in_line()) for _ in range(1000)]
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
    for _ in range(2):
        with make_app().limit("erp", lowq.Concurrency(1), timeout=PATIENCE):
            pass
    assert not any(task.done() for task in tasks)
    del tasks[:]
    gc.collect()  # or asyncio would say that they were pending in the middle of another test


def test_a_permit_that_came_while_the_machine_stood_still_is_no_refusal(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    stalls = iter([0.05] * 10)  # longer than permits of a rate are kept

    def clock() -> float:
        time.sleep(next(stalls, 0))
        return clock_now()

    monkeypatch.setattr(call_limits, "clock_now", clock)
    with make_app().limit("erp", lowq.Rate(100), lowq.Concurrency(5), timeout=0):
        pass


def test_everybody_waits_while_a_limit_is_deferred(make_app: MakeApp) -> None:
    for rules in ([lowq.Rate(100)], [lowq.Concurrency(5)], [lowq.Rate(100), lowq.Concurrency(5)]):
        with case(rules):
            app, other = make_app(), make_app()
            limit, theirs = app.limit("erp", *rules), other.limit("erp", *rules, timeout=0)
            for each in (limit, theirs):
                with each:  # so that one of a concurrency is there to be used again
                    pass
            limit.defer(timedelta(hours=1))

            def is_refused(each: lowq.Limit) -> bool:
                try:
                    with each:
                        return False
                except lowq.LimitTimeout:
                    return True

            assert is_refused(app.limit("erp", timeout=0)), "at once where it was said"
            until(lambda is_refused=is_refused, theirs=theirs: is_refused(theirs))  # type: ignore[misc]
            asyncio.run(theirs.adefer(0))
            for each in (app.limit("erp", timeout=PATIENCE), other.limit("erp", timeout=PATIENCE)):
                with each:
                    pass


def test_who_learns_late_that_a_limit_was_deferred_knows_that_it_was_called_off(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, other = make_app(), make_app()
    run_many, wake, told, is_called_off = Client.run_many, CallLimits.wake, list[str](), threading.Event()

    def answer_late(client: Client, calls: Sequence[Any], **options: Any) -> list[Any]:
        replies = run_many(client, calls, **options)
        if client is app.client and isinstance(calls[0], TakePermits) and not is_called_off.is_set():
            is_called_off.set()
            told.clear()
            other.limit("erp").defer(0)
            until(lambda: told, "the message, or that it listens since")
        return replies

    def note(limits: CallLimits, channel: str, message: str) -> None:
        wake(limits, channel, message)
        if limits.client is app.client:
            told.append(message)

    monkeypatch.setattr(Client, "run_many", answer_late)
    monkeypatch.setattr(CallLimits, "wake", note)
    other.limit("erp", lowq.Concurrency(5)).defer(3600)
    with app.limit("erp", lowq.Concurrency(5), timeout=PATIENCE):
        assert is_called_off.is_set()


def test_a_name_stands_for_what_was_declared(make_app: MakeApp, monkeypatch: pytest.MonkeyPatch) -> None:
    app = make_app()
    limit = app.limit("erp", lowq.Rate(5), lowq.Concurrency(3, key="licence"))
    assert app.limit("erp").rules == limit.rules == (lowq.Rate(5), lowq.Concurrency(3, key="licence"))

    @app.worker(limit=lowq.Concurrency(1, key="crm"))
    def orders(payloads_by_id: dict[str, list[Any]]) -> None:
        pass

    assert app.limit("crm").rules == (lowq.Concurrency(1, key="crm"),)

    @app.worker(limit=[lowq.Rate(9, key="crm"), lowq.Concurrency(2, key="crm")])
    def invoices(payloads_by_id: dict[str, list[Any]]) -> None:
        pass

    assert set(app.limit("crm").rules) == {lowq.Concurrency(1, key="crm"), lowq.Rate(9, key="crm")}
    with limit:
        keys = {limit_key("lowq", name) for name in ("rate:1.0:erp", "concurrency:licence")}
        assert all(app.client.command("EXISTS", key) for key in keys)
    monkeypatch.setattr(lowq.Limit, "of_names", app)
    lowq.Limit.defer("erp", 60)
    with pytest.raises(lowq.LimitTimeout):
        app.limit("erp", timeout=0).__enter__()


def test_names_that_are_asked_for_are_remembered_besides_very_many(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_limit, "MOST_NAMES", 3)
    app = make_app()
    app.limit("erp", lowq.Rate(5))
    for tenant in range(9):
        app.limit(f"api:{tenant}", lowq.Rate(1))
        assert app.limit("erp").rules == (lowq.Rate(5),)
    with pytest.raises(lowq.ConfigError):
        app.limit("api:0")


def test_people_see_all_limits_and_how_far_they_are_used(make_app: MakeApp) -> None:
    app, other, blocks = make_app(), make_app(), Blocks()

    @app.worker(limit=[lowq.Rate(7), lowq.Concurrency(5, key="crm")])
    def orders(payloads_by_id: dict[str, list[Any]]) -> None:
        pass

    orders.perform_async({"id": 1})
    for name, rule in (("erp", lowq.Concurrency(1)), ("mail", lowq.Rate(2, per=3600, strict=True))):
        blocks.enter(app.limit(name, rule), name)
    until(lambda: len(blocks.inside) == 2)
    blocks.enter(other.limit("erp", lowq.Concurrency(1)), "waits")
    app.limit("mail").defer(60)

    def shown() -> list[tuple[str | None, int, int]]:
        return [(state.limit.key, state.used, state.waiting) for state in app.limits()]

    until(lambda: shown() == [("crm", 0, 0), ("erp", 1, 1), ("orders", 0, 0), ("mail", 1, 0)])
    *_, mail = app.limits()
    assert mail.wait is not None
    assert 0 < mail.wait <= 60
    for name in ("erp", "mail", "waits"):
        until(lambda name=name: name in blocks.inside)  # type: ignore[misc]
        blocks.leave(name)


def test_what_makes_no_sense_is_refused_with_what_to_write(make_app: MakeApp) -> None:
    app = make_app()
    rate, unknown = lowq.Rate(5), r"no limit of that name was declared in this process \(those that were: 'known'\)"
    app.limit("known", rate)
    rows: list[tuple[Callable[[], object], str]] = [
        (lambda: app.limit("erp"), unknown),
        *((lambda name=name: app.limit(name, rate), "a name is a text") for name in ("", "a b", "{x}", 5, None)),
        *((lambda rule=rule: app.limit("erp", rule), "must be a lowq.Rate") for rule in (5, "5/s", None)),
        (lambda: app.limit("erp", rate, lowq.Rate(9)), "says twice the same"),
        (lambda: app.limit("erp", rate, lowq.Rate(9, key="erp")), "says twice the same"),
        *((lambda t=t: app.limit("erp", rate, timeout=t), "timeout=.* must be seconds") for t in (-1, "1", True)),
        *((lambda s=s: app.limit("known").defer(s), "from 0 to 31 days") for s in (-1, 1e9, "5", None, float("nan"))),
        (lambda: lowq.Rate(5, strict=1), "strict is True or False"),  # type: ignore[arg-type]
    ]
    for call, message in rows:
        with case(message), pytest.raises(lowq.ConfigError, match=message):
            call()


def test_a_store_that_fails_is_told_to_those_who_wait(make_app: MakeApp) -> None:
    app = make_app()
    app.client.command("SET", limit_key("lowq", "rate:1.0:erp"), "foreign")
    with pytest.raises(lowq.ScriptError), app.limit("erp", lowq.Rate(5)):
        pass


def test_an_unforeseen_error_is_told_to_those_who_wait_and_the_thread_goes_on(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for where in ("_send", "turn"):
        with case(where):
            app, blocks = make_app(), Blocks()
            limit = app.limit("erp", lowq.Concurrency(1))
            with limit, monkeypatch.context() as patch:
                blocks.enter(limit, "waits")
                until(lambda app=app, limit=limit: app.call_limits.find("erp", limit.rules).line)  # type: ignore[misc]

                def fail(*_: object, **__: object) -> None:
                    raise ZeroDivisionError("a bug")

                patch.setattr(CallLimits, where, fail)
                blocks.enter(limit, "comes")
                until(lambda blocks=blocks: len(blocks.outcomes) == 2)  # type: ignore[misc]
            for error in blocks.outcomes.values():
                assert isinstance(error, lowq.LowqError)
                assert "ZeroDivisionError('a bug')" in str(error)
                assert isinstance(error.__cause__, ZeroDivisionError)

            def is_entered(limit: lowq.Limit = limit) -> bool:
                try:
                    with limit:
                        return True
                except lowq.LowqError:  # the thread had failed before, and says it now
                    return False

            until(is_entered, "that it goes on")
    assert "ZeroDivisionError" in caplog.text


def test_a_block_that_would_wait_for_itself_is_refused(make_app: MakeApp) -> None:
    app = make_app()
    rows: list[tuple[tuple[Any, ...], str, tuple[Any, ...]]] = [
        ((lowq.Concurrency(1),), "erp", (lowq.Concurrency(1),)),
        ((lowq.Rate(5), lowq.Concurrency(1)), "erp", (lowq.Concurrency(1),)),
        ((lowq.Concurrency(1),), "other", (lowq.Concurrency(1, key="erp"),)),
        ((lowq.Rate(1, 0.05, strict=True),), "erp", (lowq.Rate(1, 0.05, strict=True),)),
    ]

    async def nested(outer: lowq.Limit, inner: lowq.Limit) -> None:
        async with outer, inner:
            pass

    async def in_another_task(outer: lowq.Limit, inner: lowq.Limit) -> None:
        async with outer:
            waits = asyncio.create_task(inner.__aenter__())
            await asyncio.sleep(0)
        await waits
        await inner.__aexit__()

    for rules, name, inner_rules in rows:
        with case(rules, name, inner_rules):
            outer, inner = app.limit("erp", *rules), app.limit(name, *inner_rules)
            with pytest.raises(lowq.ConfigError, match="it would wait for itself"), outer, inner:
                pass
            with pytest.raises(lowq.ConfigError, match="it would wait for itself"):
                asyncio.run(nested(outer, inner))
            with outer:
                pass
            asyncio.run(in_another_task(outer, inner))
    two, rate = app.limit("two", lowq.Concurrency(2)), app.limit("rate", lowq.Rate(1, per=0.01))
    with two, two, rate, rate:
        blocks = Blocks()
        blocks.enter(two, "of another thread")
    blocks.leave("of another thread")
    assert blocks.outcomes == {}


def test_a_with_that_would_block_an_event_loop_is_refused(make_app: MakeApp) -> None:
    limit = make_app().limit("erp", lowq.Concurrency(1))

    async def enter() -> None:
        with limit:
            pass

    with pytest.raises(lowq.ConfigError, match=r"lowq.limit\('erp'\): .* write async with"):
        asyncio.run(enter())


def test_without_redis_a_caller_learns_of_it_after_push_timeout() -> None:
    app = lowq.Lowq(redis_url="redis://127.0.0.1:1", push_timeout=0.2)
    with pytest.raises(lowq.RedisUnavailable), app.limit("erp", lowq.Rate(5)):
        pass
    app.close()


@pytest.mark.slow  # measures a time
@pytest.mark.parametrize("is_async", [False, True])
def test_a_redis_that_says_nothing_is_waited_for_as_long_as_by_a_push(is_async: bool) -> None:
    with RedisServer() as server, closing(lowq.Lowq(redis_url=server.url, push_timeout=0.5)) as app:
        limit = app.limit("erp", lowq.Rate(1, per=0.01))
        with limit:
            pass
        server.pause()

        def seconds() -> float:
            began = time.monotonic()
            with pytest.raises(lowq.RedisUnavailable):
                asyncio.run(limit.__aenter__()) if is_async else limit.__enter__()
            return time.monotonic() - began

        until(lambda: seconds() < 12, "a quick end: it takes 0.5 s, and where the call is repeated 15 s")
        server.cont()


def test_who_waits_behind_a_limit_of_which_redis_says_nothing_learns_of_it(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, send = threading.Event(), CallLimits._send

    def wait_and_send(*args: Any) -> int:
        answers.wait()
        return send(*args)

    with closing(lowq.Lowq(redis_url=store_url, push_timeout=0.1)) as app:
        blocks, first, second = Blocks(), app.limit("first", lowq.Rate(5)), app.limit("second", lowq.Rate(5))
        monkeypatch.setattr(CallLimits, "_send", wait_and_send)
        blocks.enter(first, "first")
        until(lambda: "first" in blocks.outcomes)
        blocks.enter(second, "second")  # nobody has asked for it
        until(lambda: "second" in blocks.outcomes)
        assert {type(error) for error in blocks.outcomes.values()} == {lowq.RedisUnavailable}
        answers.set()


def test_limits_that_were_not_used_for_long_are_forgotten_all_at_once(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, ignored, later = make_app(), list[set[str]](), NEVER + 1
    for name, rule in ("a", lowq.Rate(1)), ("b", lowq.Rate(1)), ("b", lowq.Rate(2)), ("c", lowq.Rate(1)):
        with app.limit(name, rule):
            pass
    now = SimpleNamespace(monotonic=lambda: time.monotonic() + later, sleep=time.sleep)
    ignore = Listener.ignore_permits

    def note_and_ignore(listener: Listener, limits: set[str]) -> None:
        ignored.append(limits)
        ignore(listener, limits)

    monkeypatch.setattr(Listener, "ignore_permits", note_and_ignore)
    with app.limit("c", lowq.Rate(2)):  # the same key is still listened to
        monkeypatch.setattr(call_limits, "time", now)
        with app.limit("d", lowq.Rate(1)):
            until(lambda: ignored, "those that are forgotten")
            assert {queue.queue for queue in app.call_limits.queues.values()} == {"c", "d"}
            assert len(app.call_limits.queues) == 2
    assert ignored == [{limit_key("lowq", f"rate:1.0:{name}") for name in "ab"}]
    app.close()


def test_tests_of_handlers_wait_for_nothing_and_need_no_redis() -> None:
    app = lowq.Lowq(redis_url="redis://127.0.0.1:1")
    performed = []

    @app.worker
    def orders(payloads_by_id: dict[str, list[Any]]) -> None:
        for _ in range(3):
            with app.limit("erp", lowq.Rate(1, per=3600)) as limit:
                limit.defer(3600)
                performed.append(payloads_by_id)

    with testing.execution(orders, {"1": [{}]}):
        orders().perform({"1": [{}]})
    with testing.embedded(orders):
        orders.perform_async({"id": 1})
        testing.drain(orders)
    assert len(performed) == 6


def test_an_application_that_is_closed_gives_back_what_it_has(make_app: MakeApp) -> None:
    app, blocks = make_app(), Blocks()
    limit = app.limit("erp", lowq.Concurrency(1))
    with limit:
        blocks.enter(limit, "waits")
        until(lambda: app.call_limits.find("erp", limit.rules).line)  # type: ignore[union-attr]
        app.close()
        until(lambda: "waits" in blocks.outcomes)
    assert "was closed" in str(blocks.outcomes["waits"])
    with make_app().limit("free", lowq.Concurrency(1), timeout=PATIENCE):
        pass
