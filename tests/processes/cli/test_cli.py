"""The command line as people use it: every verb against a real Redis; nodes and terminals as real processes."""

import json
import os
import pty
import re
import selectors
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lowq.cli import main
from lowq.observe.error_groups import error_fingerprint
from lowq.observe.histories import BOUNDS, WAIT_BOUNDS
from lowq.observe.tallies import Counted, EndedBatch, record_call
from lowq.store.keys import nodes_key
from tests.processes.cli.support import WORKERS, Cli, Start, lines_of, working_in
from tests.redis_server import RedisServer
from tests.rows import case
from tests.rules.support import run_script
from tests.waiting import PATIENCE, until

# --- verbs that look, in this process ---


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
    for verb, says, document in (
        ("stats", "no queue has been used yet\n", None),
        ("statistics", "no queue has been used yet\n", {"queues": []}),
        ("nodes", "no node is running\n", {"nodes": [], "lost": []}),
        ("times", "no node has worked any queue in that time\n", {"span": "hour", "queues": []}),
    ):
        with case(verb):
            assert cli(verb).stderr == says
            assert document is None or cli.json(verb) == document


def test_statistics_in_the_words_of_tarantools_queue(cli: Cli) -> None:
    cli.push({"id": 1}, {"id": 2, "delay": 60})
    cli.app.queue("Mails", 1).push({"id": 1})
    assert cli("delete", "Orders", "1").exit_code == 0
    lines = lines_of(cli("statistics", "Orders"))
    assert lines[:2] == ["Orders", "  tasks:"]
    assert {"    ready: 0", "    delayed: 1", "    total: 1", "    done: 1", "  calls:", "    delete: 1"} <= set(lines)
    assert [line for line in lines_of(cli("statistics")) if not line.startswith(" ")] == ["Mails", "Orders"]
    (found,) = cli.json("statistics", "Mails")["queues"]
    assert (found["name"], found["tasks"]["ready"]) == ("Mails", 1)


def test_stats_of_all_queues_and_of_those_named(cli: Cli) -> None:
    cli.push({"id": 1}, {"id": 2, "delay": 60})
    cli.app.queue("Mails", 1).push({"id": 1})
    header, mails, orders, total = lines_of(cli("stats"))
    assert header.split()[:8] == ["QUEUE", "LENGTH", "DUE", "LATER", "RETRIES", "RUNNING", "DEAD", "LATENCY"]
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
    for verb in ("stats", "statistics", "jobs", "kick", "shards", "errors", "drop"):
        with case(verb):
            args = [verb, "Ordrs", "1"] if verb == "kick" else [verb, "Ordrs"]
            said = cli(*args, code=2).stderr
            assert said.startswith("lowq: queue 'Ordrs' does not exist")
            assert "did you mean 'Orders'?" in said
            assert said.count("\n") == 1
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
    soon = time.time() + 1800
    cli.push({"id": "a1"}, {"id": "a2", "perform_at": soon}, {"id": "b1", "perform_at": 5e9})

    def ids(*args: str) -> list[str]:
        return [job["id"] for job in cli.json("jobs", "Orders", *args)["jobs"]]

    assert ids("--state", "due") == ["a1"]
    assert ids("--match", "a*", "--reverse") == ["a2", "a1"]
    assert ids("--order-by", "id", "--min", "a2", "--max", "b0") == ["a2"]
    assert ids("--min", "4000000000") == ids("--min", "2100-01-01T00:00Z") == ids("--min", "+1h") == ["b1"]
    assert ids("--min", "-2h", "--max", "+60 min") == ["a1", "a2"]
    assert cli("jobs", "Orders", "--state", "morgue").stderr == "no such job\n"
    refused = cli("jobs", "Orders", "--max", "+" + "9" * 400 + "d", code=2).stderr
    assert refused.startswith("lowq: --max ")
    assert "or -2h, +30min" in refused
    assert "it is a number\n" in cli("jobs", "Orders", "--order-by", "retry_count", "--min", "-2h", code=2).stderr


