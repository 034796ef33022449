"""``--processes``: many processes as one, however they end, whatever it is told."""

import json
import os
import pty
import re
import selectors
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import ioctl
from pathlib import Path

import pytest

from tests.processes.conftest import MakeRig
from tests.processes.supervising import Supervise, SupervisorProcess, code_folder, kill, lives, write_code
from tests.processes.support import NEVER, PATIENCE, Rig, until
from tests.receiver import Receiver
from tests.redis_server import RedisServer
from tests.tiers import often


def test_each_process_sends_figures_under_a_name_of_its_own(make_rig: MakeRig, supervise: Supervise) -> None:
    rig = make_rig()
    write_code(rig, 1)
    with Receiver() as graphite:
        supervisor = supervise(rig, "--processes", "2", "--graphite", f"127.0.0.1:{graphite.port}")
        pids = supervisor.ready(1, 2)

        def senders() -> set[int]:
            return {int(line.split(b".")[2]) for line in graphite.lines if b".queues." in line}

        until(lambda: senders() == set(pids.values()), "lines of both processes")
        assert supervisor.stop() == 0


# --- processes that die ---


def test_a_process_that_is_killed_or_stopped_is_replaced_and_nothing_is_lost(
    make_rig: MakeRig, supervise: Supervise
) -> None:
    rig = make_rig(ORDERS_SHARDS=6, ORDERS_WORK=0.005)
    write_code(rig, 1)
    supervisor = supervise(rig, "--processes", "2")
    pids = supervisor.ready(1, 2)
    finished = rig.produce(2, ids=30, versions=2, rounds=0, pause=0.2)
    rig.performed(30)
    killed, stopped = pids.values()
    kill(rig, killed)
    supervisor.says(f"(pid {killed}) was killed by SIGKILL")
    os.kill(stopped, signal.SIGTERM)  # by hand
    supervisor.says(f"(pid {stopped}) exited with code 0")
    until(lambda: len({*supervisor.pids(1).values()} - {killed, stopped}) == 2, "two new processes")
    finished()
    rig.drained()
    assert supervisor.process.poll() is None
    assert supervisor.stop() == 0
    assert rig.report().problems == []


@pytest.mark.parametrize(
    ("source", "code", "says"),
    [
        pytest.param("def f(:\n", 1, "SyntaxError: invalid syntax (app.py, line 1)", marks=pytest.mark.slow),
        pytest.param("import os; os._exit(9)\n", 1, "exited with code 9 before it was ready, 5 times in a row",
                     marks=pytest.mark.slow),
        pytest.param("import os\nos.kill(os.getpid(), 11)\n", 1,
                     "was killed by SIGSEGV before it was ready, 5 times in a row", marks=pytest.mark.slow),
        ("import lowq\n", 2, "registers no worker; decorate a class or function"),
        pytest.param("import lowq\n@lowq.worker\ndef orders(p): ...\nlowq.config.on_server_init = lambda: 1 / 0\n", 1,
                     "the node could not start (ZeroDivisionError: division by zero), see above",
                     marks=pytest.mark.slow),
        (("import lowq\nlowq.config.strict_shards_count = True\n"
         "@lowq.worker(queue_name='Orders', shards_count=7)\ndef orders(p): ...\n"), 1,
         "shards_count=5 in Redis, but this process says shards_count=7"),
    ],
    ids=["syntax", "exit", "signal", "no worker", "init", "shards_count"],
)  # fmt: skip
def test_it_gives_up_when_no_process_becomes_ready(
    make_rig: MakeRig, supervise: Supervise, source: str, code: int, says: str
) -> None:
    rig = make_rig()
    rig.push("a", 1)
    write_code(rig, 1, source)
    supervisor = supervise(rig, "--processes", "3")
    assert supervisor.wait() == code
    last = supervisor.lines("CRITICAL")
    assert len(last) == 1
    assert says in last[0]
    assert supervisor.lines("lowq: ") == []  # the supervisor has said it
    assert len(supervisor.started()) <= 5


