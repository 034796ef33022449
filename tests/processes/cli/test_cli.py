"""The command line as people use it: every verb against a real Redis; nodes and terminals as real processes."""

import json
import os
import pty
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lowq.cli import main
from lowq.metrics.counters import BOUNDS, WAIT_BOUNDS, Counted, record_call
from lowq.metrics.error_groups import error_fingerprint
from lowq.metrics.slowest import EndedBatch
from tests.processes.cli.support import Cli, lines_of
from tests.redis_server import RedisServer
from tests.rows import case
from tests.tiers import often
from tests.waiting import PATIENCE, until

ROOT = Path(__file__).parents[3]


# --- verbs, in this process ---


@pytest.fixture
def in_flight(cli: Cli) -> Iterator[Callable[..., None]]:
    """Pushes jobs to Orders, of one shard, and takes them for the rest of the test, as a consumer does."""
    with ExitStack() as stack:

        def take(*jobs: dict[str, Any]) -> None:
            queue = cli.app.queue("Orders", 1)
            queue.push(jobs)
            taken = stack.enter_context(queue.consumer()).take(len(jobs), timeout=PATIENCE)
            assert len(taken) == len(jobs)

        yield take


def test_nothing_is_there_yet(cli: Cli) -> None:
    assert cli("stats").stderr == "no queue has been used yet\n"
    assert cli.json("stats")["queues"] == []
    assert cli("nodes").stderr == "no node is running\n"
    assert cli.json("nodes") == {"nodes": []}


def test_statistics_in_the_words_of_tarantools_queue(cli: Cli) -> None:
    assert cli("statistics").stderr == "no queue has been used yet\n"
    cli.push({"id": 1}, {"id": 2, "delay": 60})
    cli.app.queue("Mails", 1).push({"id": 1})
    cli.app.queue("Mails").delete(1)
    assert cli("delete", "Orders", "1").exit_code == 0
    lines = lines_of(cli("statistics", "Orders"))
    assert lines[:2] == ["Orders", "  tasks:"]
    assert {"    ready: 0", "    delayed: 1", "    total: 1", "    done: 1", "  calls:", "    delete: 1"} <= set(lines)
    assert [line for line in lines_of(cli("statistics")) if not line.startswith(" ")] == ["Mails", "Orders"]
    (found,) = cli.json("statistics", "Mails")["queues"]
    assert (found["name"], found["tasks"]["done"], found["calls"]["delete"]) == ("Mails", 1, 1)
    assert "did you mean 'Orders'?" in cli("statistics", "Ordrs", code=2).stderr


def test_stats_of_all_queues_and_of_those_named(cli: Cli) -> None:
    cli.push({"id": 1}, {"id": 2, "delay": 60})
    cli.app.queue("Mails", 1).push({"id": 1})
    header, mails, orders, total = lines_of(cli("stats"))
    assert header.split()[:4] == ["QUEUE", "LENGTH", "DUE", "LATER"]
    assert mails.split()[:4] == ["Mails", "1", "1", "0"]
    assert orders.split()[:4] == ["Orders", "2", "1", "1"]
    assert re.split(r"  +", total)[:4] == ["all 2 queues", "3", "2", "1"]
    assert len(lines_of(cli("stats", "Orders"))) == 2
    document = cli.json("stats", "Orders")
    assert document["total"]["length"] == 2
    (figures,) = document["queues"]
    assert {"name", "shards_count", "length", "due", "scheduled", "fresh", "retries", "taken", "morgue_length",
            "lag", "processed", "failed", "buried", "paused"} <= set(figures)  # fmt: skip
    assert (figures["name"], figures["shards_count"], figures["scheduled"]) == ("Orders", 3, 1)


def test_an_unknown_queue_exits_2_and_names_the_near_ones(cli: Cli) -> None:
    cli.push({"id": 1})
    for args in (["stats", "Ordrs"], ["jobs", "Ordrs"], ["kick", "Ordrs", "1"], ["shards", "Ordrs"], ["drop", "Ordrs"]):
        result = cli(*args, code=2)
        assert result.stderr.startswith("lowq: queue 'Ordrs' does not exist")
        assert "did you mean 'Orders'?" in result.stderr
        assert result.stderr.count("\n") == 1
    assert "--shards-count" in cli("push", "Ordrs", "--id", "1", code=2).stderr


def test_shards(cli: Cli) -> None:
    cli.push({"id": 1})
    lines = lines_of(cli("shards", "Orders"))
    assert lines[0].split()[0] == "SHARD"
    assert [line.split()[0] for line in lines[1:]] == ["0", "1", "2"]
    document = cli.json("shards", "Orders")
    assert [shard["index"] for shard in document["shards"]] == [0, 1, 2]
    assert sum(shard["length"] for shard in document["shards"]) == 1


def test_jobs_page_by_page(cli: Cli) -> None:
    cli.push(
        *({"id": f"{number:02}", "payload": {"version": 1}, "score": 1, "delay": 5400 + number} for number in range(5))
    )
    first = cli.json("jobs", "Orders", "--limit", "3")
    assert [job["id"] for job in first["jobs"]] == ["00", "01", "02"]
    assert first["jobs"][0]["payloads"] == [[{"version": 1}, 1.0]]
    assert first["jobs"][0]["state"] == "scheduled"
    second = cli.json("jobs", "Orders", "--limit", "3", "--after", first["cursor"])
    assert [job["id"] for job in second["jobs"]] == ["03", "04"]
    assert second["cursor"] is None
    text = cli("jobs", "Orders", "--limit", "1")
    assert re.fullmatch(r'00  scheduled  in 1 h (30|29) min +1  {"version":1}', lines_of(text)[1])
    assert text.stderr.startswith("there are more: --after ")


def test_jobs_that_fit(cli: Cli) -> None:
    cli.push({"id": "a1"}, {"id": "a2", "perform_at": 4e9}, {"id": "b1", "perform_at": 5e9})

    def ids(*args: str) -> list[str]:
        return [job["id"] for job in cli.json("jobs", "Orders", *args)["jobs"]]

    assert ids("--state", "due") == ["a1"]
    assert ids("--match", "a*", "--reverse") == ["a2", "a1"]
    assert ids("--order-by", "id", "--min", "a2", "--max", "b0") == ["a2"]
    assert ids("--min", "4000000000") == ["a2", "b1"]
    assert ids("--min", "2100-01-01T00:00Z") == ["b1"]
    assert cli("jobs", "Orders", "--state", "morgue").stderr == "no such job\n"


