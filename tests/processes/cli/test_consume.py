"""`lowq put`, `take` and `consume`, as somebody types them."""

import json
import shlex
import signal
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

import lowq
from lowq.cli import main
from lowq.queue import Queue
from tests.processes.cli.support import Cli, Start, working_in
from tests.receiver import Receiver
from tests.redis_server import RedisServer
from tests.rows import case
from tests.waiting import until


@pytest.fixture
def queue(cli: Cli) -> Queue:
    queue = cli.app.queue("mail", 2)
    queue.push([])
    return queue


def test_an_unknown_queue_is_asked_about(queue: Queue, cli: Cli) -> None:
    for words in (["take", "mai"], ["put", "mai", "1"], ["consume", "mai", "--", "cat"]):
        with case(words):
            assert "did you mean 'mail'" in cli(*words, code=2).stderr


def test_what_is_put_is_taken(queue: Queue, cli: Cli) -> None:
    job_id = cli("put", "mail", '{"to": "ann"}').stdout.strip()
    expected = {"id": job_id, "payloads": [{"to": "ann"}], "retry_count": -1}
    assert json.loads(cli("take", "mail").stdout) == expected
    assert cli.json("take", "mail") == {"queue": "mail", "jobs": [expected]}
    assert json.loads(cli("take", "mail", "--ack").stdout) == expected
    assert "nothing came" in cli("take", "mail", code=1).stderr
    assert queue.stats().processed == 1
    later = cli.json("put", "mail", "-", "--delay", "60", stdin="[1, 2]")["id"]
    (job,) = queue.jobs("scheduled").jobs
    assert (job.id, job.payloads[0][0]) == (later, [1, 2])