def test_jobs_of_all_queues_and_by_what_is_in_them(cli: Cli) -> None:
    for queue in ("Mail", "Orders"):
        cli.app.queue(queue, 3).push({"id": f"{queue}-7", "payload": {"customer": 7}})
    page = cli.json("jobs", "--payload", "customer:7", "--limit", "1")
    assert [(job["queue"], job["id"]) for job in page["jobs"]] == [("Mail", "Mail-7")]
    rest = cli.json("jobs", "--payload", "customer:7", "--after", page["cursor"])
    assert [(job["queue"], job["id"]) for job in rest["jobs"]] == [("Orders", "Orders-7")]
    text = cli("jobs", "--payload", "customer:7")
    assert [line.split()[:2] for line in lines_of(text)] == [
        ["QUEUE", "ID"],
        ["Mail", "Mail-7"],
        ["Orders", "Orders-7"],
    ]
    assert text.stderr == "2 jobs looked at\n"
    assert cli("jobs", "--error", "Timeout").stderr == "no such job\n2 jobs looked at\n"
    assert "it is a field and its value" in cli("jobs", "--payload", "customer", code=2).stderr


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


def test_an_id_in_flight_with_more_that_waits_and_is_buried_is_shown_three_times(
    cli: Cli, in_flight: Callable[..., None]
) -> None:
    queue = cli.app.queue("Orders", 1)
    queue.push({"id": 1})
    queue.bury(1, reason="by hand")
    in_flight({"id": 1, "payload": "now"})
    queue.push({"id": 1, "payload": "next"})
    jobs = cli.json("peek", "Orders", "1")["jobs"]
    assert [(job["state"], job["payloads"][0][0]) for job in jobs] == [
        ("taken", "now"), ("due", "next"), ("morgue", "")
    ]  # fmt: skip
    assert [line.split()[1].strip(",") for line in lines_of(cli("peek", "Orders", "1")) if line[0] == "1"] == [
        "taken", "due", "morgue"
    ]  # fmt: skip
    rows = lines_of(cli("why", "Orders", "1"))[1:]
    assert [row.split()[1] for row in rows] == ["taken", "morgue"]
    assert "also buried" in rows[1]
    assert cli.json("why", "Orders", "1")["why"][0]["buried_at"] == jobs[2]["buried_at"]


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
        result = CliRunner().invoke(main, ["--redis-url", cli.url, *args])
        assert result.exception is None or isinstance(result.exception, SystemExit)
        assert all(char.isprintable() or char == "\n" for char in result.output)


def record(cli: Cli, queue: str, after: Counted, **more: Any) -> None:
    """As a node does that has counted so much."""
    nothing = Counted(0, 0, 0.0, (0,) * (len(BOUNDS) + 1))
    call = record_call(f"lowq:v1:history:{queue}", nothing, after, 5.0, **more)
    cli.app.client.call(call)


def counted(runs: int, longest: int = 0, **more: Any) -> Counted:
    """So many batches that took 2.5 ms, and so many that took longer than is told apart."""
    return Counted(0, 0, 0.0, (*(runs if bound == 0.0025 else 0 for bound in BOUNDS), longest), **more)


def test_rates_tell_the_clock_and_leave_out_a_lag_that_nobody_saw(cli: Cli) -> None:
    cli.app.queue("Orders", 1).push({"id": 1})
    now = time.time()
    for at, lag in ((now - 3000, 61.0), (now - 1000, None)):
        record(cli, "Orders", counted(0)._replace(processed=50), lag=lag, now=at)
    header, first, second = lines_of(cli("rates", "Orders"))
    assert re.split(r"  +", header) == ["FROM", "WHICH WAS", "PERFORMED/S", "FAILED/S", "LATENCY"]
    assert re.fullmatch(r"\d\d:\d\d:\d\d  +(49|50|51) min( \d+ s)? ago  .*  1 min 1 s", first)
    assert re.search(r" 0\.0$", second.rstrip())
    assert re.match(r"\w{3} \d\d:\d\d  ", lines_of(cli("rates", "Orders", "--span", "day"))[1])
    assert re.match(r"\d\d-\d\d \d\d:\d\d  ", lines_of(cli("rates", "Orders", "--span", "month"))[1])


