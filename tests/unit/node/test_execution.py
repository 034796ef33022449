import itertools
import json
import logging
import math
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, cast

import pytest

import lowq
from lowq.broker.delivery import Failure, TakenJob, Undecodable
from lowq.broker.shard import Shard
from lowq.codec import MAX_TIME
from lowq.errors import LowqError, PushInterrupted, TimeLimitExceeded
from lowq.job import Job
from lowq.node import execution
from lowq.node.execution import Execution, current
from lowq.node.outcome import Outcome, bury_undecodable, decide, log_remarks, notify_worker, report, write_off
from lowq.node.time_limits import TimeLimits
from lowq.settings import Config
from lowq.store import Client
from tests.rows import case

BOOM = ValueError("boom")


class Handler:
    """A worker's instance that notes what it is told."""

    max_retry_count = 25

    def __init__(self, perform: Callable[[dict[str, list[Any]]], object] | None = None) -> None:
        self._perform = perform
        self.exhausted: list[Job] = []

    def perform(self, payloads_by_id: dict[str, list[Any]]) -> None:
        if self._perform is not None:
            self._perform(payloads_by_id)

    def retry_in(self, retry_count: int) -> float:
        return 100.0 + retry_count

    def retries_exhausted(self, jobs: list[Job]) -> None:
        self.exhausted += jobs


class Reports:
    """A shard that only notes what is reported to it."""

    queue = "Orders"

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.in_flight = self

    def fail_report(self, failures: Sequence[Failure], now: float | None = None) -> Any:
        return "fail", [(item.id, item.verdict) for item in failures]

    def release_report(self, delays: Sequence[Any], now: float | None = None, *, crashed: bool = False) -> Any:
        return "crashed" if crashed else "release", list(delays)

    def bury_report(self, reasons: Sequence[Any], now: float | None = None) -> Any:
        return "bury", list(reasons)

    def bury(self, reasons: Sequence[Any], now: float | None = None) -> None:
        self.write([self.bury_report(reasons, now)])

    def write(self, reports: Sequence[Any]) -> None:
        self.calls += reports


def taken(job_id: str, *payloads: Any, retry_count: int = -1) -> TakenJob:
    """A job in flight whose payloads have the scores 1, 2, ..."""
    values = list(payloads or ("v1",))
    raw = [job_id.encode(), b"1800000000.5", b"%d" % retry_count]
    for score, value in enumerate(values, 1):
        raw += [json.dumps(value).encode(), b"%d" % score]
    return TakenJob(job_id, values, retry_count, raw)


def performed(
    jobs: list[TakenJob], perform: Callable[[dict[str, list[Any]]], object], config: Config | None = None
) -> Outcome:
    handler = Handler(perform)
    shard = Shard(cast(Client, None), "lowq", "q", 3, shards_count=4, nonce="me", load_payload=json.loads)
    runtime = execution.WorkerRuntime(handler, handler.perform, 100)
    return execution.perform(runtime, shard, 17, jobs, config or Config())


def verdicts(outcome: Outcome) -> dict[str, str]:
    """What becomes of each id, in one word."""
    result = dict.fromkeys(outcome.finished, "finished")
    result |= {item.id: item.verdict for item in outcome.failures}
    result |= {job_id: "released" for job_id, _ in outcome.releases}
    result |= {job_id: "buried" for job_id, _ in outcome.buries}
    result |= dict.fromkeys(outcome.crashed, "crashed")
    return result


# --- what becomes of each id ---

WORDS: dict[str, tuple[str, Any]] = {
    "finished": ("done", None),
    "retry": ("fail", BOOM),
    "released": ("release", 5.0),
    "buried": ("bury", "enough"),
}
#: What becomes of an id without a word: by what was raised, and whether the id was alone.
WITHOUT_A_WORD: dict[tuple[type[BaseException] | None, bool], str] = {
    (None, False): "finished",
    (None, True): "finished",
    (ValueError, False): "solo",
    (ValueError, True): "retry",
    (TimeLimitExceeded, False): "solo",
    (TimeLimitExceeded, True): "retry",
    (SystemExit, False): "crashed",
    (SystemExit, True): "crashed",
    (KeyboardInterrupt, False): "crashed",
}