def test_a_queue_that_is_full_says_so_and_may_be_waited_for(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # a long lag must not cut the last column off
    full = cli.app.queue("full", 1, capacity=1)
    full.push({"id": 1})
    for verb in (["put", "full", '"x"'], ["push", "full", "--id", "2"]):
        assert "queue 'full' is full (capacity=1" in cli(*verb, code=1).stderr
    assert "100% of capacity 1" in cli("stats", "full").stdout
    full.clear()
    assert cli("push", "full", "--id", "2", "--timeout", "30").stdout == "1 payload pushed to full\n"


def test_what_is_not_replicated_says_so_and_is_pushed_again(
    queue: Queue, cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LOWQ_DURABILITY_TIMEOUT", "0.01")
    said = cli("put", "mail", '"x"', "--durability", "replicated", code=1).stderr
    (job,) = queue.jobs()
    assert f"job {job.id} of mail is in, but not safe: 0 of 1 replica confirmed" in said
    file = tmp_path / "jobs.ndjson"
    file.write_text('{"id": 2}\n{"id": 3}\n')
    said = cli("push", "mail", str(file), "--skip", "1", "--durability", "replicated", code=1).stderr
    assert "1 payload in, but not safe: 0 of 1 replica confirmed" in said
    assert f"1 payload in; go on with: lowq push mail {file} --skip 1" in said
    assert queue.stats().length == 2


def test_a_file_that_does_not_fit_goes_on_with_exactly_what_is_missing(cli: Cli, tmp_path: Path) -> None:
    part = cli.app.queue("part", 3, capacity=30, merge="append")
    part.push([])
    file = tmp_path / "jobs.ndjson"
    lines = [json.dumps({"id": number, "payload": "x"}) + "\n" * (number % 2) for number in range(100)]
    file.write_text("\n".join(lines))
    words, done = ["push", "part", str(file)], list[str]()
    while True:
        pushed = CliRunner().invoke(main, ["--redis-url", cli.url, *words])
        for line in cli("take", "part", "--limit", "100", "--ack").stdout.splitlines():
            done += [json.loads(line)["id"]] * len(json.loads(line)["payloads"])
        if pushed.exit_code == 0:
            break
        assert "queue 'part' is full" in pushed.stderr
        words = shlex.split(pushed.stderr.strip().rpartition("go on with: lowq ")[2])
    assert sorted(done, key=int) == [str(number) for number in range(100)]  # each once


# --- a command for each job, as a process ---


def test_a_command_gets_the_payloads_and_its_exit_code_says_what_becomes_of_the_job(
    queue: Queue, cli: Cli, start: Start
) -> None:
    """One that reads nothing of a long payload, leaves a child behind that has its end, and writes what is no text, is
    no trouble.
    """
    script = """
case "$1" in flood) sleep 3 & head -c 3000000 /dev/zero >&2; printf '\\377end' >&2; exit 4;; esac
cat >> "$1.got"; echo "$LOWQ_QUEUE $LOWQ_ID $LOWQ_RETRY_COUNT" >> "$1.env"
case "$1" in bad) echo no such address >&2; exit 3;; busy) exit 75;; esac
"""
    queue.push([{"id": "good", "payload": {"n": n}, "score": n} for n in (2, 1)])
    queue.push([{"id": "bad", "score": 1}, {"id": "busy", "score": 1}])
    queue.push({"id": "flood", "payload": "x" * 500_000, "score": 1})
    words = ("-c", "2", "--idle", "0.3", "--", "sh", "-c", script, "sh", "{id}")
    process = start("consume", "mail", "--redis-url", cli.url, *words, environment={"PYTHONDEVMODE": "1"})
    assert process.wait() == 0
    assert "ResourceWarning" not in process.err  # as it says in this mode of what was left open
    assert (process.folder / "good.got").read_text().split("\n") == ['{"n":1}', '{"n":2}', ""]
    assert (process.folder / "good.env").read_text() == "mail good -1\n"
    failed = {job.id: (job.error, job.retry_count) for job in queue.jobs("retrying").jobs}
    assert failed["bad"] == ("sh exited with 3\nno such address", 0)
    assert str(failed["flood"][0]).endswith("\\xffend")
    waiting = queue.peek("busy")  # what is given back waits for a second
    assert waiting is not None
    assert (waiting.state in ("scheduled", "due"), waiting.retry_count) == (True, -1)
    stats = queue.stats()
    assert (stats.processed, stats.taken) == (1, 0)


def test_what_can_not_be_started_charges_a_job_only_where_the_command_depends_on_it(
    queue: Queue, cli: Cli, tmp_path: Path
) -> None:
    (tmp_path / "data.txt").write_text("no program")
    queue.push({"id": "a"})
    for mistyped in ["snd.sh", "./snd.sh", str(tmp_path / "data.txt")]:
        with case(mistyped):
            said = cli("consume", "mail", "--idle", "0", "--", mistyped, "{id}", code=2).stderr
            assert f"{mistyped!r} can't be run: there is no such program, or it is not executable" in said
            stats = queue.stats()
            assert (stats.due, stats.retries, stats.failed) == (1, 0, 0)
    cli("consume", "mail", "--idle", "0.1", "--", "/nonexistent/{id}")
    (failed,) = queue.jobs("retrying").jobs
    assert "can't be started" in (failed.error or "")
    queue.push("a\x00b")
    cli("consume", "mail", "--idle", "0.1", "--", "echo", "{id}")
    job = queue.peek("a\x00b")
    assert job is not None
    assert (job.state, job.error) == ("morgue", "echo can't be started: embedded null byte")


def test_a_command_that_exceeds_ttr_is_killed_with_what_it_has_started(
    queue: Queue, cli: Cli, start: Start, tmp_path: Path
) -> None:
    ttr, pids = 0.3, tmp_path / "pids"
    while True:
        queue.push({"id": "a"})
        words = ["--ttr", f"{ttr:g}", "--idle", "0.2", "--", "sh", "-c", f"sleep 600 & echo $! >> {pids}; wait"]
        assert start("consume", "mail", "--redis-url", cli.url, *words).wait() == 0
        (failed,) = queue.jobs("retrying").jobs
        assert f"sh was ended by signal 15\nit had run for {ttr:g} s" in (failed.error or "")
        if pids.exists() and pids.read_text().endswith("\n"):
            break
        queue.delete("a")
        ttr *= 4  # a slow machine: the script had not even begun
    until(lambda: not Path(f"/proc/{pids.read_text().strip()}").exists(), "end of the child")


# --- its end ---

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


def is_quiet(app: lowq.Lowq) -> bool:
    """Whether the consumer is still there and has no part in the work any more."""
    nodes = app.nodes()
    return bool(nodes) and nodes[0].quiet


def test_what_is_cut_short_waits_again_uncharged(queue: Queue, cli: Cli, start: Start) -> None:
    queue.push([{"id": n} for n in range(3)])
    script = "trap '' TERM; echo $$ >> pids; while :; do sleep 0.05; done"
    words = ("consume", "mail", "--redis-url", cli.url, "-c", "3", "--", "sh", "-c", script)
    process = start(*words, program=[sys.executable, "-c", SLOW_START])
    pids = process.folder / "pids"
    process.until(lambda: pids.exists() and len(pids.read_text().split()) == 3)
    process.process.send_signal(signal.SIGINT)
    process.until(lambda: is_quiet(cli.app))
    assert process.ends_after(signal.SIGINT) == 130  # at once
    commands = pids.read_text().split()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in commands), "end of the commands, which init reaps")
    stats = queue.stats()
    assert (stats.length, stats.taken, stats.retries, stats.failed) == (3, 0, 0, 0)