def test_times_tell_percentiles_and_the_slowest(cli: Cli) -> None:
    cli.app.queue("Orders", 1).push({"id": 1})
    assert "no node has worked this queue" in cli("times", "Orders").stderr
    after = counted(9, longest=1, waits=(*(0 for _ in WAIT_BOUNDS), 4), waited=1e6)
    slow = [(60.0, EndedBatch("a\x1b[2J", 7, 0, 0.0125, 0.0)), (0.0, EndedBatch("b", 1, 0, 3700.0, 0.0))]
    record(cli, "Orders", after, lag=None, slow=slow)
    header, first, total, *_ = lines_of(cli("times", "Orders", "--span", "month"))
    figures = ["JOBS", "WAIT P50", "WAIT P95", "WAIT P99", "BATCHES", "RUN P50", "RUN P95", "RUN P99"]
    assert re.split(r"  +", header)[2:] == figures
    for line in (first, total):
        assert re.split(r"  +", line)[-8:] == ["4", *["> 1 d"] * 3, "10", "2.5 ms", "> 5 min", "> 5 min"]
    slowest = [re.split(r"  +", line.strip()) for line in lines_of(cli("times", "Orders"))[-2:]]
    assert [(line[0], *line[2:]) for line in slowest] == [
        ("1 h 1 min", "0", "1", "b"), ("12.5 ms", "0", "7", r"a\x1b[2J")
    ]  # fmt: skip
    found = cli.json("times", "Orders", "--span", "day")
    assert found["run"] == {"count": 10, "p50": 0.0025, "p95": None, "p99": None}
    assert [item["id"] for item in found["slowest"]] == ["b", "a\x1b[2J"]


def test_times_of_all_queues_have_a_row_for_each_that_was_worked(cli: Cli) -> None:
    for name, count in (("B", 10), ("A", 3), ("Idle", 0)):
        cli.app.queue(name, 1).push({"id": 1})
        if count:
            record(cli, name, counted(count), lag=None)
    header, *rows = [re.split(r"  +", line.strip()) for line in lines_of(cli("times"))]
    assert [header[0], header[5]] == ["QUEUE", "BATCHES"]
    assert rows == [["A", "0", "3", *["2.5 ms"] * 3], ["B", "0", "10", *["2.5 ms"] * 3]]
    assert cli.json("times", "--span", "day")["queues"][0] == {
        "queue": "A",
        "wait": {"count": 0, "p50": 0.0, "p95": 0.0, "p99": 0.0},
        "run": {"count": 3, "p50": 0.0025, "p95": 0.0025, "p99": 0.0025},
    }


def test_errors_tell_what_fails_most_or_what_failed_last(cli: Cli) -> None:
    assert "nothing has failed in the last 30 days" in cli("errors").stderr
    now = time.time()
    for queue, count, ago, text in (("A", 7, 7200.0, "E: \x1b[2J most"), ("B", 2, 60.0, "E: latest")):
        cli.app.queue(queue, 1).push({"id": 1})
        words: list[Any] = [repr(now - ago), 200, 3600, "0123456789ab", count, "7", text]
        run_script(cli.app.client, "record_errors", f"lowq:v1:error_groups:{queue}", *words)
    header, *rows = [re.split(r"  +", line.strip()) for line in lines_of(cli("errors"))]
    assert header == ["COUNT", "24 H", "LAST", "FIRST", "QUEUE", "GROUP", "ID", "ERROR"]
    assert [(row[0], *row[4:]) for row in rows] == [
        ("7", "A", "0123456789ab", "7", r"E: \x1b[2J most"), ("2", "B", "0123456789ab", "7", "E: latest")
    ]  # fmt: skip
    assert [group["queue"] for group in cli.json("errors", "--sort", "last")["errors"]] == ["B", "A"]
    assert [group["queue"] for group in cli.json("errors", "A")["errors"]] == ["A"]