@pytest.mark.slow
def test_redis_that_is_away_at_the_start_is_tried_for_a_while(make_rig: MakeRig, supervise: Supervise) -> None:
    rig = make_rig()
    write_code(rig, 1)
    away = {"LOWQ_REDIS_URL": "redis://127.0.0.1:1/0"}
    supervisor = supervise(rig, "--processes", "2", environment=away)
    assert supervisor.wait() == 1
    assert len(supervisor.started()) == 5
    assert "does not answer" in supervisor.lines("CRITICAL")[0]


def test_a_program_that_is_gone_is_reported(make_rig: MakeRig, supervise: Supervise) -> None:
    rig = make_rig()
    program = code_folder(rig) / "lowq"
    program.write_text("from lowq.cli import main\nmain()\n")
    write_code(rig, 1)
    supervisor = supervise(rig, "--processes", "1", program=("lowq",))
    pid = supervisor.ready(1, 1)["1.1"]
    program.unlink()
    kill(rig, pid)
    assert supervisor.wait() == 1
    assert "can't open file" in supervisor.log
    assert "exited with code 2 before it was ready" in supervisor.lines("CRITICAL")[0]


@pytest.mark.slow
def test_while_redis_is_away_replacing_goes_on(
    make_rig: MakeRig, supervise: Supervise, own_server: RedisServer
) -> None:
    rig = make_rig(own_server.url)
    write_code(rig, 1)
    supervisor = supervise(rig, "--processes", "1")
    pid = supervisor.ready(1, 1)["1.1"]
    rig.push("a", 1)
    rig.done("a", 1)
    own_server.stop()
    kill(rig, pid)
    until(lambda: len(supervisor.lines("before it was ready")) > 5, "more tries than it has for a broken application")
    own_server.start()
    until(lambda: supervisor.pids(1)["1.1"] != pid, "a new process")
    rig.push("a", 2)
    rig.done("a", 2)
    assert supervisor.stop() == 0


# --- signals ---


@pytest.mark.parametrize("number", often([signal.SIGTERM, signal.SIGINT], [signal.SIGTERM]))
def test_a_stop_waits_for_what_runs(make_rig: MakeRig, supervise: Supervise, number: signal.Signals) -> None:
    rig = make_rig()
    write_code(rig, 1)
    supervisor = supervise(rig, "--processes", "2")
    supervisor.ready(1, 2)
    rig.push("a", 1, do="sleep", for_=1)
    rig.begun("a", 1)
    supervisor.signal(number)
    assert supervisor.wait() == 0
    assert rig.performs("a")[0].ok
    assert rig.of_shards("lease") == {}
    assert supervisor.no_traceback()


@pytest.mark.slow
def test_what_is_cut_short_of_whichever_generation_makes_it_3(make_rig: MakeRig, supervise: Supervise) -> None:
    rig = make_rig(LOWQ_SHUTDOWN_TIMEOUT=0.3)
    write_code(rig, 1)
    supervisor = supervise(rig, "--processes", "1")
    supervisor.ready(1, 1)
    rig.push("a", 1, do="wait")
    rig.begun("a", 1)
    supervisor.signal(signal.SIGHUP)
    supervisor.says("deployed: generation 2 works")
    assert supervisor.stop() == 3
    assert len(supervisor.lines("exited with code 3")) == 1
    supervisor.all_gone()


@pytest.mark.slow
def test_a_process_that_fails_while_it_is_stopped_makes_it_1(make_rig: MakeRig, supervise: Supervise) -> None:
    rig = make_rig()
    write_code(rig, 1)
    supervisor = supervise(rig, "--processes", "2")
    supervisor.ready(1, 2)
    payloads = [{"version": 1, "do": "sleep", "for": 1}, {"version": 2, "do": "exit"}]
    rig.app.queue("Orders").push([{"id": "a", "payload": payload, "score": payload["version"]} for payload in payloads])
    (perform,) = rig.begun("a", 1)
    assert perform.jobs == {"a": [1, 2]}
    assert supervisor.stop() == 1
    assert len(supervisor.lines("exited with code 1")) == 1
    assert [event["pid"] for event in rig.events("last_words")] == [perform.pid]


