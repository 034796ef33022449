"""`lowq put`, `take` and `consume`, as somebody types them."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import lowq
from lowq.queue import Queue
from tests.receiver import Receiver
from tests.redis_server import RedisServer
from tests.rows import case
from tests.waiting import PATIENCE, until

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def app(redis_url: str) -> Iterator[lowq.Lowq]:
    app = lowq.Lowq(redis_url=redis_url, lease_ttl=5)
    yield app
    app.close()


@pytest.fixture
def queue(app: lowq.Lowq) -> Queue:
    queue = app.queue("mail", 2)
    queue.push([])
    return queue


def command(redis_url: str, *words: str) -> list[str]:
    verb, *rest = words
    return [sys.executable, "-m", "lowq", verb, f"--redis-url={redis_url}", *rest]


@pytest.fixture
def run(redis_url: str) -> Run:
    def call(
        *words: str, code: int = 0, typed: str | None = None, cwd: Path | None = None
    ) -> "subprocess.CompletedProcess[str]":
        ran = subprocess.run(
            command(redis_url, *words), capture_output=True, text=True, timeout=PATIENCE, check=False, input=typed,
            cwd=cwd, errors="backslashreplace",
        )  # fmt: skip
        assert ran.returncode == code, ran.stderr
        return ran

    return call


def test_a_queue_with_a_typo_in_its_name_is_asked_about(queue: Queue, run: Run) -> None:
    for words in (["take", queue.name[:-1]], ["consume", queue.name[:-1], "--", "cat"]):
        assert f"did you mean {queue.name!r}? Its first producer says" in run(*words, code=2).stderr
    assert "touch: not counted" in run("statistics", queue.name).stdout


def test_what_is_put_is_taken(queue: Queue, run: Run) -> None:
    job_id = run("put", "mail", '{"to": "ann"}').stdout.strip()
    expected = {"id": job_id, "payloads": [{"to": "ann"}], "retry_count": -1}
    assert json.loads(run("take", "mail").stdout) == expected
    assert json.loads(run("take", "mail", "--json").stdout) == {"queue": "mail", "jobs": [expected]}
    assert json.loads(run("take", "mail", "--ack").stdout) == expected
    assert "nothing came" in run("take", "mail", code=1).stderr
    assert queue.stats().processed == 1


def test_what_is_put_may_come_from_the_standard_input_and_be_due_later(queue: Queue, run: Run) -> None:
    job_id = json.loads(run("put", "mail", "-", "--delay", "60", "--json", typed="[1, 2]").stdout)["id"]
    (job,) = queue.jobs("scheduled").jobs
    assert (job.id, job.payloads[0][0]) == (job_id, [1, 2])


def test_a_command_that_can_not_be_started_is_a_failure_and_an_id_that_no_command_can_be_told_is_dead_at_once(
    queue: Queue, run: Run
) -> None:
    queue.push({"id": "a"})
    run("consume", "mail", "--idle", "0.1", "--", "/nonexistent/{id}")
    (failed,) = queue.jobs("retrying").jobs
    assert "can't be started" in (failed.error or "")
    queue.push("a\x00b")
    said = run("consume", "mail", "--idle", "0.1", "--", "echo", "{id}").stderr
    assert "can't be started: embedded null byte" in said
    job = queue.peek("a\x00b")
    assert job is not None
    assert (job.state, job.error) == ("morgue", "echo can't be started: embedded null byte")


def test_figures_are_sent_to_graphite(queue: Queue, redis_url: str) -> None:
    queue.push([{"id": number} for number in range(3)])
    with Receiver() as graphite:
        words = "consume", "mail", "--graphite", f"127.0.0.1:{graphite.port}", "--", "true"
        with subprocess.Popen(command(redis_url, *words)) as process:
            last = b".queues.mail.processed 3 "
            try:
                until(lambda: any(last in line for line in graphite.lines), "the figures")
            finally:
                process.terminate()
    assert queue.statistics().tasks.done == 3


def test_a_queue_that_is_full_says_so_and_may_be_waited_for(
    app: lowq.Lowq, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # a long lag must not cut the last column off
    full = app.queue("full", 1, capacity=1)
    full.push({"id": 1})
    for verb in (["put", "full", '"x"'], ["push", "full", "--id", "2"]):
        assert "queue 'full' is full (capacity=1" in run(*verb, code=1).stderr
    assert "100% of capacity 1" in run("stats", "full").stdout
    full.clear()
    assert run("push", "full", "--id", "2", "--timeout", "30").stdout == "1 payload pushed to full\n"


def test_what_is_not_replicated_says_so_and_is_pushed_again(
    queue: Queue, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    queue.push([])
    monkeypatch.setenv("LOWQ_DURABILITY_TIMEOUT", "0.01")
    for verb in (["put", "mail", '"x"'], ["push", "mail", "--id", "1"]):
        said = run(*verb, "--durability", "replicated", code=1).stderr
        job = next(iter(queue.jobs())) if verb[0] == "put" else queue.peek("1")
        assert job is not None
        assert f"job {job.id} of mail is in, but not safe: 0 of 1 replica confirmed" in said
    file = tmp_path / "jobs.ndjson"
    file.write_text('{"id": 2}\n{"id": 3}\n')
    said = run("push", "mail", str(file), "--skip", "1", "--durability", "replicated", code=1).stderr
    assert "1 payload in, but not safe: 0 of 1 replica confirmed" in said
    assert f"1 payload in; go on with: lowq push mail {file} --skip 1" in said
    assert queue.stats().length == 3


def test_a_file_that_does_not_fit_goes_on_with_exactly_what_is_missing(
    app: lowq.Lowq, redis_url: str, tmp_path: Path
) -> None:
    part = app.queue("part", 3, capacity=30, merge="append")
    part.push([])
    file = tmp_path / "jobs.ndjson"
    lines = [json.dumps({"id": number, "payload": "x"}) + "\n" * (number % 2) for number in range(100)]
    file.write_text("\n".join(lines))
    words, done = ["push", "part", str(file)], list[str]()
    while True:
        ran = subprocess.run(
            command(redis_url, *words), capture_output=True, text=True, timeout=PATIENCE, check=False
        )  # fmt: skip
        waiting = part.stats().length
        with part.consumer() as consumer:
            while waiting and (jobs := consumer.take(waiting, timeout=PATIENCE)):
                waiting -= len(jobs)
                for job in jobs:
                    done += [job.id] * len(job.payloads)
                    job.ack()
        if ran.returncode == 0:
            break
        assert "queue 'part' is full" in ran.stderr
        words = shlex.split(ran.stderr.strip().rpartition("go on with: lowq ")[2])
    assert sorted(done, key=int) == [str(number) for number in range(100)]  # each once


def test_a_command_gets_the_payloads_and_its_exit_code_says_what_becomes_of_the_job(
    queue: Queue, run: Run, tmp_path: Path
) -> None:
    script = tmp_path / "work.sh"
    script.write_text(
        'cat >> "$1.got"; echo "$LOWQ_QUEUE $LOWQ_ID $LOWQ_RETRY_COUNT" >> "$1.env"\n'
        'case "$1" in bad) echo no such address >&2; exit 3;; busy) exit 75;; esac\n'
    )
    queue.push([{"id": "good", "payload": {"n": n}, "score": n} for n in (2, 1)])
    queue.push([{"id": "bad", "score": 1}, {"id": "busy", "score": 1}])
    # What is given back waits for a second.
    ran = run("consume", "mail", "-c", "2", "--idle", "0.3", "--", "sh", str(script), "{id}", cwd=tmp_path)
    assert (tmp_path / "good.got").read_text().split("\n") == ['{"n":1}', '{"n":2}', ""]
    assert (tmp_path / "good.env").read_text() == "mail good -1\n"
    assert "no such address" in ran.stderr
    (failed,) = queue.jobs("retrying").jobs
    assert (failed.id, failed.retry_count) == ("bad", 0)
    assert failed.error == "sh exited with 3\nno such address"
    (waiting,) = [*queue.jobs("scheduled").jobs, *queue.jobs("due").jobs]
    assert (waiting.id, waiting.retry_count) == ("busy", -1)
    stats = queue.stats()
    assert (stats.processed, stats.taken) == (1, 0)


def test_a_mistyped_command_is_refused_before_it_charges_any_job(queue: Queue, run: Run, tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text("no program")
    queue.push({"id": "a"})
    commands = ["snd.sh", "./snd.sh", "/nonexistent/command", "data.txt", "./data.txt"]
    for mistyped in commands:
        with case(mistyped):
            refused = run("consume", "mail", "--idle", "0", "--", mistyped, "{id}", code=2, cwd=tmp_path)
            assert f"{mistyped!r} can't be run: there is no such program, or it is not executable" in refused.stderr
            stats = queue.stats()
            assert (stats.due, stats.retries, stats.failed) == (1, 0, 0)


def test_a_command_that_exceeds_ttr_is_killed_with_what_it_has_started(queue: Queue, run: Run, tmp_path: Path) -> None:
    script = tmp_path / "work.sh"
    script.write_text("sleep 600 & echo $! >> pids; wait\n")
    ttr = 0.3
    while True:
        queue.push({"id": "a"})
        run("consume", "mail", "--ttr", f"{ttr:g}", "--idle", "0.2", "--", "sh", str(script), cwd=tmp_path)
        (failed,) = queue.jobs("retrying").jobs
        assert f"sh was ended by signal 15\nit had run for {ttr:g} s" in (failed.error or "")
        pids = [int(line) for line in (tmp_path / "pids").read_text().split()] if (tmp_path / "pids").exists() else []
        if pids:
            break
        queue.delete("a")
        ttr *= 4  # a slow machine: the script had not even begun
    (pid,) = pids
    until(lambda: not Path(f"/proc/{pid}").exists(), "end of the child")


#: A command has begun, and its thread goes on only a second later.
SLOW_START = """\
import runpy, subprocess, sys, time
class Popen(subprocess.Popen):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        time.sleep(1)
subprocess.Popen = Popen
sys.argv[0] = "lowq"
runpy.run_module("lowq", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("start", [["-m", "lowq"], ["-c", SLOW_START]], ids=["at once", "slow"])
def test_what_is_cut_short_waits_again_uncharged(
    app: lowq.Lowq, queue: Queue, redis_url: str, tmp_path: Path, start: list[str]
) -> None:
    queue.push([{"id": n} for n in range(3)])
    script = "trap '' TERM; echo $$ >> pids; while :; do sleep 0.05; done"
    words = ("consume", "mail", "-c", "3", "--", "sh", "-c", script)
    typed = [sys.executable, *start, *command(redis_url, *words)[3:]]
    with subprocess.Popen(typed, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        until(lambda: (tmp_path / "pids").exists() and len((tmp_path / "pids").read_text().split()) == 3, "commands")
        os.kill(process.pid, signal.SIGINT)
        until(lambda: is_quiet(app), "no more to be taken")
        os.kill(process.pid, signal.SIGINT)  # at once
        process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    pids = (tmp_path / "pids").read_text().split()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "end of the commands, which init reaps")
    stats = queue.stats()
    assert (stats.length, stats.taken, stats.retries, stats.failed) == (3, 0, 0, 0)


def test_it_waits_for_redis_to_say_what_became_of_a_job(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis", appendonly="yes", appendfsync="always") as server:
        app = lowq.Lowq(redis_url=server.url)
        queue = app.queue("mail", 2)
        queue.push({"id": "a"})
        script = "touch begun; until test -e go; do sleep 0.05; done"
        words = ("consume", "mail", "--idle", "0.2", "--", "sh", "-c", script)
        with subprocess.Popen(command(server.url, *words), cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
            until((tmp_path / "begun").exists, "a command that runs")
            server.kill()
            (tmp_path / "go").touch()
            time.sleep(1.0)  # some attempts to say so
            server.start()
            _, said = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, said
        assert queue.stats().processed == 1
        app.close()


def test_a_command_that_floods_its_streams_is_no_trouble(queue: Queue, run: Run, tmp_path: Path) -> None:
    """It reads nothing of a long payload, leaves a child behind that has its end, and writes what is no text."""
    queue.push({"id": "a", "payload": "x" * 500_000})
    script = tmp_path / "work.sh"
    script.write_text("sleep 3 & head -c 3000000 /dev/zero >&2; printf '\\377end' >&2; exit 4\n")
    run("consume", "mail", "--idle", "0.2", "--", "sh", str(script))
    (failed,) = queue.jobs("retrying").jobs
    assert (failed.error or "").endswith("\\xffend")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_when_what_runs_is_finished(
    app: lowq.Lowq, queue: Queue, redis_url: str, tmp_path: Path, number: signal.Signals
) -> None:
    queue.push([{"id": n} for n in range(3)])
    words = ("consume", "mail", "--", "sh", "-c", "echo x >> begun; until test -e go; do sleep 0.05; done")
    with subprocess.Popen(command(redis_url, *words), cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        until((tmp_path / "begun").exists, "a command that runs")
        os.kill(process.pid, number)
        until(lambda: is_quiet(app), "no more to be taken")
        (tmp_path / "go").touch()
        _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, said
    stats = queue.stats()
    assert (stats.processed, stats.length, stats.taken) == (1, 2, 0)


def is_quiet(app: lowq.Lowq) -> bool:
    """Whether the consumer is still there and has no part in the work any more."""
    nodes = app.nodes()
    return bool(nodes) and nodes[0].quiet


# --- payloads of a type ---

TYPED = """
from datetime import datetime
import msgspec
import lowq

class Mail(msgspec.Struct):
    to: str
    at: datetime | None = None

@lowq.worker(queue_name="mail", shards_count=2)
class Mails(lowq.Worker[Mail]):
    def perform(self, payloads_by_id): ...
"""


@pytest.fixture
def typed_app(tmp_path: Path) -> list[str]:
    path = tmp_path / "mails.py"
    path.write_text(TYPED)
    return ["-r", str(path)]


def test_payloads_of_a_type_go_in_and_out_as_json(queue: Queue, run: Run, typed_app: list[str], tmp_path: Path) -> None:
    mail = '{"to": "ann", "at": "2026-05-01T14:00:00+02:00"}'
    run("push", *typed_app, "mail", "--id", "1", "--payload", mail)
    kept = {"at": "2026-05-01T12:00:00Z", "to": "ann"}
    for words in (["take", *typed_app, "mail"], ["take", "mail"]):
        assert json.loads(run(*words).stdout)["payloads"] == [kept]
    run("consume", *typed_app, "mail", "--idle", "5", "--", "sh", "-c", f"cat > {tmp_path / 'taken'}")
    assert (tmp_path / "taken").read_text() == '{"at":"2026-05-01T12:00:00Z","to":"ann"}\n'


def test_a_line_with_a_payload_of_another_type_is_named(
    queue: Queue, run: Run, typed_app: list[str], tmp_path: Path
) -> None:
    lines = tmp_path / "jobs.ndjson"
    lines.write_text('{"id": 1, "payload": {"to": "ann"}}\n{"id": 2, "payload": {"to": 7}}\n')
    said = run("push", *typed_app, "mail", str(lines), code=1).stderr
    assert "line 2: job 2: the payload is no Mail: Expected `str`, got `int` - at `$.to`; nothing was pushed" in said
    lines.write_text('{"id": 1}\n')
    said = run("push", *typed_app, "mail", str(lines), code=1).stderr
    assert "line 1: job 1: there is no payload; those of the queue are Mail; nothing was pushed" in said
    assert queue.stats().length == 0