def test_jobs_of_all_queues_and_by_what_is_in_them(cli: Cli) -> None:
    for queue in ("Mail", "Orders"):
        job = {"id": f"{queue}-7", "payload": {"customer": 7}}
        cli("push", queue, "--shards-count", "3", stdin=json.dumps(job) + "\n")
    page = cli.json("jobs", "--payload", "customer:7", "--limit", "1")
    assert [(job["queue"], job["id"]) for job in page["jobs"]] == [("Mail", "Mail-7")]
    rest = cli.json("jobs", "--payload", "customer:7", "--after", page["cursor"])
    assert [(job["queue"], job["id"]) for job in rest["jobs"]] == [("Orders", "Orders-7")]
    text = cli("jobs", "--payload", "customer:7")
    assert lines_of(text)[0].split()[:2] == ["QUEUE", "ID"]
    assert [line.split()[:2] for line in lines_of(text)[1:]] == [["Mail", "Mail-7"], ["Orders", "Orders-7"]]
    assert text.stderr == "2 jobs looked at\n"
    assert cli("jobs", "--error", "Timeout").stderr == "no such job\n2 jobs looked at\n"
    assert "it is a field and its value" in cli("jobs", "--payload", "customer", code=2).stderr


def test_bounds_may_be_said_from_now_on(cli: Cli) -> None:
    now = time.time()
    cli.push({"id": "a", "perform_at": now + 1800}, {"id": "b", "perform_at": now + 3 * 3600})

    def ids(*args: str) -> list[str]:
        return [job["id"] for job in cli.json("jobs", "Orders", *args)["jobs"]]

    assert ids("--min", "+1h") == ["b"]
    assert ids("--min", "-2h", "--max", "+60 min") == ["a"]
    for option, args in (("--min", ["--min", "soon"]), ("--max", ["--max", "+" + "9" * 400 + "d"])):
        refused = cli("jobs", "Orders", *args, code=2).stderr
        assert refused.startswith(f"lowq: {option} ")
        assert "or -2h, +30min" in refused
    assert "it is a number\n" in cli("jobs", "Orders", "--order-by", "retry_count", "--min", "-2h", code=2).stderr


def test_where_no_job_waits_it_is_said_where_others_are(cli: Cli) -> None:
    cli.push({"id": "gone-1"}, {"id": "gone-2"})
    assert cli("jobs", "Orders", "--match", "x*").stderr == "no such job waits\n"
    cli("bury", "Orders", "--match", "gone-*", "--yes")
    expected = "no such job waits; the queue has 2 in the morgue (--state morgue)\n"
    assert cli("jobs", "Orders", "--match", "gone-*").stderr == expected
    nothing = cli("delete", "Orders", "--match", "gone-*")
    assert nothing.stdout == "0 jobs deleted\n"
    assert nothing.stderr == "2 such jobs lie in the morgue: --state morgue\n"
    assert cli("delete", "Orders", "--match", "other-*").stderr == ""
    assert cli("delete", "Orders", "--match", "gone-*", "--state", "morgue", "--yes").stdout == "2 jobs deleted\n"


def test_help_offers_the_states_that_an_action_knows(cli: Cli) -> None:
    rows: list[tuple[str, str]] = [
        ("kick", "[morgue]"),
        ("bury", "[scheduled|due|retrying]"),
        ("perform-now", "[scheduled|due|retrying]"),
        ("delete", "[scheduled|due|retrying|morgue]"),
    ]
    for verb, states in rows:
        with case(verb, states):
            help_text = CliRunner().invoke(main, [verb, "--help"], terminal_width=120).output
            assert f"--state {states}" in help_text
            cli.push({"id": 1})
            assert "'--state': 'taken' is not" in cli(verb, "Orders", "--state", "taken", code=2).stderr


def test_peek_and_why(cli: Cli) -> None:
    cli.push({"id": 1, "payload": {"version": 1}, "score": 1}, {"id": 1, "payload": {"version": 2}, "score": 2})
    peeked = cli("peek", "Orders", "1")
    assert lines_of(peeked)[1:] == ['  score 1  {"version":1}', '  score 2  {"version":2}']
    missing = cli("peek", "Orders", "1", "2", code=1)
    assert missing.stderr == "2: no such job waits, is in flight or is buried; of what was performed nothing is kept\n"
    document = cli.json("peek", "Orders", "1", "2", code=1)
    assert [job["id"] for job in document["jobs"]] == ["1"]
    assert document["missing"] == ["2"]
    assert "leased to nobody" in lines_of(cli("why", "Orders", "1"))[1]
    assert [item["reason"] for item in cli.json("why", "Orders", "1", "2", code=1)["why"]] == ["no_owner", "absent"]
    assert "no such job" in lines_of(cli("why", "Orders", "2", "1", code=1))[1]


def test_an_id_that_waits_and_is_buried_is_shown_in_both_places(cli: Cli) -> None:
    queue = cli.app.queue("Orders", 3)
    cli.push({"id": 1, "payload": "old", "score": 1}, {"id": 2})
    queue.bury([1, 2], reason="by hand")
    cli.push({"id": 1, "payload": "new", "score": 2, "delay": 60})
    lines = lines_of(cli("peek", "Orders", "1"))
    assert [line.split(",")[0] for line in lines if line[0] == "1"] == ["1  scheduled", "1  morgue"]
    jobs = cli.json("peek", "Orders", "1", "2")["jobs"]
    assert [(job["id"], job["state"]) for job in jobs] == [("1", "scheduled"), ("1", "morgue"), ("2", "morgue")]
    rows = lines_of(cli("why", "Orders", "1"))[1:]
    assert [row.split()[:2] for row in rows] == [["1", "scheduled"], ["1", "morgue"]]
    assert "also buried" in rows[1]
    waits, lies = cli.json("why", "Orders", "1", "2")["why"]
    assert (waits["state"], lies["state"]) == ("scheduled", "morgue")
    assert waits["buried_at"] == jobs[1]["buried_at"]
    assert cli.json("why", "Orders", "3", code=1)["why"][0]["buried_at"] is None