def test_a_second_int_ends_it_at_once(make_rig: MakeRig, supervise: Supervise) -> None:
    rig = make_rig()
    write_code(rig, 1)
    supervisor = supervise(rig, "--processes", "2")
    supervisor.ready(1, 2)
    rig.push("a", 1, do="sleep", for_=30)
    rig.begun("a", 1)
    supervisor.signal(signal.SIGINT)
    supervisor.says("waiting up to")
    supervisor.signal(signal.SIGINT)
    assert supervisor.wait() == 3
    supervisor.all_gone()
    assert supervisor.no_traceback()


@pytest.mark.slow
def test_a_process_that_hears_nothing_is_killed_in_the_end(make_rig: MakeRig, supervise: Supervise) -> None:
    rig = make_rig(LOWQ_SHUTDOWN_TIMEOUT=0)
    write_code(rig, 1)
    supervisor = supervise(rig, "--processes", "2")
    frozen = supervisor.ready(1, 2)["1.2"]
    rig.history.frozen(frozen)
    os.kill(frozen, signal.SIGSTOP)
    assert supervisor.stop() == 3
    assert f"(pid {frozen}) does not end: killed" in supervisor.log
    supervisor.all_gone()


def test_tstp_makes_all_quiet(make_rig: MakeRig, supervise: Supervise) -> None:
    rig = make_rig()
    write_code(rig, 1)
    supervisor = supervise(rig, "--processes", "2")
    pids = supervisor.ready(1, 2)
    supervisor.signal(signal.SIGTSTP)
    until(lambda: len(supervisor.lines("lowq.node")) and len(supervisor.lines("goes quiet")) == 2, "two quiet nodes")
    until(lambda: not rig.of_shards("lease"), "end of all leases")
    rig.push("a", 1)
    kill(rig, pids["1.1"])
    supervisor.says("not replaced, as it is quiet")
    other = rig.node()
    rig.done("a", 1)
    assert other.stop() == 0
    assert supervisor.stop() == 0
    assert supervisor.started() == set(pids.values())


def test_ttin_dumps_the_stacks_of_all(make_rig: MakeRig, supervise: Supervise) -> None:
    rig = make_rig()
    write_code(rig, 1)
    supervisor = supervise(rig, "--processes", "2")
    supervisor.ready(1, 2)
    supervisor.signal(signal.SIGTTIN)
    until(lambda: len(supervisor.lines("stacks of all threads")) == 2, "two dumps")
    until(
        lambda: len(re.findall(r"process 1\.[12] \(pid \d+\): working, for", supervisor.log)) == 2,
        "what the supervisor itself says of them",
    )
    assert supervisor.stop() == 0


@pytest.mark.slow
def test_signals_while_it_starts(make_rig: MakeRig, supervise: Supervise) -> None:
    rig = make_rig()
    write_code(rig, 1)
    for number, name in ((signal.SIGTTIN, "dump"), (signal.SIGTSTP, "quiet"), (signal.SIGTERM, "stop")):
        supervisor = supervise(rig, "--processes", "2", name=name)
        supervisor.says("process 1.1")
        supervisor.signal(number)
        if number == signal.SIGTTIN:
            assert "starting, for" in supervisor.says("starting, for")
            supervisor.ready(1, 2)
        if number != signal.SIGTERM:
            supervisor.signal(signal.SIGTERM)
        assert supervisor.wait() == 0
        supervisor.all_gone()
        assert supervisor.no_traceback()


def test_kill_9_of_the_supervisor_leaves_nobody_behind(make_rig: MakeRig, supervise: Supervise) -> None:
    rig = make_rig(LOWQ_LEASE_TTL=15)
    write_code(rig, 1)
    supervisor = supervise(rig, "--processes", "2")
    supervisor.ready(1, 2)
    rig.push("a", 1, do="sleep", for_=0.5)
    rig.begun("a", 1)
    supervisor.kill()
    supervisor.all_gone()
    assert len(supervisor.lines("the supervisor has ended")) == 2
    assert rig.performs("a")[0].ok  # they stop as by TERM
    assert rig.of_shards("lease") == {}
    assert supervisor.no_traceback()