# --- verbs that act, in this process ---


def test_a_group_of_errors_is_kicked(cli: Cli) -> None:
    cli.push(*({"id": str(n), "payload": {"customer": n % 2}} for n in range(4)))
    cli("bury", "Orders", "0", "1", "2", "--reason", "ValueError: no order 7")
    cli("bury", "Orders", "3", "--reason", "TimeoutError: too slow")
    group = error_fingerprint("ValueError: no order 12")
    assert len(cli.json("jobs", "Orders", "--state", "morgue", "--error-group", group)["jobs"]) == 3
    assert cli("kick", "Orders", "--error-group", group, "-y").stdout == "3 jobs kicked\n"
    assert cli("kick", "Orders", "--payload", "customer:1", "-y").stdout == "1 job kicked\n"
    assert "--all and --error say two things" in cli("kick", "Orders", "--all", "--error", "x", "-y", code=2).stderr
    cli("kick", "Orders", "7", "--shard", "1", "-y", code=2)


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
    assert [job.payloads[0][1] for job in queue.fetch(["1", job_id]).values()] == [7, 8]
    said = cli("push", "Orders", "--id", "1", code=2).stderr
    assert "the field 'version', from which the queue 'Orders' takes the score" in said


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
    said = cli("push", "Orders", str(path), "--shards-count", "3", code=1).stderr
    assert "line 11001" in said
    found = re.search(r"10,000 payloads in; go on with: lowq (push Orders .* --skip 10000)$", said.strip())
    assert found is not None
    assert cli.app.queue("Orders").stats().length == 10_000
    path.write_text("\n".join(good))
    assert cli.json(*shlex.split(found[1]))["accepted"] == 2_000
    assert cli.app.queue("Orders").stats().length == 12_000


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


def test_jobs_are_cancelled_running_or_not(cli: Cli, in_flight: Callable[..., None]) -> None:
    in_flight({"id": 1})
    cli.push({"id": 2, "delay": 60})
    told, deleted, absent = cli("cancel", "Orders", "1", "2", "3", code=1).stdout.splitlines()
    assert (told, deleted) == ("1: running, told to end", "2: cancelled")
    assert absent == "3: no such job waits, is in flight or is buried; of what was performed nothing is kept"
    assert "it was cancelled, and has not ended yet" in cli("why", "Orders", "1").stdout
    assert cli.json("cancel", "Orders", "1") == {
        "action": "cancel", "queue": "Orders", "done": 1, "signalled": 1, "in_flight": 0, "missing": 0,
        "ids": {"1": "signalled"},
    }  # fmt: skip
    assert cli("cancel", "Orders", "-", stdin="1\n").stdout == "1 cancelled; of these 1 running, told to end\n"
    assert "which jobs? lowq cancel Orders ID..." in cli("cancel", "Orders", code=2).stderr
    cli.push({"id": 4})
    asked = cli("cancel", "Orders", "--all", code=2)
    assert "cancel 2 waiting or running jobs of queue 'Orders'" in asked.stderr
    assert cli("cancel", "Orders", "--state", "taken", "--yes").stdout == "1 job cancelled\n"
    assert cli.json("cancel", "Orders", "--match", "4*", "--yes")["done"] == 1


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


def test_many_jobs_of_all_queues_at_once(cli: Cli) -> None:
    for name in ("Orders", "Mails"):
        queue = cli.app.queue(name, 2)
        queue.push({"id": n} for n in range(3))
        queue.bury(range(3), "Timeout")
    asked = cli("kick", "--all-queues", "--error", "timeout", code=2)
    assert "this would kick 6 buried jobs of all queues with the error 'timeout'; add --yes" in asked.stderr
    assert cli("kick", "--all-queues", "--error", "timeout", "-y").stdout == "6 jobs kicked\n"
    assert cli.json("delete", "--all-queues", "--all", "-y") == {
        "action": "delete", "queue": None, "done": 6, "total": 6, "in_flight": 0,
    }  # fmt: skip
    for args in (["--all"], ["Orders", "--all-queues", "--all"], ["--all-queues"]):
        with case(args):
            assert "--all-queues" in cli("kick", *args, code=2).stderr
    assert "kick all queues 6" in " ".join(cli("audit").stdout.split())