def test_an_id_in_flight_with_more_that_waits_and_is_buried_is_shown_three_times(
    cli: Cli, in_flight: Callable[..., None]
) -> None:
    queue = cli.app.queue("Orders", 1)
    queue.push({"id": 1})
    queue.bury(1)
    in_flight({"id": 1, "payload": "now"})
    queue.push({"id": 1, "payload": "next"})
    jobs = cli.json("peek", "Orders", "1")["jobs"]
    assert [(job["state"], job["payloads"][0][0]) for job in jobs] == [
        ("taken", "now"),
        ("due", "next"),
        ("morgue", ""),
    ]
    assert [row.split()[1] for row in lines_of(cli("why", "Orders", "1"))[1:]] == ["taken", "morgue"]


def test_hostile_text_does_not_drive_the_terminal(cli: Cli) -> None:
    cli.push({"id": "a\x1b[2J\nb", "payload": "\x1b]0;title\x07\x9b31m", "delay": 60})
    cli("bury", "Orders", "a\x1b[2J\nb", "--reason", "\x1b[31mwhy\x07")
    for args in (
        ["jobs", "Orders", "--state", "morgue"],
        ["peek", "Orders", "a\x1b[2J\nb"],
        ["why", "Orders", "a\x1b[2J\nb"],
        ["shards", "Orders"],
        ["kick", "Orders", "a\x1b[2J\nb", "x\x1b[2J"],
    ):
        result = CliRunner().invoke(main, [*args, "--redis-url", cli.url])
        assert result.exception is None or isinstance(result.exception, SystemExit)
        assert all(char.isprintable() or char == "\n" for char in result.output)