def test_a_process_still_starting_ends_with_its_supervisor_too(make_rig: MakeRig, supervise: Supervise) -> None:
    rig = make_rig()
    write_code(rig, 1, f"import time\ntime.sleep({NEVER})\n")
    supervisor = supervise(rig, "--processes", "2")
    supervisor.says("process 1.1")
    (pid,) = supervisor.started()
    until(lambda: b"--supervised" in Path(f"/proc/{pid}/cmdline").read_bytes(), "a process that runs")
    until(lambda: len(list(Path(f"/proc/{pid}/task").iterdir())) > 1, "a watch for the supervisor's end")
    supervisor.kill()
    supervisor.all_gone()


# --- terminals and streams ---


class Terminal:
    """A terminal that a process belongs to, as if a shell had started it there in the foreground."""

    def __init__(self) -> None:
        self.main, self.end = pty.openpty()
        self._output = selectors.PollSelector()
        self._output.register(self.main, selectors.EVENT_READ)
        self.text = ""

    def take(self) -> None:
        os.setsid()
        ioctl(self.end, termios.TIOCSCTTY, 0)

    def read(self) -> str:
        while self._output.select(0):
            try:
                self.text += os.read(self.main, 65536).decode(errors="replace")
            except OSError:  # all have closed it
                break
        return self.text

    def until(self, pattern: str, times: int = 1) -> None:
        until(lambda: len(re.findall(pattern, self.read())) >= times, pattern)


@pytest.fixture
def terminal() -> Terminal:
    return Terminal()