def test_a_signal_ends_it_when_what_runs_is_finished_and_figures_are_sent_meanwhile(
    queue: Queue, cli: Cli, start: Start
) -> None:
    queue.push([{"id": n} for n in range(3)])
    script = "echo x >> begun; until test -e go; do sleep 0.05; done"
    with Receiver() as graphite:
        words = ("--graphite", f"127.0.0.1:{graphite.port}", "--", "sh", "-c", script)
        process = start("consume", "mail", "--redis-url", cli.url, *words)
        process.until((process.folder / "begun").exists)
        process.until(lambda: any(b".queues.mail.processed 0 " in line for line in graphite.lines))
        process.process.send_signal(signal.SIGTERM)
        process.until(lambda: is_quiet(cli.app))
        (process.folder / "go").touch()
        assert process.wait() == 0, process.err
    stats = queue.stats()
    assert (stats.processed, stats.length, stats.taken) == (1, 2, 0)


def test_it_waits_for_redis_to_say_what_became_of_a_job(start: Start, tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis", appendonly="yes", appendfsync="always") as server:
        cli = Cli(server.url)
        queue = cli.app.queue("mail", 2)
        queue.push({"id": "a"})
        script = "touch begun; until test -e go; do sleep 0.05; done"
        process = start("consume", "mail", "--redis-url", cli.url, "--idle", "0.2", "--", "sh", "-c", script)
        process.until((process.folder / "begun").exists)
        server.kill()
        (process.folder / "go").touch()
        time.sleep(1.0)  # some attempts to say so
        server.start()
        assert process.wait() == 0, process.err
        assert queue.stats().processed == 1
        cli.app.close()


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


def test_payloads_of_a_type_go_in_and_out_as_json(queue: Queue, cli: Cli, start: Start, tmp_path: Path) -> None:
    (tmp_path / "mails.py").write_text(TYPED)
    mail = '{"to": "ann", "at": "2026-05-01T14:00:00+02:00"}'
    wrong = '{"id": 2, "payload": {"to": "ann"}}\n{"id": 3, "payload": {"to": 7}}\n'
    with working_in(tmp_path):
        cli("push", "-r", "mails.py", "mail", "--id", "1", "--payload", mail)
    with working_in(tmp_path):
        said = cli("push", "-r", "mails.py", "mail", code=1, stdin=wrong).stderr
    assert (
        "line 2: job 3: the payload does not fit type Mail: Expected `str`, got `int` - at `$.to`; nothing was pushed"
        in said
    )
    assert json.loads(cli("take", "mail").stdout)["payloads"] == [{"at": "2026-05-01T12:00:00Z", "to": "ann"}]
    words = (
        "consume",
        "-r",
        "app.py",
        "mail",
        "--idle",
        "0.2",
        "--redis-url",
        cli.url,
        "--",
        "sh",
        "-c",
        "cat > taken",
    )
    process = start(*words, app=TYPED)
    assert process.wait() == 0
    assert (process.folder / "taken").read_text() == '{"at":"2026-05-01T12:00:00Z","to":"ann"}\n'