def test_rates_tell_the_clock_and_leave_out_a_lag_that_nobody_saw(cli: Cli) -> None:
    cli.app.queue("Orders", 1).push({"id": 1})
    now = time.time()
    nothing = Counted(0, 0, 0.0, (0,) * (len(BOUNDS) + 1))
    for at, lag in ((now - 3000, 61.0), (now - 1000, None)):
        call = record_call("lowq:v1:history:Orders", nothing, nothing._replace(processed=50), 5.0, lag, at)
        cli.app.client.run(call.script, call.key, *call.args)
    header, first, second = lines_of(cli("rates", "Orders"))
    assert re.split(r"  +", header) == ["FROM", "WHICH WAS", "PERFORMED/S", "FAILED/S", "LAG"]
    clock, ago, *_, last = re.split(r"  +", first)
    stretches = [((now - 3000) // 10 + number) * 10 for number in (-1, 0)]
    assert clock in [time.strftime("%H:%M:%S", time.localtime(at)) for at in stretches]
    assert re.fullmatch(r"(49|50|51) min( \d+ s)? ago", ago)
    assert last == "1 min 1 s"
    assert re.search(r" 0\.0$", second.rstrip())
    assert re.match(r"\w{3} \d\d:\d\d  ", lines_of(cli("rates", "Orders", "--span", "day"))[1])
    assert re.match(r"\d\d-\d\d \d\d:\d\d  ", lines_of(cli("rates", "Orders", "--span", "month"))[1])


def test_times_tell_percentiles_and_the_slowest(cli: Cli) -> None:
    cli.app.queue("Orders", 1).push({"id": 1})
    assert "no node has worked this queue" in cli("times", "Orders").stderr
    nothing = Counted(0, 0, 0.0, (0,) * (len(BOUNDS) + 1))
    runs = tuple(9 if bound == 0.0025 else 0 for bound in BOUNDS)
    waits = tuple(0 for _ in WAIT_BOUNDS)
    after = nothing._replace(lengths=(*runs, 1), waits=(*waits, 4), waited=1e6)
    slow = [(60.0, EndedBatch("a\x1b[2J", 7, 0, 0.0125, 0.0)), (0.0, EndedBatch("b", 1, 0, 3700.0, 0.0))]
    call = record_call("lowq:v1:history:Orders", nothing, after, 5.0, None, slow=slow)
    cli.app.client.run(call.script, call.key, *call.args)
    for span in ("hour", "day", "month"):
        header, first, total, *_ = lines_of(cli("times", "Orders", "--span", span))
        assert re.split(r"  +", header)[2:] == [
            "JOBS", "WAIT P50", "WAIT P95", "WAIT P99", "BATCHES", "RUN P50", "RUN P95", "RUN P99"
        ]  # fmt: skip
        for line in (first, total):
            assert re.split(r"  +", line)[-8:] == ["4", *["> 1 d"] * 3, "10", "2.5 ms", "> 5 min", "> 5 min"]
    slowest = [re.split(r"  +", line.strip()) for line in lines_of(cli("times", "Orders"))[-2:]]
    assert [(line[0], *line[2:]) for line in slowest] == [
        ("1 h 1 min", "0", "1", "b"), ("12.5 ms", "0", "7", r"a\x1b[2J")
    ]  # fmt: skip
    found = cli.json("times", "Orders", "--span", "day")
    assert found["run"] == {"count": 10, "p50": 0.0025, "p95": None, "p99": None}
    assert [item["id"] for item in found["slowest"]] == ["b", "a\x1b[2J"]


def test_errors_tell_what_fails_most_or_what_failed_last(cli: Cli) -> None:
    assert "nothing has failed in the last 30 days" in cli("errors").stderr
    now = time.time()
    for queue, count, ago, text in (("A", 7, 7200.0, "E: \x1b[2J most"), ("B", 2, 60.0, "E: latest")):
        cli.app.queue(queue, 1).push({"id": 1})
        words: list[Any] = [repr(now - ago), 200, 3600, "0123456789ab", count, "7", text]
        cli.app.client.run("record_errors", f"lowq:v1:error_groups:{queue}", *words)
    header, *rows = [re.split(r"  +", line.strip()) for line in lines_of(cli("errors"))]
    assert header == ["COUNT", "24 H", "LAST", "FIRST", "QUEUE", "GROUP", "ID", "ERROR"]
    assert [(row[0], *row[4:]) for row in rows] == [
        ("7", "A", "0123456789ab", "7", r"E: \x1b[2J most"), ("2", "B", "0123456789ab", "7", "E: latest")
    ]  # fmt: skip
    assert [group["queue"] for group in cli.json("errors", "--sort", "last")["errors"]] == ["B", "A"]
    assert [group["queue"] for group in cli.json("errors", "A")["errors"]] == ["A"]
    assert "does not exist" in cli("errors", "C", code=2).stderr


def test_times_of_all_queues_have_a_row_for_each_that_was_worked(cli: Cli) -> None:
    cli.push({"id": 1})
    assert "no node has worked any queue" in cli("times").stderr
    assert cli.json("times") == {"span": "hour", "queues": []}
    nothing = Counted(0, 0, 0.0, (0,) * (len(BOUNDS) + 1))
    for name, count in (("B", 10), ("A", 3)):
        cli.app.queue(name, 1).push({"id": 1})
        runs = tuple(count if bound == 0.0025 else 0 for bound in BOUNDS)
        call = record_call(f"lowq:v1:history:{name}", nothing, nothing._replace(lengths=(*runs, 0)), 5.0, None)
        cli.app.client.run(call.script, call.key, *call.args)
    header, *rows = [re.split(r"  +", line.strip()) for line in lines_of(cli("times"))]
    assert header == [
        "QUEUE",
        "JOBS",
        *(f"WAIT P{n}" for n in (50, 95, 99)),
        "BATCHES",
        *(f"RUN P{n}" for n in (50, 95, 99)),
    ]
    assert rows == [["A", "0", "3", *["2.5 ms"] * 3], ["B", "0", "10", *["2.5 ms"] * 3]]
    assert cli.json("times", "--span", "day")["queues"][0] == {
        "queue": "A",
        "wait": {"count": 0, "p50": 0.0, "p95": 0.0, "p99": 0.0},
        "run": {"count": 3, "p50": 0.0025, "p95": 0.0025, "p99": 0.0025},
    }


# --- acting ---


def test_a_group_of_errors_is_kicked(cli: Cli) -> None:
    cli.push(*({"id": str(n), "payload": {"customer": n % 2}} for n in range(4)))
    cli("bury", "Orders", "0", "1", "2", "--reason", "ValueError: no order 7")
    cli("bury", "Orders", "3", "--reason", "TimeoutError: too slow")
    group = error_fingerprint("ValueError: no order 12")
    assert len(cli.json("jobs", "Orders", "--state", "morgue", "--error-group", group)["jobs"]) == 3
    assert cli("kick", "Orders", "--error-group", group, "-y").stdout == "3 jobs kicked\n"
    assert cli("delete", "Orders", "--payload", "customer:1", "--shard", "0", "-y").exit_code == 0
    for args in (["--all", "--error", "x"], ["7", "--shard", "1"]):
        refused = CliRunner().invoke(main, ["kick", "Orders", *args, "-y", "--redis-url", cli.url])
        assert refused.exit_code == 2
    assert (
        "--all and --error say two things"
        in CliRunner().invoke(main, ["kick", "Orders", "--all", "--error", "x", "--redis-url", cli.url]).stderr
    )


def test_a_single_job(cli: Cli) -> None:
    args = ["--id", "42", "--payload", '{"version":1}', "--score", "1", "--delay", "60", "--shards-count", "3"]
    assert cli("push", "Orders", *args).stdout == "1 payload pushed to Orders\n"
    job = cli.app.queue("Orders").peek("42")
    assert job is not None
    assert (job.state, job.payloads) == ("scheduled", [({"version": 1}, 1.0)])
    assert cli.json("push", "Orders", "--id", "43", "--score", "2") == {"queue": "Orders", "accepted": 1}
    cli("push", "Orders", "--id", "44", "--score", "3", "--perform-at", "2100-01-01T00:00Z")
    later = cli.app.queue("Orders").peek("44")
    assert later is not None
    assert later.perform_at == 4102444800


def test_a_field_of_the_payload_gives_the_score_where_the_queue_says_so(cli: Cli) -> None:
    queue = cli.app.queue("Orders", 1, score="version")
    queue.push([])
    cli("push", "Orders", "--id", "1", "--payload", '{"version":7}')
    job_id = cli("put", "Orders", '{"version":8}').stdout.strip()
    cli("push", "Orders", stdin='{"id": 3, "payload": {"version": 9}}\n')
    found = queue.fetch(["1", job_id, "3"])
    assert [job.payloads[0][1] for job in found.values()] == [7, 8, 9]
    for result in (cli("push", "Orders", "--id", "1", code=2), cli("push", "Orders", stdin='{"id": 1}', code=1)):
        assert "the field 'version', from which the queue 'Orders' takes the score" in result.stderr


def test_jobs_from_a_file_and_from_the_standard_input(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "jobs.ndjson"
    path.write_text('{"id": 1, "payload": {"version": 1}}\n\n{"id": 2}\n')
    assert cli("push", "Orders", str(path), "--shards-count", "3").stdout == "2 payloads pushed to Orders\n"
    assert cli.json("push", "Orders", stdin='{"id": 3}\n{"id": 4}')["accepted"] == 2
    assert cli.json("push", "Orders", "-", "--skip", "1", stdin='{"id": 5}\n{"id": 6}')["accepted"] == 1
    assert set(cli.app.queue("Orders").fetch(map(str, range(1, 7)))) == {"1", "2", "3", "4", "6"}


def test_after_a_malformed_line_one_can_go_on_where_it_says(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "jobs.ndjson"
    good = [json.dumps({"id": number}) for number in range(12_000)]
    path.write_text("\n".join([*good[:11_000], '{"id": 1, "scor": 3}', *good[11_000:]]))
    result = cli("push", "Orders", str(path), "--shards-count", "3", code=1)
    assert "line 11001" in result.stderr
    found = re.search(r"([\d,]+) payloads in; go on with: lowq push Orders .* --skip (\d+)$", result.stderr.strip())
    assert found is not None
    assert int(found[1].replace(",", "")) == int(found[2]) == cli.app.queue("Orders").stats().length == 10_000
    path.write_text("\n".join(good))
    assert cli.json("push", "Orders", str(path), "--skip", found[2])["accepted"] == 2_000
    assert cli.app.queue("Orders").stats().length == 12_000


def test_another_number_of_shards_is_ignored_with_a_warning_or_refused(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cli.push({"id": 1})
    cli("push", "Orders", "--id", "2", "--shards-count", "4")
    assert "says shards_count=4: Redis is followed; write 3 in the code" in caplog.text
    assert (cli.app.queue("Orders").stats().length, cli.app.queue("Orders").shards_count) == (2, 3)
    monkeypatch.setenv("LOWQ_STRICT_SHARDS_COUNT", "1")
    result = cli("push", "Orders", "--id", "3", "--shards-count", "4", code=1)
    assert "shards_count=3" in result.stderr
    assert "shards_count=4" in result.stderr
    assert cli.app.queue("Orders").stats().length == 2


def test_single_jobs_are_buried_kicked_hurried_and_deleted(cli: Cli) -> None:
    cli.push({"id": 1, "delay": 60}, {"id": 2, "delay": 60})
    queue = cli.app.queue("Orders")
    assert cli("bury", "Orders", "1", "--reason", "by hand").stdout == "1: buried\n"
    buried = queue.peek("1")
    assert buried is not None
    assert (buried.state, buried.error) == ("morgue", "by hand")
    assert cli("kick", "Orders", "1", "2", code=1).stdout.startswith("1: kicked\n2: not in the morgue")
    assert cli("perform-now", "Orders", "2").stdout == "2: due now\n"
    assert queue.stats().due == 2
    assert cli.json("delete", "Orders", "1", "3", code=1) == {
        "action": "delete", "queue": "Orders", "done": 1, "in_flight": 0, "missing": 1,
        "ids": {"1": "done", "3": "missing"},
    }  # fmt: skip
    assert queue.stats().length == 1


def test_what_was_not_done_is_told_with_where_the_job_is_and_what_to_type(cli: Cli) -> None:
    cli.push({"id": "a b", "delay": 5400}, {"id": 2}, {"id": 3})
    cli.app.queue("Orders").bury(3)
    later, due, absent = cli("kick", "Orders", "a b", "2", "9", code=1).stdout.splitlines()
    assert re.fullmatch(
        r"a b: not in the morgue but scheduled, due in 1 h (30|29) min; lowq perform-now Orders 'a b' runs it now",
        later,
    )
    assert due == "2: not in the morgue but due already; lowq why Orders 2 says what it waits for"
    assert absent == "9: no such job waits, is in flight or is buried; of what was performed nothing is kept"
    for verb in ("perform-now", "bury"):
        (buried,) = cli(verb, "Orders", "3", code=1).stdout.splitlines()
        assert re.fullmatch(r"3: buried, .*; lowq kick Orders 3 has it performed", buried)


def test_ids_come_from_the_standard_input_too(cli: Cli) -> None:
    cli.push(*({"id": number} for number in range(300)))
    ids = "".join(f"{number}\n" for number in range(301))
    assert cli("bury", "Orders", "-", stdin=ids, code=1).stdout == "300 buried; 1: no such job waits\n"
    assert cli.json("kick", "Orders", *map(str, range(60)))["done"] == 60


def test_many_jobs_at_once_need_yes_without_a_terminal(cli: Cli) -> None:
    cli.push({"id": "a1"}, {"id": "a2"}, {"id": "b1"}, {"id": "b2", "delay": 60})
    queue = cli.app.queue("Orders")
    refused = cli("bury", "Orders", "--match", "a*", code=2)
    assert "this would bury 2 waiting jobs of queue 'Orders' with ids like 'a*'; add --yes" in refused.stderr
    assert queue.stats().morgue_length == 0
    assert cli("bury", "Orders", "--match", "a*", "--yes").stdout == "2 jobs buried\n"
    kicked = cli.json("kick", "Orders", "--all", "-y")
    assert kicked == {"action": "kick", "queue": "Orders", "done": 2, "total": 2, "in_flight": 0}
    assert cli("perform-now", "Orders", "--state", "scheduled", "-y").stdout == "1 job due now\n"
    assert cli("delete", "Orders", "--all", "-y").stdout == "4 jobs deleted\n"
    assert cli("delete", "Orders", "--all").stdout == "0 jobs deleted\n"


def test_bulk_actions_tell_of_jobs_in_flight_that_they_left_alone(cli: Cli, in_flight: Callable[..., None]) -> None:
    in_flight({"id": 1}, {"id": 2})
    queue = cli.app.queue("Orders")
    queue.push([{"id": 3}, {"id": 4, "delay": 60}, {"id": 5}])
    assert cli("perform-now", "Orders", "--all", "-y").stdout == "1 job due now; 2 in flight, left alone\n"
    assert cli("bury", "Orders", "--match", "3", "-y").stdout == (
        "1 job buried; left alone: what is in flight, 2 jobs of this queue, whichever they are\n"
    )
    assert cli("kick", "Orders", "--all", "-y").stdout == "1 job kicked\n"
    assert cli("kick", "Orders", "1", code=1).stdout == "1: not in the morgue but in flight\n"
    assert cli.json("delete", "Orders", "--all", "-y") == {
        "action": "delete", "queue": "Orders", "done": 3, "total": 3, "in_flight": 2
    }  # fmt: skip
    assert queue.stats().taken == 2


def test_pause_and_resume(cli: Cli) -> None:
    cli.push({"id": 1})
    assert cli("pause", "Orders").stdout == "Orders: paused\n"
    assert cli("pause", "Orders").stdout == "Orders: was paused already\n"
    assert lines_of(cli("stats", "Orders"))[1].endswith("paused")
    assert cli.json("resume", "Orders") == {"queue": "Orders", "paused": False, "changed": True}
    assert cli("resume", "Orders").stdout == "Orders: was not paused\n"


def test_release_all(cli: Cli) -> None:
    cli.push({"id": 1})
    assert cli("release-all", "Orders").stdout == "0 jobs released\n"
    assert cli.json("release-all", "Orders") == {"queue": "Orders", "released": 0, "in_flight": 0}


def test_drop(cli: Cli) -> None:
    cli.push({"id": 1}, {"id": 2})
    assert "with all its 2 jobs for good; add --yes" in cli("drop", "Orders", code=2).stderr
    assert cli.json("drop", "Orders", "--yes") == {"queue": "Orders", "removed": 2}
    cli("stats", "Orders", code=2)


def test_namespaces_are_apart(cli: Cli) -> None:
    cli.push({"id": 1})
    cli("push", "Orders", "--namespace", "shop", "--id", "1", "--shards-count", "7")
    assert cli.json("--namespace", "shop", "stats")["queues"][0]["shards_count"] == 7
    assert cli.json("stats")["queues"][0]["shards_count"] == 3


def test_without_redis_there_is_one_line_and_exit_code_1() -> None:
    result = CliRunner().invoke(main, ["stats", "--redis-url", "redis://:secret@127.0.0.1:1/0"])
    assert result.exit_code == 1
    assert result.stderr.startswith("lowq: Redis at redis://127.0.0.1:1/0 does not answer")
    assert result.stderr.endswith("; start Redis, or say where it is with --redis-url or LOWQ_REDIS_URL\n")
    assert result.stderr.count("\n") == 1
    assert "secret" not in result.stderr


# --- real processes ---


class Process:
    """``lowq ...`` as a process of its own; it is killed at the end if it still runs."""

    def __init__(
        self,
        folder: Path,
        args: list[str],
        environment: dict[str, str],
        *,
        program: Sequence[str] = ("-P", "-m", "lowq"),
        **options: Any,
    ) -> None:
        self.out, self.err = folder / "out.txt", folder / "err.txt"
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("LOWQ_", "COLUMNS"))}
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, *program, *args],
                cwd=folder,
                env={**inherited, "PYTHONPATH": str(ROOT), **environment},
                **{"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err, **options},
            )

    def wait(self) -> int:
        return self.process.wait(PATIENCE)

    def ends_after(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.wait()

    def until(self, condition: Callable[[], Any]) -> Any:
        """Waits for something to become true while the process runs."""

        def fulfilled() -> Any:
            assert self.process.poll() is None, f"it ended:\n{self.out.read_text()}\n{self.err.read_text()}"
            return condition()

        return until(fulfilled)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


class Start:
    """Starts processes in a folder, and ends them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment: dict[str, str] = {}
        self._started: list[Process] = []

    def __call__(self, *args: str, **options: Any) -> Process:
        folder = self.folder
        process = Process(folder, list(args), self.environment, **options)
        self._started.append(process)
        return process

    def close(self) -> None:
        for process in self._started:
            process.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    start = Start(tmp_path)
    yield start
    start.close()


WORKER = """
import atexit, threading
from pathlib import Path
import lowq

@lowq.worker(shards_count=3, max_retry_count=0)
class Orders(lowq.Worker):
    def perform(self, payloads_by_id):
        for order_id in payloads_by_id:
            if order_id.startswith("bad") and not Path("repaired").exists():
                raise ValueError("no such order")
            with Path("performed.txt").open("a") as file:
                file.write(order_id + "\\n")

@lowq.worker
def Mails(payloads_by_id): ...

def left():
    Path("threads.txt").write_text("\\n".join(thread.name for thread in threading.enumerate()))

atexit.register(left)
"""


def performed(folder: Path) -> list[str]:
    path = folder / "performed.txt"
    return path.read_text().split() if path.exists() else []


@pytest.mark.parametrize(
    "args", [["-r", "app.py", "-t", "2"], ["--log-format", "json", "run", "-r", "app", "-q", "Orders"]]
)
def test_a_node_runs_until_it_is_told_to_stop(start: Start, cli: Cli, args: list[str]) -> None:
    (start.folder / "app.py").write_text(WORKER)
    cli.push({"id": 1}, {"id": "bad"})
    node = start(*args, "--redis-url", cli.url)
    node.until(lambda: performed(start.folder) == ["1"])
    node.until(lambda: cli.app.queue("Orders").stats().morgue_length == 1)
    (found,) = cli.json("nodes")["nodes"]
    assert found["pid"] == node.process.pid
    assert found["queues"] == (["Orders"] if "-q" in args else ["Orders", "Mails"])
    assert found["threads"] == (5 if "-q" in args else 2)
    told = cli("nodes")
    assert found["name"] in told.stdout
    assert "as of its heartbeat" in told.stderr
    assert found["name"] in cli("shards", "Orders").stdout
    assert "can't be dropped" in cli("drop", "Orders", "--yes", code=1).stderr
    assert node.ends_after(signal.SIGTERM) == 0
    assert node.out.read_text() == ""
    lines = node.err.read_text().splitlines()
    if "json" in args:
        records = {record["event"]: record for record in map(json.loads, lines)}
        assert {"start", "failed", "stop", "stopped"} <= set(records)
        assert records["failed"]["queue"] == "Orders"
        assert records["failed"]["exception"].endswith("ValueError: no such order")
    else:
        starts = r"INFO +lowq\.node  node .* starts: 2 threads, 8 shards of Orders, Mails, namespace 'lowq' on redis://"
        assert re.search(starts, lines[0])


LOGS = """
import logging
import lowq

@lowq.worker(shards_count=1, batch_size=2)
def Orders(payloads_by_id):
    logging.getLogger("shop").warning("selling")
"""


def test_what_a_handler_logs_says_which_job_it_is_about_and_at_debug_each_job_is_logged(start: Start, cli: Cli) -> None:
    (start.folder / "app.py").write_text(LOGS)
    cli.app.queue("Orders", 1).push({"id": "a"})
    node = start("-r", "app.py", "--log-level", "debug", "--log-format", "json", "--redis-url", cli.url)
    node.until(lambda: "job_end" in node.err.read_text())
    assert node.ends_after(signal.SIGTERM) == 0
    records = [json.loads(line) for line in node.err.read_text().splitlines()]
    told = [(line["event"], line["ids"]) for line in records if line["logger"] == "lowq.jobs"]
    assert told == [("job_start", ["a"]), ("job_end", ["a"])]
    (line,) = [line for line in records if line["logger"] == "shop"]
    assert {name: line[name] for name in ("message", "queue", "shard", "ids", "delivery")} == {
        "message": "selling", "queue": "Orders", "shard": 0, "ids": ["a"], "delivery": 1,
    }  # fmt: skip


def test_logging_that_the_application_has_set_up_stays_and_knows_the_job_too(start: Start, cli: Cli) -> None:
    set_up = "logging.basicConfig(format='mine: %(queue)s %(shard)s %(ids)s %(delivery)s')"
    (start.folder / "app.py").write_text(LOGS + set_up)
    cli.app.queue("Orders", 1).push({"id": "a"})
    node = start("-r", "app.py", "--log-level", "warning", "--redis-url", cli.url)
    node.until(lambda: node.err.read_text().endswith("\n"))
    assert node.err.read_text() == "mine: Orders 0 ['a'] 1\n"
    assert node.ends_after(signal.SIGTERM) == 0


def test_the_command_line_wins_over_code_and_code_over_the_environment(start: Start, cli: Cli) -> None:
    settings = "import lowq\nlowq.config.redis_url = 'redis://127.0.0.1:1/0'\nlowq.config.namespace = 'code'\n"
    (start.folder / "app.py").write_text(settings + WORKER)
    start.environment = {"LOWQ_NAMESPACE": "environment", "LOWQ_THREADS_PER_NODE": "3"}
    node = start("-r", "app.py", "--redis-url", cli.url)
    (found,) = node.until(lambda: cli.json("nodes", "--namespace", "code")["nodes"])
    assert found["threads"] == 3
    assert node.ends_after(signal.SIGTERM) == 0


SETTINGS = "import lowq\nlowq.config.namespace = 'code'\n"


def test_an_app_that_is_wrong(start: Start, cli: Cli) -> None:
    database = WORKER.replace("def perform(", "def __init__(self): raise KeyError('no database')\n    def perform(")
    for source, says, says_not in (
        ("def f(:\n", "SyntaxError", "importlib"),
        ("import not_there\n", 'app.py", line 1, in <module>\n    import not_there\n', "loading.py"),
        (database, "KeyError: 'no database'\nlowq: the node could not start", "lowq/node/node.py"),
    ):
        with case(source):
            (start.folder / "app.py").write_text(source)
            process = start("-r", "app.py", "--redis-url", cli.url)
            assert process.wait() == 1
            text = process.err.read_text()
            assert says in text
            assert says_not not in text
            assert text.splitlines()[-1].startswith("lowq: ")


def test_a_node_that_cannot_start_says_why(start: Start, cli: Cli) -> None:
    (start.folder / "app.py").write_text(WORKER + "lowq.config.strict_shards_count = True\n")
    cli.app.queue("Orders", 4).push({"id": 1})
    for args, code, says in (
        (["-q", "Ordrs", "--redis-url", cli.url], 2, "the queues of this app are: Orders, Mails"),
        (["--redis-url", cli.url], 1, "shards_count=4"),
        (["--redis-url", "redis://127.0.0.1:1/0"], 1, "LOWQ_REDIS_URL, or try it without Redis: --embedded\n"),
    ):
        process = start("-r", "app.py", *args)
        assert process.wait() == code
        assert says in process.err.read_text()
        assert "Traceback" not in process.err.read_text()


@pytest.mark.parametrize("more", [[], ["--processes", "1"]])
def test_who_reads_json_gets_nothing_else_though_the_code_is_broken(start: Start, more: list[str]) -> None:
    (start.folder / "app.py").write_text("import there_is_no_such_module\n")
    process = start("-r", "app.py", "--log-format", "json", *more)
    assert process.wait() == 1
    lines = [json.loads(line) for line in process.err.read_text().splitlines()]
    (line,) = [line for line in lines if line.get("event") == "failed_to_start"]
    assert "it could not be imported (ModuleNotFoundError" in line["message"]
    assert line["exception"].startswith("Traceback")
    assert line["exception"].count("app.py") == 1
    assert lines[-1 if not more else -2]["level"] == "CRITICAL"


def test_who_reads_json_gets_no_other_line_when_redis_is_away(start: Start) -> None:
    (start.folder / "app.py").write_text(WORKER)
    process = start("-r", "app.py", "--log-format", "json", "--redis-url", "redis://127.0.0.1:1/0")
    assert process.wait() == 1
    assert "does not answer" in [json.loads(line) for line in process.err.read_text().splitlines()][-1]["message"]


def test_r_gives_other_verbs_the_settings_of_the_application(start: Start, cli: Cli) -> None:
    (start.folder / "settings.py").write_text(SETTINGS)
    process = start("push", "-r", "settings", "Orders", "--id", "1", "--shards-count", "2", "--redis-url", cli.url)
    assert process.wait() == 0
    assert cli.json("stats", "--namespace", "code")["queues"][0]["length"] == 1


def test_the_embedded_store_serves_a_second_terminal(start: Start) -> None:
    (start.folder / "app.py").write_text(WORKER)
    node = start("-r", "app.py", "--embedded")
    url = node.until(lambda: re.search(r"redis://127\.0\.0\.1:\d+/0", node.out.read_text()))[0]
    cli = Cli(url)
    node.until(lambda: cli.json("nodes")["nodes"])
    try:
        jobs = [{"id": number, "payload": {"text": "\r\n" * number}} for number in range(200)]
        assert cli.json("push", "Orders", stdin="\n".join(map(json.dumps, jobs)))["accepted"] == 200
        node.until(lambda: len(performed(start.folder)) == 200)
        node.until(lambda: cli.json("stats", "Orders")["total"]["processed"] == 200)
        cli("push", "Orders", "--id", "bad1")
        node.until(lambda: cli.json("stats")["total"]["morgue_length"] == 1)
        assert "no such order" in cli("peek", "Orders", "bad1").stdout
        (start.folder / "repaired").touch()
        assert cli("kick", "Orders", "bad1").stdout == "bad1: kicked\n"
        node.until(lambda: "bad1" in performed(start.folder))
        assert cli.json("shards", "Orders")["shards"][0]["owner"] is not None
        assert "namespace 'lowq' on a store in its own process" in node.err.read_text()
        assert node.ends_after(signal.SIGINT) == 0  # although the connections of `cli.app` are open
    finally:
        cli.app.close()
    assert (start.folder / "threads.txt").read_text().split() == ["MainThread", "lowq-process-end"]
    assert node.err.read_text().count("Traceback") == 1  # that of the handler


def test_a_second_node_works_on_the_embedded_store(start: Start, tmp_path_factory: pytest.TempPathFactory) -> None:
    (start.folder / "app.py").write_text(WORKER)
    first = start("-r", "app.py", "-q", "Mails", "--embedded")
    url = first.until(lambda: re.search(r"redis://127\.0\.0\.1:\d+/0", first.out.read_text()))[0]
    start.folder = tmp_path_factory.mktemp("second")
    (start.folder / "app.py").write_text(WORKER)
    second = start("-r", "app.py", "-q", "Orders", "--redis-url", url)
    cli = Cli(url)
    try:
        second.until(lambda: len(cli.json("nodes")["nodes"]) == 2)
        cli("push", "Orders", "--id", "1")
        second.until(lambda: performed(start.folder) == ["1"])
        assert second.ends_after(signal.SIGTERM) == 0
        assert first.ends_after(signal.SIGTERM) == 0
    finally:
        cli.app.close()


def test_push_says_where_to_go_on_when_redis_goes_away(start: Start) -> None:
    lines = [b'{"id": %d}\n' % number for number in range(5_001)]
    with RedisServer(appendonly="yes") as server:
        cli = Cli(server.url)
        process = start("push", "Orders", "--shards-count", "3", "--redis-url", server.url, stdin=subprocess.PIPE)
        stdin = process.process.stdin
        assert stdin is not None
        stdin.write(b"".join(lines[:-1]))
        stdin.flush()
        process.until(lambda: cli.app.queues() and cli.app.queue("Orders").stats().length == 5_000)
        server.kill()  # before or after it has read the replies
        stdin.write(lines[-1])
        stdin.close()
        assert process.wait() == 1
        said = re.search(
            r"; ([0-9,]+) payloads in; go on with: lowq push Orders - --skip ([0-9]+)\n$", process.err.read_text()
        )
        assert said is not None, process.err.read_text()
        assert int(said[2]) <= int(said[1].replace(",", "")) <= 5_000
        server.start()
        file = start.folder / "jobs"
        file.write_bytes(b"".join(lines))
        again = start("push", "Orders", str(file), "--skip", said[2], "--redis-url", server.url)
        assert again.wait() == 0, again.err.read_text()
        assert cli.app.queue("Orders").stats().length == 5_001
        cli.app.close()


def test_watch_looks_again_and_ends_with_ctrl_c(start: Start, cli: Cli) -> None:
    cli.push({"id": 1})
    process = start("stats", "--watch", "0.1", "--redis-url", cli.url)
    process.until(lambda: process.out.read_text().count("QUEUE") >= 3)
    assert process.ends_after(signal.SIGINT) == 0
    assert process.err.read_text() == ""
    assert "PER S" in process.out.read_text()


#: Starts a program as a shell does in the background of a script: with INT ignored; and here TERM, too.
IGNORING = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.execv(sys.executable, [sys.executable, "-P", "-m", "lowq", *sys.argv[1:]])
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("command", often(["stats", "web", "run", "processes", "push"], ["processes"]))
def test_commands_heed_signals_that_they_were_started_to_ignore(
    start: Start, cli: Cli, command: str, number: signal.Signals
) -> None:
    (start.folder / "app.py").write_text(WORKER)
    cli.push({"id": 1})
    args, sign = {
        "stats": (["stats", "--watch", "0.1"], "QUEUE"),
        "web": (["web", "--bind", "127.0.0.1:0"], "Ctrl-C ends it"),
        "run": (["run", "-r", "app.py"], "shards held: 8"),
        "processes": (["run", "-r", "app.py", "--processes", "1"], "is ready"),
        "push": (["push", "Orders", "-"], ""),
    }[command]
    more = {"stdin": subprocess.PIPE} if command == "push" else {}
    process = start(*args, "--redis-url", cli.url, program=["-c", IGNORING], **more)
    if command == "push":
        stdin = process.process.stdin
        assert stdin is not None
        stdin.write(b"".join(b'{"id": %d}\n' % order for order in range(5_000)))
        stdin.flush()
        process.until(lambda: cli.app.queue("Orders").stats().length == 5_000)  # id 1 is one of them
    process.until(lambda: sign in process.out.read_text() + process.err.read_text())
    code = process.ends_after(number)
    # Where a command has no handler of its own for TERM, the signal ends it.
    ends = {
        ("stats", signal.SIGINT): 0,
        ("web", signal.SIGINT): 130,
        ("push", signal.SIGINT): 130,
        ("run", number): 0,
        ("processes", number): 0,
    }
    assert code == ends.get((command, number), -number)
    assert "Traceback" not in process.err.read_text()


def test_a_reader_that_goes_away_is_no_error(start: Start, cli: Cli) -> None:
    cli.push(*({"id": f"{number:0500}"} for number in range(500)))
    process = start("jobs", "Orders", "--limit", "500", "--redis-url", cli.url, stdout=subprocess.PIPE)
    assert process.process.stdout is not None
    process.process.stdout.read(10)
    process.process.stdout.close()
    process.wait()
    assert "Traceback" not in process.err.read_text()
    assert "Error" not in process.err.read_text()


# --- on a terminal ---


class Terminal:
    """A pseudo-terminal that a process runs on."""

    def __init__(self) -> None:
        self._main, self.end = pty.openpty()
        self._output = selectors.PollSelector()
        self._output.register(self._main, selectors.EVENT_READ)
        self.text = ""

    def until(self, pattern: str) -> None:
        until(lambda: re.search(pattern, self._read()), f"{pattern!r} on the terminal")

    def _read(self) -> str:
        if self._output.select(0.1):
            self.text += os.read(self._main, 65536).decode(errors="replace")
        return self.text

    def type(self, text: str) -> None:
        os.write(self._main, text.encode())

    def close(self) -> None:
        os.close(self._main)
        os.close(self.end)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    terminal = Terminal()
    yield terminal
    terminal.close()


def test_on_a_terminal_it_asks_first(start: Start, cli: Cli, terminal: Terminal) -> None:
    cli.push({"id": 1}, {"id": 2})
    for answer, code, said, left in (("n", 1, "nothing was done", 2), ("y", 0, "2 jobs deleted", 0)):
        streams = {"stdin": terminal.end, "stdout": terminal.end, "stderr": terminal.end}
        process = start("delete", "Orders", "--all", "--redis-url", cli.url, **streams)
        terminal.until(r"delete 2 waiting jobs of queue 'Orders'.*\? \[y/N\]: $")
        terminal.type(f"{answer}\n")
        assert process.wait() == code
        terminal.until(said)
        assert cli.app.queue("Orders").stats().length == left


def test_on_a_terminal_long_work_shows_progress_and_watch_stays_in_place(
    start: Start, cli: Cli, terminal: Terminal
) -> None:
    path = start.folder / "jobs.ndjson"
    path.write_text("".join(f'{{"id": {number}}}\n' for number in range(60_000)))
    push = start("push", "Orders", path.name, "--shards-count", "3", "--redis-url", cli.url, stderr=terminal.end)
    terminal.until(r"\[#+\.*\] +\d+%  [\d,]+ jobs  [\d,]+/s")
    assert push.wait() == 0
    assert push.out.read_text() == "60,000 payloads pushed to Orders\n"
    doctor = start("doctor", "--redis-url", cli.url, stderr=terminal.end)
    terminal.until(r"\[#+\.*\] +\d+%  [\d,]+ ids and keys  [\d,]+/s")
    assert doctor.wait() == 1  # nobody works the queue
    watch = start("stats", "--watch", "0.1", "--redis-url", cli.url, stdout=terminal.end)
    terminal.until(r"(?s)Orders +60,000.*\x1b\[3F\x1b\[J")
    assert watch.ends_after(signal.SIGINT) == 0