def test_a_backfill_is_undone_by_its_priority_and_age(cli: Cli) -> None:
    cli.push({"id": "live"}, *({"id": f"old-{number}", "priority": 9} for number in range(3)))
    cli.push({"id": "later", "priority": 9, "delay": 7200})
    listed = [line.split()[0] for line in lines_of(cli("jobs", "Orders", "--priority", "9", "--older-than", "0"))[1:]]
    assert listed == ["old-0", "old-1", "old-2"]
    refused = cli("delete", "Orders", "--priority", "9", "--newer-than", "2h", code=2)
    assert "delete 4 waiting jobs of queue 'Orders' of priority 9 newer than 2 h; add --yes" in refused.stderr
    assert cli("delete", "Orders", "--priority", "9", "--older-than", "1d", "-y").stdout == "0 jobs deleted\n"
    assert cli("delete", "Orders", "--priority", "9", "--newer-than", "2h", "-y").stdout == "4 jobs deleted\n"
    assert [job.id for job in cli.app.queue("Orders").jobs()] == ["live"]
    for options, said in (
        (["--newer-than", "soon"], "'soon' is no age, such as 90 (seconds), 30min, 2h or 7d"),
        (["--older-than=-5"], "older_than=-5.0 must be seconds"),
        (["--priority", "10"], "10 is not in the range 0<=x<=9"),
        (["--priority", "3", "--state", "morgue"], "jobs in the morgue have none"),
    ):
        with case(options):
            assert said in cli("delete", "Orders", *options, "-y", code=2).stderr


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


def test_a_queue_is_paused_resumed_released_and_dropped(cli: Cli) -> None:
    cli.push({"id": 1}, {"id": 2})
    assert cli("pause", "Orders").stdout == "Orders: paused\n"
    assert cli("pause", "Orders").stdout == "Orders: was paused already\n"
    assert lines_of(cli("stats", "Orders"))[1].endswith("paused")
    assert cli.json("resume", "Orders") == {"queue": "Orders", "paused": False, "changed": True}
    assert cli("resume", "Orders").stdout == "Orders: was not paused\n"
    assert cli("release-all", "Orders").stdout == "0 jobs released\n"
    assert cli.json("release-all", "Orders") == {"queue": "Orders", "released": 0, "in_flight": 0}
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


def test_the_settings_of_an_application_are_those_of_a_verb(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "shop_settings.py").write_text("import lowq\napp = lowq.Lowq(namespace='code')\n")
    with working_in(tmp_path):
        cli("push", "-r", "shop_settings", "Orders", "--id", "1", "--shards-count", "2")
    assert cli.json("stats", "--namespace", "code")["queues"][0]["length"] == 1


def test_a_node_that_died_is_named_with_the_threads_and_tasks_that_performed(cli: Cli) -> None:
    batches = [
        {"queue": "Orders", "shard": shard, "ids": [str(shard)], "count": 1, "seconds": 5.0} for shard in range(2)
    ]
    details = json.dumps({"performing": [None, batches[0]], "longest_tasks": [batches[1]]})
    at = time.time() - 100
    cli.app.client.command("HSET", nodes_key("lowq"), "host:1:dead", f"{at} 45 0 {details}", key=nodes_key("lowq"))
    lines = cli("nodes").stderr.splitlines()
    assert lines[0].startswith("LOST: host:1:dead, no heartbeat since 1 min")
    assert lines[1:] == [
        "  host:1:dead thread 1: Orders shard 0, id 0, for 5.0 s",
        "  host:1:dead task: Orders shard 1, id 1, for 5.0 s",
        "no node is running",
    ]
    assert [node["name"] for node in cli.json("nodes")["lost"]] == ["host:1:dead"]