class TestDecide:
    def test_each_id_gets_its_word_and_otherwise_what_the_exception_means(self) -> None:
        errors: list[BaseException | None] = [
            None, ValueError("boom"), TimeLimitExceeded(), SystemExit(1), KeyboardInterrupt(),
        ]  # fmt: skip
        for error, said in itertools.product(errors, itertools.product([*WORDS, None], repeat=2)):
            with case(error, said):
                jobs = [taken("a"), taken("b")]
                words = {job.id: WORDS[word] for job, word in zip(jobs, said, strict=True) if word}
                outcome = decide(Handler(), jobs, words, error, Config(), {})
                unsaid = WITHOUT_A_WORD[type(error) if error else None, False]
                assert verdicts(outcome) == {"a": said[0] or unsaid, "b": said[1] or unsaid}
                assert len(outcome.finished) + len(outcome.failures) + len(outcome.releases) + len(
                    outcome.buries
                ) + len(outcome.crashed) == len(jobs)
                assert outcome.error is error
                assert outcome.whole == (error is None and set(verdicts(outcome).values()) == {"finished"})

    def test_an_id_that_is_alone(self) -> None:
        errors: list[BaseException | None] = [None, ValueError("boom"), TimeLimitExceeded(), SystemExit(1)]
        all_words: list[str | None] = [*WORDS, None]
        for error, word in itertools.product(errors, all_words):
            with case(error, word):
                words = {"a": WORDS[word]} if word else {}
                outcome = decide(Handler(), [taken("a")], words, error, Config(), {})
                assert verdicts(outcome) == {"a": word or WITHOUT_A_WORD[type(error) if error else None, True]}

    def test_what_was_said_goes_along(self) -> None:
        jobs = [taken("a"), taken("b")]
        outcome = decide(Handler(), jobs, {"a": ("release", 5.0), "b": ("bury", "enough")}, None, Config(), {})
        assert (outcome.releases, outcome.buries) == ([("a", 5.0)], [("b", b"enough")])

    def test_an_id_that_fails_in_company_is_not_charged(self) -> None:
        outcome = decide(Handler(), [taken("a", retry_count=3), taken("b")], {}, BOOM, Config(), {})
        assert [(item.id, item.retry_count, item.delay) for item in outcome.failures] == [("a", 3, 0.0), ("b", -1, 0.0)]

    def test_an_id_that_fails_alone_is_charged_and_waits_as_long_as_the_worker_says(self) -> None:
        outcome = decide(Handler(), [taken("a", retry_count=3)], {}, BOOM, Config(), {})
        (failure,) = outcome.failures
        assert (failure.verdict, failure.retry_count, failure.delay) == ("retry", 4, 104.0)
        assert b"ValueError: boom" in failure.error

    def test_only_the_named_culprit_is_charged(self) -> None:
        jobs = [taken("a"), taken("b"), taken("c")]
        outcome = decide(Handler(), jobs, {"b": ("fail", "no such order")}, BOOM, Config(), {})
        assert verdicts(outcome) == {"a": "solo", "b": "retry", "c": "solo"}
        assert [(item.id, item.retry_count) for item in outcome.failures] == [("a", -1), ("b", 0), ("c", -1)]
        assert outcome.failures[1].error == b"no such order"

    def test_retries_are_exhausted_when_the_count_reaches_the_maximum(self) -> None:
        rows: list[tuple[int, int, str]] = [
            (0, -1, "exhausted"),
            (1, -1, "retry"),
            (1, 0, "exhausted"),
            (25, 23, "retry"),
            (25, 24, "exhausted"),
            (3, 9, "exhausted"),
        ]
        for max_retry_count, retry_count, verdict in rows:
            with case(max_retry_count, retry_count, verdict):
                handler = Handler()
                handler.max_retry_count = max_retry_count
                jobs = [taken("a", "v1", "v2", retry_count=retry_count)]
                outcome = decide(handler, jobs, {}, BOOM, Config(), {})
                assert verdicts(outcome) == {"a": verdict}
                assert bool(outcome.exhausted) == (verdict == "exhausted")

    def test_a_job_that_failed_in_company_is_never_exhausted(self) -> None:
        handler = Handler()
        handler.max_retry_count = 0
        outcome = decide(handler, [taken("a"), taken("b")], {}, BOOM, Config(), {})
        assert verdicts(outcome) == {"a": "solo", "b": "solo"}

    def test_of_an_exhausted_job_the_oldest_payload_is_given_up(self) -> None:
        handler = Handler()
        handler.max_retry_count = 1
        outcome = decide(handler, [taken("a", "v1", "v2", retry_count=0)], {}, BOOM, Config(), {})
        notify_worker(outcome, handler, Config())
        (job,) = handler.exhausted
        assert (job.id, job.state, job.payloads, job.payloads_count) == ("a", "morgue", [("v1", 1.0)], 1)
        assert job.retry_count == 1
        assert job.error is not None
        assert job.error.endswith("ValueError: boom")