@contextmanager
def hangup(*, ignored: bool) -> Iterator[None]:
    """What is started here ignores it, as by nohup, or does not: also when the tests themselves are run by nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def on_terminal(supervise: Supervise, rig: Rig, terminal: Terminal, *args: str) -> SupervisorProcess:
    streams = {"stdin": terminal.end, "stdout": terminal.end, "stderr": terminal.end}
    return supervise(rig, *args, **streams, start_new_session=False, preexec_fn=terminal.take)


def test_ctrl_c_in_a_terminal_stops_each_process_once(
    make_rig: MakeRig, supervise: Supervise, terminal: Terminal
) -> None:
    rig = make_rig()
    write_code(rig, 1)
    supervisor = on_terminal(supervise, rig, terminal, "--processes", "2")
    terminal.until("is ready", 2)
    rig.push("a", 1, do="sleep", for_=1)
    rig.begun("a", 1)
    # What is typed reaches the session in the foreground: told by the terminal, too, a process could be cut short.
    assert os.getsid(supervisor.pid) not in {os.getsid(node.pid) for node in rig.app.nodes()}
    os.write(terminal.main, b"\x03")
    assert supervisor.wait() == 0
    text = terminal.read()
    assert "Traceback" not in text
    assert len(re.findall(r"\[1\.\d\].* stops", text)) == 2
    assert rig.performs("a")[0].ok
    os.close(terminal.main)
    os.close(terminal.end)


@pytest.mark.parametrize("nohup", [False, True], ids=["plain", "nohup"])
def test_a_terminal_that_is_closed_stops_it_unless_nohup(
    make_rig: MakeRig, supervise: Supervise, terminal: Terminal, nohup: bool
) -> None:
    rig = make_rig()
    write_code(rig, 1)
    with hangup(ignored=nohup):
        supervisor = on_terminal(supervise, rig, terminal, "--processes", "1")
    terminal.until("is ready")
    (name,) = until(lambda: [node.pid for node in rig.app.nodes()], "a heartbeat")
    os.close(terminal.end)
    os.close(terminal.main)
    if nohup:
        rig.push("a", 1)
        rig.done("a", 1)
        assert supervisor.process.poll() is None
        supervisor.signal(signal.SIGTERM)
    assert supervisor.wait() == 0
    until(lambda: not lives(name), "end of its process")


@pytest.mark.parametrize("nohup", [False, True], ids=["plain", "nohup"])
def test_a_single_node_is_stopped_by_that_too_though_hup_reloads_it(
    make_rig: MakeRig, supervise: Supervise, terminal: Terminal, nohup: bool
) -> None:
    rig = make_rig()
    write_code(rig, 1)
    with hangup(ignored=nohup):
        node = on_terminal(supervise, rig, terminal)
    terminal.until("shards held: 5")
    node.signal(signal.SIGHUP)  # by hand
    terminal.until("starts with new code")
    terminal.until("shards held: 5", 2)
    os.close(terminal.end)
    os.close(terminal.main)
    if nohup:
        rig.push("a", 1)
        rig.done("a", 1)
        assert node.process.poll() is None
        node.signal(signal.SIGTERM)
    assert node.wait() == 0


@pytest.mark.slow
def test_it_needs_no_streams(make_rig: MakeRig, supervise: Supervise) -> None:
    rig = make_rig()
    write_code(rig, 1)
    read, write = os.pipe()
    supervisor = supervise(rig, "--processes", "2", stdin=None, stdout=write, stderr=write)
    os.close(write)
    os.read(read, 100)
    os.close(read)  # as `| head -1` does: whoever writes now gets EPIPE
    until(lambda: len(rig.app.nodes()) == 2, "two nodes")
    rig.push("a", 1)
    rig.done("a", 1)
    (first, second) = [node.pid for node in rig.app.nodes()]
    kill(rig, first)
    until(lambda: {node.pid for node in rig.app.nodes()} - {first, second}, "a new process")
    assert supervisor.stop() == 0


@pytest.mark.slow
@pytest.mark.parametrize("log_format", often(["text", "json"], ["json"]))
def test_lines_of_the_log_tell_the_processes_apart(make_rig: MakeRig, supervise: Supervise, log_format: str) -> None:
    rig = make_rig()
    write_code(rig, 1)
    supervisor = supervise(rig, "--processes", "2", "--log-format", log_format)
    supervisor.ready(1, 2)
    assert supervisor.stop() == 0
    lines = supervisor.log.splitlines()
    if log_format == "json":
        records = [json.loads(line) for line in lines]
        names = {record.get("process") for record in records if record["logger"] == "lowq.node"}
        assert not any("process" in record for record in records if record["logger"] == "lowq.supervisor")
    else:
        names = {found[1] for line in lines if (found := re.search(r"INFO +\[(\S+)\] lowq\.node ", line))}
        assert any(re.search(r"INFO +lowq\.supervisor ", line) for line in lines)
    assert names == {"1.1", "1.2"}


# --- what it is started with ---


def test_the_processes_are_started_as_it_was(make_rig: MakeRig, supervise: Supervise) -> None:
    rig = make_rig()
    write_code(rig, 1)
    supervisor = supervise(
        rig, "--processes", "1", "-t", "2", "-q", "Orders", "--no-prefetch", "--log-level", "debug",
        program=("-X", "dev", "-m", "lowq"),
    )  # fmt: skip
    pid = supervisor.ready(1, 1)["1.1"]
    command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    assert command[1:6] == ["-X", "dev", "-m", "lowq", "run"]
    assert set(command[6:10]) == {"--require=app.py", "--threads=2", "--queue=Orders", "--no-prefetch"}
    assert command[10] == "--log-level=debug"
    assert supervisor.stop() == 0


@pytest.mark.slow
def test_the_embedded_store_is_the_supervisors(make_rig: MakeRig, supervise: Supervise) -> None:
    rig = make_rig()
    write_code(rig, 1)
    supervisor = supervise(rig, "--processes", "2", "--embedded")
    supervisor.ready(1, 2)
    url = re.search(r"LOWQ_REDIS_URL=(\S+)", supervisor.log)
    assert url is not None
    push = [sys.executable, "-m", "lowq", "push", "Orders", "--id", "a", "--payload", '{"version": 1}', "--score", "1"]
    environment = {**rig.environment({}), "LOWQ_REDIS_URL": url[1], "PYTHONPATH": str(Path.cwd())}
    subprocess.run(push, env=environment, check=True, timeout=PATIENCE)
    rig.done("a", 1)
    assert supervisor.stop() == 0