# --- nodes, as processes ---


def test_a_node_runs_until_it_is_told_to_stop(start: Start, cli: Cli) -> None:
    logging = "import logging\n" + WORKERS.replace(
        "raise Val", "logging.getLogger('shop').warning('no')\n" + 16 * " " + "raise Val"
    )
    cli.push({"id": 1}, {"id": "bad"})
    options = ["--log-level", "debug", "--log-format", "json", "run", "-r", "app", "-q", "Orders", "-t", "2"]
    node = start(*options, "--redis-url", cli.url, app=logging, environment={"LOWQ_LEASE_TTL": "4"})
    node.until(lambda: (stats := cli.app.queue("Orders").stats()).morgue_length == stats.processed == 1)
    (found,) = cli.json("nodes")["nodes"]
    assert (found["pid"], found["queues"], found["threads"]) == (node.process.pid, ["Orders"], 2)
    told = cli("nodes")
    assert found["name"] in told.stdout
    assert "as of its heartbeat" in told.stderr
    assert found["name"] in cli("shards", "Orders").stdout
    assert "can't be dropped" in cli("drop", "Orders", "--yes", code=1).stderr
    assert "no node 'nobody' lives" in cli("quiet", "nobody", code=1).stderr
    cli("quiet", found["name"])
    node.until(lambda: cli.app.nodes()[0].quiet)
    cli("stop", found["name"])
    assert node.wait() == 0
    assert node.out == ""
    records = [json.loads(line) for line in node.err.splitlines()]
    events = {record["event"]: record for record in records if "event" in record}
    assert {"start", "job_start", "failed", "stop", "stopped"} <= set(events)
    assert events["failed"]["queue"] == "Orders"
    assert events["failed"]["exception"].endswith("ValueError: no such order")
    (line,) = [record for record in records if record["logger"] == "shop"]
    assert (line["message"], line["queue"], line["ids"], line["delivery"]) == ("no", "Orders", ["bad"], 1)


def test_the_command_line_wins_over_code_and_code_over_the_environment(start: Start, cli: Cli) -> None:
    """And the logging that it has set up stays."""
    settings = "import logging\nlowq.config.redis_url = 'redis://127.0.0.1:1/0'\nlowq.config.namespace = 'code'\n"
    mine = "logging.basicConfig(format='mine: %(queue)s %(ids)s %(message)s')\n"
    environment = {"LOWQ_NAMESPACE": "environment", "LOWQ_THREADS_PER_NODE": "3"}
    args = ["-r", "app.py", "--redis-url", cli.url, "--log-level", "warning"]
    node = start(*args, app=WORKERS + settings + mine, environment=environment)
    (found,) = node.until(lambda: cli.json("nodes", "--namespace", "code")["nodes"])
    assert found["threads"] == 3
    cli("push", "Orders", "--namespace", "code", "--id", "bad")
    node.until(lambda: "mine: Orders ['bad'] " in node.err)
    assert node.ends_after(signal.SIGTERM) == 0


def test_a_node_that_cannot_start_says_why(cli: Cli, tmp_path: Path) -> None:
    cli.app.queue("Orders", 4).push({"id": 1})
    strict = "lowq.config.strict_shards_count = True\n"
    unprepared = WORKERS.replace("def perform(", "def __init__(self): raise KeyError('no database')\n    def perform(")
    for number, (source, args, code, says) in enumerate((
        ("def f(:\n", [], 1, "SyntaxError"),
        ("import not_there\n", [], 1, 'app_1.py", line 1, in <module>\n    import not_there\n'),
        (unprepared, [], 1, "KeyError: 'no database'\nlowq: the node could not start"),
        (WORKERS, ["-q", "Ordrs"], 2, "the queues of this app are: Orders, Mails"),
        (WORKERS + strict, [], 1, "shards_count=4"),
    )):  # fmt: skip
        (tmp_path / f"app_{number}.py").write_text(source)
        with case(says), working_in(tmp_path):
            said = cli("run", f"app_{number}.py", "--check", *args, code=code).stderr
            assert says in said
            assert "lowq/cli" not in said
            assert said.splitlines()[-1].startswith("lowq: ")