# --- what the worker's own methods do wrong ---


class TestTimeLimits:
    def test_an_exceeded_time_limit_stops_no_node(self) -> None:
        outcome = decide(Handler(), [taken("a")], {}, TimeLimitExceeded(), Config(), {})
        assert outcome.stop is None

    def test_a_push_that_had_no_time_left_is_charged_as_the_handler_was_late_not_redis(self) -> None:
        late = PushInterrupted("q", 0, [], TimeLimitExceeded())
        late.__cause__ = TimeLimitExceeded()
        outcome = decide(Handler(), [taken("a")], {}, late, Config(), {})
        assert verdicts(outcome) == {"a": "retry"}

    def test_a_worker_without_limits_has_no_deadline_and_touch_does_nothing(self) -> None:
        def perform(_: Any) -> None:
            current().touch(5)
            assert current().deadline is None

        assert performed([taken("a")], perform).error is None

    def test_deadline_and_touch(self) -> None:
        now = 100.0
        execution = Execution(Handler, 0, 1, [taken("a")], limits=TimeLimits(10, 30, clock=lambda: now))
        assert execution.deadline == 110
        now = 105.0
        execution.touch(timedelta(minutes=1))
        assert execution.deadline == 165
        execution.touch(2)
        assert execution.deadline == 107

    def test_touch_takes_a_length_of_time_also_without_limits(self) -> None:
        wrong_values: list[Any] = [0, -1, timedelta(0), "5", None]
        for wrong in wrong_values:
            with case(wrong), pytest.raises(LowqError, match=r"touch: .* is not a number of seconds"):
                Execution(Handler, 0, 1, [taken("a")]).touch(wrong)


class TestWriteOff:
    def test_what_was_said_holds_the_rest_is_charged_a_crash_and_what_was_not_begun_is_not(self) -> None:
        for said in itertools.product([*WORDS, None], repeat=2):
            with case(said):
                jobs = [taken("a"), taken("b")]
                shard = Shard(cast(Client, None), "lowq", "q", 3, shards_count=4, nonce="me", load_payload=bytes.decode)
                shard.in_flight._in_hand = dict.fromkeys("abc", 1)
                limits = TimeLimits(None, 10, jobs)
                limits.outcomes.update({job.id: WORDS[word] for job, word in zip(jobs, said, strict=True) if word})
                outcome = write_off(Handler(), shard, limits, Config())
                assert verdicts(outcome) == {"a": said[0] or "crashed", "b": said[1] or "crashed", "c": "released"}
                assert ("c", None) in outcome.releases
                assert outcome.stop is None


