"""`lowq put`, `take` and `consume`, as somebody types them."""

import json
import os
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
from tests.waiting import PATIENCE, until

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def queue(redis_url: str) -> Iterator[Queue]:
    app = lowq.Lowq(redis_url=redis_url, lease_ttl=5)
    queue = app.queue("mail", 2)
    queue.push([])
    yield queue
    app.close()


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


def test_what_is_put_is_taken(queue: Queue, run: Run) -> None:
    job_id = run("put", "mail", '{"to": "ann"}').stdout.strip()
    expected = {"id": job_id, "payloads": [{"to": "ann"}], "retry_count": -1}
    assert json.loads(run("take", "mail").stdout) == expected
    assert json.loads(run("take", "mail", "--ack").stdout) == expected
    assert "nothing came" in run("take", "mail", code=1).stderr
    assert queue.stats().processed == 1


def test_what_is_put_may_come_from_the_standard_input_and_be_due_later(queue: Queue, run: Run) -> None:
    job_id = json.loads(run("put", "mail", "-", "--delay", "60", "--json", typed="[1, 2]").stdout)["id"]
    (job,) = queue.jobs("scheduled").jobs
    assert (job.id, job.payloads[0][0]) == (job_id, [1, 2])


def test_figures_are_sent_to_graphite(queue: Queue, run: Run) -> None:
    queue.push([{"id": number} for number in range(3)])
    with Receiver() as graphite:
        run("consume", "mail", "--idle", "1", "--graphite", f"127.0.0.1:{graphite.port}", "--", "true")
        last = b".queues.mail.processed 3 "
        until(lambda: any(last in line for line in graphite.lines), "the figures")
    assert queue.statistics().tasks.done == 3


def test_a_queue_that_is_full_says_so_and_may_be_waited_for(queue: Queue, run: Run) -> None:
    full = queue._backend.queue("full", 1, capacity=1)  # type: ignore[attr-defined]  # it is an application
    full.push({"id": 1})
    for verb in (["put", "full", '"x"'], ["push", "full", "--id", "2"]):
        assert "queue 'full' is full (capacity=1" in run(*verb, code=1).stderr
    assert "100% of capacity 1" in run("stats", "full").stdout
    full.clear()
    assert run("push", "full", "--id", "2", "--timeout", "30").stdout == "1 payload pushed to full\n"


def test_a_command_gets_the_payloads_and_its_exit_code_says_what_becomes_of_the_job(
    queue: Queue, run: Run, tmp_path: Path
) -> None:
    script = tmp_path / "work.sh"
    script.write_text(
        'cat >> "$1.got"; echo "$LOWQ_QUEUE $LOWQ_ID $LOWQ_RETRY_COUNT" >> "$1.env"\n'
        'case "$1" in bad) echo no such address >&2; exit 3;; busy) exit 75;; esac\n'
    )
    queue.push([{"id": "good", "payload": {"n": n}, "score": n} for n in (2, 1)])
    queue.push([{"id": "bad"}, {"id": "busy"}])
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


def test_a_command_that_can_not_be_started_is_a_failure(queue: Queue, run: Run) -> None:
    queue.push({"id": "a"})
    run("consume", "mail", "--idle", "0.1", "--", "/nonexistent/command")
    (failed,) = queue.jobs("retrying").jobs
    assert "can't be started" in (failed.error or "")


def test_a_command_that_exceeds_ttr_is_killed_with_what_it_has_started(queue: Queue, run: Run, tmp_path: Path) -> None:
    queue.push({"id": "a"})
    script = tmp_path / "work.sh"
    script.write_text("sleep 600 & echo $! >> pids; wait\n")
    run("consume", "mail", "--ttr", "0.3", "--idle", "0.2", "--", "sh", str(script), cwd=tmp_path)
    (failed,) = queue.jobs("retrying").jobs
    assert "sh was ended by signal 15\nit had run for 0.3 s" in (failed.error or "")
    pids = [int(line) for line in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 1
    for pid in pids:
        until(lambda pid=pid: not Path(f"/proc/{pid}").exists(), "end of the child")  # type: ignore[misc]  # a default binds it


def test_what_is_cut_short_waits_again_uncharged(queue: Queue, redis_url: str, tmp_path: Path) -> None:
    queue.push([{"id": n} for n in range(3)])
    words = (
        "consume",
        "mail",
        "-c",
        "3",
        "--",
        "sh",
        "-c",
        "trap '' TERM; echo $$ >> pids; while :; do sleep 0.05; done",
    )
    with subprocess.Popen(command(redis_url, *words), cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        until(lambda: (tmp_path / "pids").exists() and len((tmp_path / "pids").read_text().split()) == 3, "commands")
        os.kill(process.pid, signal.SIGINT)
        until(lambda: lowq_is_quiet(queue), "no more to be taken")
        os.kill(process.pid, signal.SIGINT)  # at once
        process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert not any(Path(f"/proc/{pid}").exists() for pid in (tmp_path / "pids").read_text().split())
    stats = queue.stats()
    assert (stats.length, stats.taken, stats.retries, stats.failed) == (3, 0, 0, 0)


def test_it_waits_for_redis_to_say_what_became_of_a_job(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis", appendonly="yes", appendfsync="always") as server:
        app = lowq.Lowq(redis_url=server.url)
        queue = app.queue("mail", 2)
        queue.push({"id": "a"})
        words = (
            "consume",
            "mail",
            "--idle",
            "0.2",
            "--",
            "sh",
            "-c",
            "touch begun; until test -e go; do sleep 0.05; done",
        )
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
    queue: Queue, redis_url: str, tmp_path: Path, number: signal.Signals
) -> None:
    queue.push([{"id": n} for n in range(3)])
    words = ("consume", "mail", "--", "sh", "-c", "echo x >> begun; until test -e go; do sleep 0.05; done")
    with subprocess.Popen(command(redis_url, *words), cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        until((tmp_path / "begun").exists, "a command that runs")
        os.kill(process.pid, number)
        until(lambda: lowq_is_quiet(queue), "no more to be taken")
        (tmp_path / "go").touch()
        _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, said
    stats = queue.stats()
    assert (stats.processed, stats.length, stats.taken) == (1, 2, 0)


def lowq_is_quiet(queue: Queue) -> bool:
    """Whether the consumer is still there and has no part in the work any more."""
    nodes = queue._backend.nodes()  # type: ignore[attr-defined]  # the application
    return bool(nodes) and nodes[0].quiet