def test_a_wrong_variable_is_named_and_ends_a_command_with_exit_code_2(start: Start, tmp_path: Path) -> None:
    """Where systemd does not start the node anew."""
    number = "lowq: environment variable LOWQ_THREADS_PER_NODE: threads_per_node='five'"
    process = start("run", "app.py", environment={"LOWQ_THREADS_PER_NODE": "five"})
    assert (process.wait(), number in process.err, "Traceback" in process.err) == (2, True, False), process.err
    (tmp_path / "app.py").write_text(WORKERS)
    for variable, value, says in (
        ("LOWQ_HEALTH", "abc", "(env var: 'LOWQ_HEALTH'): 'abc' is no address"),
        ("LOWQ_REDIS_URL", "redis://127.0.0.1:1/orders", "(LOWQ_REDIS_URL): the database must be a number"),
    ):
        with case(variable), working_in(tmp_path):
            ended = CliRunner(env={variable: value}).invoke(main, ["run", "app.py", "--check"])
            assert (ended.exit_code, says in ended.stderr) == (2, True), ended.output


def test_who_reads_json_gets_nothing_else_though_the_code_is_broken_or_redis_is_away(start: Start) -> None:
    for app, more, says in (
        ("import there_is_no_such_module\n", [], "it could not be imported (ModuleNotFoundError"),
        (WORKERS, ["--redis-url", "redis://127.0.0.1:1/0"], "LOWQ_REDIS_URL, or try it without Redis: --embedded"),
    ):
        with case(app, more):
            process = start("-r", "app.py", "--log-format", "json", *more, app=app)
            assert process.wait() == 1
            lines = [json.loads(line) for line in process.err.splitlines()]
            (line,) = [line for line in lines if line.get("event") == "failed_to_start"]
            assert says in line["message"]
            assert line["level"] == "CRITICAL"
            assert line.get("exception", "app.py").count("app.py") == 1


def test_the_embedded_store_serves_a_second_terminal_and_a_second_node(start: Start) -> None:
    first = start("-r", "app.py", "-q", "Mails", "--embedded")
    cli = Cli(first.address("store"))
    second = start("-r", "app.py", "-q", "Orders", "--redis-url", cli.url)
    try:
        second.until(lambda: len(cli.json("nodes")["nodes"]) == 2)
        jobs = [{"id": number, "payload": {"text": "\r\n" * number}} for number in range(200)]
        assert cli.json("push", "Orders", stdin="\n".join(map(json.dumps, jobs)))["accepted"] == 200
        second.until(lambda: cli.json("stats", "Orders")["total"]["processed"] == 200)
        cli("push", "Orders", "--id", "bad1")
        second.until(lambda: cli.json("stats")["total"]["morgue_length"] == 1)
        assert "no such order" in cli("peek", "Orders", "bad1").stdout
        (second.folder / "repaired").touch()
        assert cli("kick", "Orders", "bad1").stdout == "bad1: kicked\n"
        second.until(lambda: cli.json("stats", "Orders")["total"]["processed"] == 201)
        assert second.ends_after(signal.SIGTERM) == 0
        assert first.ends_after(signal.SIGINT) == 0  # although the connections of `cli.app` are open
    finally:
        cli.app.close()
    starts = "starts: 5 threads, 5 shards of Mails, namespace 'lowq' on a store in its own process"
    assert starts in first.err.splitlines()[0]
    assert second.err.count("Traceback") == 1  # that of the handler