class TestRetryIn:
    @pytest.mark.parametrize(("value", "delay"), [(7, 7.0), (0, 0.0), (-3, 0.0), (2.5, 2.5), (True, 1.0)])
    def test_seconds(self, value: float, delay: float) -> None:
        assert self.delay(lambda: value) == delay

    def test_nonsense_is_logged_and_the_default_used(self, caplog: pytest.LogCaptureFixture) -> None:
        values: list[Any] = [None, "soon", math.nan, math.inf, -math.inf, timedelta(1), [], 10**400]
        for value in values:
            with case(value):
                caplog.clear()
                assert 15 + 2**4 <= self.delay(itertools.repeat(value).__next__) <= 15 + 2**4 + 90
                assert "Handler.retry_in(2)" in caplog.text

    @pytest.mark.parametrize("value", [sys.maxsize, 2.0**33, 1e300], ids=str)
    def test_one_of_centuries_means_never(self, value: float) -> None:
        assert self.delay(lambda: value) == MAX_TIME

    def test_one_that_raises_is_logged_and_the_default_used(self, caplog: pytest.LogCaptureFixture) -> None:
        def divide() -> float:
            raise ZeroDivisionError

        assert 15 + 2**4 <= self.delay(divide) <= 15 + 2**4 + 90
        assert "Handler.retry_in(2) failed for id 'a'" in caplog.text

    @staticmethod
    def delay(retry_in: Callable[[], Any]) -> float:
        class Own(Handler):
            def retry_in(self, retry_count: int) -> float:
                assert retry_count == 2
                return cast(float, retry_in())

        Own.__name__ = "Handler"
        outcome = decide(Own(), [taken("a", retry_count=1)], {}, BOOM, Config(), {})
        log_remarks(outcome)
        (failure,) = outcome.failures
        assert (failure.verdict, failure.retry_count) == ("retry", 2)
        return failure.delay


def releasing(job_id: str, delay: Any) -> Callable[[Any], None]:
    """A handler that releases one job."""
    return lambda _: current().release(job_id, delay)


def raises(*_: Any) -> Any:
    raise RuntimeError("a hook failed")