def test_push_says_where_to_go_on_when_redis_goes_away(start: Start, tmp_path: Path) -> None:
    lines = [b'{"id": %d}\n' % number for number in range(5_001)]
    with RedisServer(appendonly="yes") as server:
        cli = Cli(server.url)
        process = start("push", "Orders", "--shards-count", "3", "--redis-url", server.url, stdin=subprocess.PIPE)
        process.stdin.write(b"".join(lines[:-1]))
        process.stdin.flush()
        process.until(lambda: cli.app.queues() and cli.app.queue("Orders").stats().length == 5_000)
        server.kill()  # before or after it has read the replies
        process.stdin.write(lines[-1])
        process.stdin.close()
        assert process.wait() == 1
        said = re.search(r"; ([0-9,]+) payloads in; go on with: lowq push Orders - --skip ([0-9]+)\n$", process.err)
        assert said is not None, process.err
        assert int(said[2]) <= int(said[1].replace(",", "")) <= 5_000
        server.start()
        cli("push", "Orders", "-", "--skip", said[2], stdin=b"".join(lines))
        assert cli.app.queue("Orders").stats().length == 5_001
        cli.app.close()


#: Starts a program as a shell does in the background of a script: with INT ignored; and here TERM, too.
IGNORING = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.execv(sys.executable, [sys.executable, "-P", "-m", "lowq", *sys.argv[1:]])
"""


def test_commands_heed_signals_that_they_were_started_to_ignore(start: Start, cli: Cli) -> None:
    cli.push({"id": 1})
    rows: list[tuple[list[str], str, signal.Signals, int]] = [
        (["stats", "--watch", "0.1"], r"(?s)(QUEUE.*PER S.*){3}", signal.SIGINT, 0),
        (["run", "app.py", "--processes", "1"], "is ready", signal.SIGINT, 0),
    ]
    for args, sign, number, code in rows:
        with case(args, number):
            process = start(*args, "--redis-url", cli.url, program=[sys.executable, "-c", IGNORING])
            process.until(lambda process=process, sign=sign: re.search(sign, process.out + process.err))  # type: ignore[misc]
            assert process.ends_after(number) == code
            assert "Traceback" not in process.err


def test_a_reader_that_goes_away_is_no_error(start: Start, cli: Cli) -> None:
    cli.push(*({"id": f"{number:0500}"} for number in range(500)))
    process = start("jobs", "Orders", "--limit", "500", "--redis-url", cli.url, stdout=subprocess.PIPE)
    assert process.process.stdout is not None
    process.process.stdout.read(10)
    process.process.stdout.close()
    process.wait()
    assert "Traceback" not in process.err
    assert "Error" not in process.err


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
        streams: dict[str, Any] = {"stdin": terminal.end, "stdout": terminal.end, "stderr": terminal.end}
        process = start("delete", "Orders", "--all", "--redis-url", cli.url, **streams)
        terminal.until(r"delete 2 waiting jobs of queue 'Orders'.*\? \[y/N\]: $")
        terminal.type(f"{answer}\n")
        assert process.wait() == code
        terminal.until(said)
        assert cli.app.queue("Orders").stats().length == left


def test_on_a_terminal_long_work_shows_progress_and_watch_stays_in_place(
    start: Start, cli: Cli, terminal: Terminal, tmp_path: Path
) -> None:
    path = tmp_path / "jobs.ndjson"
    path.write_text("".join(f'{{"id": {number}}}\n' for number in range(60_000)))
    for name in (str(path), "-"):
        with path.open("rb") as file:
            terminal.text, words = "", ["push", "Orders", name, "--shards-count", "3", "--redis-url", cli.url]
            push = start(*words, stderr=terminal.end, stdin=file)
            terminal.until(r"\[#+\.*\] +\d+%  [\d,]+ jobs  [\d,]+/s  .+ left")
            assert push.wait() == 0
            assert push.out == "60,000 payloads pushed to Orders\n"
    watch = start("stats", "--watch", "0.1", "--redis-url", cli.url, stdout=terminal.end)
    terminal.until(r"(?s)Orders +60,000.*\x1b\[3F\x1b\[J")
    assert watch.ends_after(signal.SIGINT) == 0