def nothing(_: Any) -> None:
    """Gives nothing where something is wanted."""


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class TestErrorHooks:
    def test_they_are_used(self) -> None:
        config = Config(format_error=lambda error: f"<{error}>", dump_error=lambda text: text.upper().encode())
        (failure,) = decide(Handler(), [taken("a")], {}, BOOM, config, {}).failures
        assert failure.error == b"<BOOM>"

    def test_a_hook_that_fails_does_not_keep_the_outcome_from_being_written(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        all_settings: list[dict[str, Any]] = [
            {"format_error": raises},
            {"format_error": nothing},
            {"format_error": lambda error: f"{error} \udc80", "dump_error": str.encode},
            {"dump_error": raises},
            {"dump_error": nothing},
            {"dump_error": lambda text: text},
            {"load_error": raises},
        ]
        for settings, retry_count, alone in itertools.product(all_settings, [-1, 24], [True, False]):
            with case(settings, retry_count, alone):
                caplog.clear()
                # Otherwise the jobs would be performed again and again, uncharged.
                jobs = [taken("a", retry_count=retry_count), *([] if alone else [taken("b")])]
                outcome = decide(Handler(), jobs, {}, BOOM, Config(**settings), {})
                assert len(outcome.failures) == len(jobs)
                for failure in outcome.failures:
                    assert b"boom" in failure.error
                assert caplog.records == []  # first it is written
                notify_worker(outcome, Handler(), Config(**settings))
                log_remarks(outcome)
                if outcome.exhausted or "load_error" not in settings:
                    assert caplog.records

    def test_an_exception_that_has_no_text_is_kept_all_the_same(self) -> None:
        for config in (Config(), Config(format_error=raises), Config(dump_error=raises)):
            (failure,) = decide(Handler(), [taken("a")], {}, Unprintable(), config, {}).failures
            assert b"Unprintable" in failure.error


# --- performing ---


class TestPerform:
    def test_the_handler_gets_its_payloads_by_id(self) -> None:
        got: list[dict[str, list[Any]]] = []
        outcome = performed([taken("a", 1, 2), taken("b", 3)], got.append)
        assert got == [{"a": [1, 2], "b": [3]}]
        assert (outcome.finished, outcome.whole) == (["a", "b"], True)

    def test_what_the_handler_does_to_its_dict_changes_nothing(self) -> None:
        assert performed([taken("a", 1)], lambda payloads_by_id: payloads_by_id.clear()).finished == ["a"]

    def test_words_win_over_an_exception_raised_afterwards(self) -> None:
        def perform(payloads_by_id: dict[str, list[Any]]) -> None:
            current().done("a")
            current().release("b", delay=9)
            raise BOOM

        outcome = performed([taken("a"), taken("b"), taken("c")], perform)
        assert verdicts(outcome) == {"a": "finished", "b": "released", "c": "solo"}
        assert outcome.error is BOOM

    def test_the_last_word_on_an_id_counts(self) -> None:
        def perform(payloads_by_id: dict[str, list[Any]]) -> None:
            current().done("a")
            current().bury("a", reason="on second thoughts")

        assert performed([taken("a")], perform).buries == [("a", b"on second thoughts")]

    @pytest.mark.parametrize("error", [SystemExit(2), KeyboardInterrupt(), GeneratorExit()], ids=repr)
    def test_what_stops_a_process_is_handed_on_and_not_raised(self, error: BaseException) -> None:
        def perform(payloads_by_id: dict[str, list[Any]]) -> None:
            raise error

        outcome = performed([taken("a"), taken("b")], perform)
        assert (outcome.crashed, outcome.error) == (["a", "b"], error)


class TestCurrent:
    def test_it_tells_all_of_the_batch(self) -> None:
        def perform(payloads_by_id: dict[str, list[Any]]) -> None:
            execution = current()
            assert (execution.worker, execution.shard, execution.fence) == (Handler, 3, 17)
            (job,) = execution.jobs
            assert (job.id, job.state, job.payloads) == ("a", "taken", [("x", 1.0), ("y", 2.0)])
            assert (job.retry_count, job.perform_at, job.payloads_count) == (4, 1_800_000_000.5, 2)

        outcome = performed([taken("a", "x", "y", retry_count=4)], perform)
        assert outcome.error is None

    def test_outside_of_perform_there_is_none(self) -> None:
        performed([taken("a")], lambda _: current())
        with pytest.raises(LowqError, match=r"outside of perform; .* use lowq\.testing\.execution"):
            current()

    def test_after_an_exception_there_is_none_either(self) -> None:
        performed([taken("a")], raises)
        with pytest.raises(LowqError, match="outside of perform"):
            lowq.current()

    def test_another_thread_has_none(self) -> None:
        caught: list[BaseException] = []

        def ask() -> None:
            try:
                current()
            except LowqError as error:
                caught.append(error)

        def perform(payloads_by_id: dict[str, list[Any]]) -> None:
            thread = threading.Thread(target=ask)
            thread.start()
            thread.join()

        performed([taken("a")], perform)
        assert "outside of perform" in str(caught[0])

    def test_a_word_about_an_id_of_another_batch_is_refused(self) -> None:
        job_ids: list[Any] = ["b", 2, "", None]
        for job_id, verb in itertools.product(job_ids, ["done", "fail", "release", "bury"]):
            with case(job_id, verb):
                execution = Execution(Handler, 0, 1, [taken("a")])
                args = {"fail": ("boom",)}.get(verb, ())
                with pytest.raises(LowqError, match=rf"{verb}\({job_id!r}\): the batch being performed has no such id"):
                    getattr(execution, verb)(job_id, *args)

    def test_an_id_may_be_given_as_it_was_pushed(self) -> None:
        execution = Execution(Handler, 0, 1, [taken("7")])
        execution.done(7)
        assert verdicts(decide(Handler(), [taken("7")], execution._outcomes, BOOM, Config(), {})) == {"7": "finished"}

    @pytest.mark.parametrize("delay", [0, 5, 2.5, timedelta(seconds=90), -1, None])
    def test_a_release_may_be_delayed_as_a_job(self, delay: Any) -> None:
        seconds = {timedelta(seconds=90): 90.0, -1: 0.0}.get(delay, delay)
        outcome = performed([taken("a")], lambda _: current().release("a", delay))
        assert outcome.releases == [("a", seconds)]

    def test_a_senseless_delay_is_refused_where_the_handler_learns_of_it(self) -> None:
        delays: list[Any] = ["soon", math.nan, math.inf, -math.inf, True, 1e12, [], 10**5000]
        for delay in delays:
            with case(delay):
                # Once the batch is over nobody could be told, and the outcome could never be written.
                outcome = performed([taken("a")], releasing("a", delay))
                assert verdicts(outcome) == {"a": "retry"}
                assert isinstance(outcome.error, LowqError)

    @pytest.mark.parametrize("reason", [5, None, b"x", BOOM])
    def test_a_reason_that_is_no_text_is_refused_there_too(self, reason: Any) -> None:
        outcome = performed([taken("a")], lambda _: current().bury("a", reason))
        assert verdicts(outcome) == {"a": "retry"}
        assert isinstance(outcome.error, LowqError)

    @pytest.mark.parametrize("error", [5, None, ValueError, b"x"])
    def test_a_failure_is_an_exception_or_a_text(self, error: Any) -> None:
        outcome = performed([taken("a")], lambda _: current().fail("a", error))
        assert verdicts(outcome) == {"a": "retry"}
        assert isinstance(outcome.error, LowqError)


# --- writing the outcome ---


class TestReport:
    def test_each_kind_is_written_with_one_script(self) -> None:
        outcome = Outcome(
            finished=["done"],
            failures=[Failure("a", "retry", 0, 5.0, b"boom"), Failure("b", "solo", -1, 0.0, b"boom")],
            releases=[("c", 5.0), ("d", None)],
            buries=[("e", b"enough"), ("f", b"")],
        )
        shard = self.reported(outcome)
        assert shard.calls == [
            ("fail", [("a", "retry"), ("b", "solo")]),
            ("release", [("c", 5.0), ("d", None)]),
            ("bury", [("e", b"enough", ()), ("f", b"", ())]),
        ]

    def test_what_stopped_the_process_is_counted_and_not_due_at_once(self) -> None:
        ((kind, released),) = self.reported(Outcome(crashed=["a", "b"], error=SystemExit())).calls
        assert kind == "crashed"
        assert [job_id for job_id, _ in released] == ["a", "b"]
        assert all(0 < delay < 1 for _, delay in released)

    def test_the_worker_is_told_of_exhausted_jobs_and_reporting_calls_nothing_of_its(self) -> None:
        handler = Handler()
        handler.max_retry_count = 0
        shard = Reports()
        outcome = decide(handler, [taken("a")], {}, BOOM, Config(), {})
        report(cast(Shard, shard), outcome)
        assert (shard.calls, handler.exhausted) == ([("fail", [("a", "exhausted")])], [])
        notify_worker(outcome, handler, Config())
        assert [job.id for job in handler.exhausted] == ["a"]

    def test_retries_exhausted_that_raises_is_logged_and_no_more(self, caplog: pytest.LogCaptureFixture) -> None:
        class Own(Handler):
            max_retry_count = 0

            def retries_exhausted(self, jobs: list[Job]) -> None:
                raise BOOM

        outcome = decide(Own(), [taken("a")], {}, BOOM, Config(), {})
        notify_worker(outcome, Own(), Config())
        log_remarks(outcome)
        assert "Own.retries_exhausted failed" in caplog.text
        assert outcome.stop is None

    @pytest.mark.parametrize("dump_error", [raises, nothing])
    def test_a_reason_that_dump_error_cannot_take_does_not_stop_the_shard(self, dump_error: Any) -> None:
        config = Config(dump_error=dump_error)
        assert performed([taken("a")], lambda _: current().bury("a", "enough"), config).buries == [("a", b"enough")]

        shard = Reports()
        bury_undecodable(cast(Shard, shard), [Undecodable("a", b"\xff", "can't be decoded")], config)
        assert shard.calls == [("bury", [("a", b"can't be decoded", (b"\xff",))])]

    def test_a_reason_with_half_a_character_does_not_either(self) -> None:
        ((job_id, reason),) = performed([taken("a")], lambda _: current().bury("a", "file \udc80")).buries
        assert (job_id, isinstance(reason, bytes)) == ("a", True)
        assert reason.startswith(b"file ")

    def test_each_spoiled_payload_is_buried_raw_with_the_reason_and_logged(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.ERROR)
        shard = Reports()
        undecodable = [Undecodable("a", b"\xff", "no JSON"), Undecodable("a", b"{", "cut off")]
        bury_undecodable(cast(Shard, shard), undecodable, Config())
        assert shard.calls == [("bury", [("a", b"no JSON", (b"\xff",))]), ("bury", [("a", b"cut off", (b"{",))])]
        assert "queue 'Orders', id 'a': no JSON" in caplog.text

    @staticmethod
    def reported(outcome: Outcome) -> Reports:
        shard = Reports()
        report(cast(Shard, shard), outcome)
        return shard
