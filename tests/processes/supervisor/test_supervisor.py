"""``--processes``: many processes as one, however they end, whatever it is told."""

import json
import os
import pty
import re
import selectors
import signal
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import ioctl
from pathlib import Path

import pytest

import lowq
from tests.processes.conftest import MakeRig
from tests.processes.supervising import Supervise, SupervisorProcess, command_of, kill, lives, supervised, write_code
from tests.processes.support import NEVER, Rig, until
from tests.receiver import Receiver
from tests.redis_server import RedisServer
from tests.tiers import often


def test_what_processes_log_dump_and_send_says_of_which_it_is(make_rig: MakeRig, supervise: Supervise) -> None:
    rig = make_rig()
    with Receiver() as graphite:
        options = ("--graphite", f"127.0.0.1:{graphite.port}", "--log-format", "json")
        supervisor, pids = supervised(rig, supervise, 2, *options)

        def senders() -> set[int]:
            return {int(line.split(b".")[2]) for line in graphite.lines if b".queues." in line}

        until(lambda: senders() == set(pids.values()), "lines of both processes")
    supervisor.signal(signal.SIGTTIN)
    until(lambda: len(supervisor.lines("stacks of all threads")) == 2, "two dumps")
    until(
        lambda: len(re.findall(r"process 1\.[12] \(pid \d+\): working, for", supervisor.log)) == 2,
        "what the supervisor itself says of them",
    )
    assert supervisor.stop() == 0
    records = [json.loads(line) for line in supervisor.log.splitlines()]
    assert {record.get("process") for record in records if record["logger"] == "lowq.node"} == {"1.1", "1.2"}
    assert not any("process" in record for record in records if record["logger"] == "lowq.supervisor")


# --- processes that die ---


def test_a_process_that_is_killed_or_stopped_is_replaced_and_nothing_is_lost(
    make_rig: MakeRig, supervise: Supervise
) -> None:
    rig = make_rig(ORDERS_SHARDS=6, ORDERS_WORK=0.005)
    supervisor, pids = supervised(rig, supervise, 2)
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
        pytest.param("import os; os._exit(9)\n", 1, "exited with code 9 before it was ready, 5 times in a row",
                     marks=pytest.mark.slow),
        ("import lowq\n", 2, "registers no worker; decorate a class or function"),
    ],
    ids=["exit", "no worker"],
)  # fmt: skip
def test_it_gives_up_when_no_process_becomes_ready(
    make_rig: MakeRig, supervise: Supervise, source: str, code: int, says: str
) -> None:
    rig = make_rig()
    write_code(rig, 1, source)
    supervisor = supervise(rig, "--processes", "3")
    assert supervisor.wait() == code
    (last,) = supervisor.lines("CRITICAL")
    assert says in last
    assert supervisor.lines("lowq: ") == []  # the supervisor has said it
    assert len(supervisor.started()) <= 5


@pytest.mark.slow
def test_while_redis_is_away_replacing_goes_on(
    make_rig: MakeRig, supervise: Supervise, own_server: RedisServer
) -> None:
    rig = make_rig(own_server.url)
    supervisor, pids = supervised(rig, supervise, 1)
    own_server.stop()
    kill(rig, pids["1.1"])
    until(lambda: len(supervisor.lines("before it was ready")) > 5, "more tries than it has for a broken application")
    own_server.start()
    until(lambda: supervisor.pids(1) != pids, "a new process")
    rig.push("a", 1)
    rig.done("a", 1)
    assert supervisor.stop() == 0


# --- signals ---


def test_a_stop_waits_for_what_runs(make_rig: MakeRig, supervise: Supervise) -> None:
    rig = make_rig()
    supervisor, _ = supervised(rig, supervise, 1)
    rig.push("a", 1, do="wait")
    rig.begun("a", 1)
    supervisor.signal(signal.SIGTERM)
    supervisor.says("waiting up to")
    Path(f"{rig.history.path}.go").touch()
    assert supervisor.wait() == 0
    assert rig.performs("a")[0].ok
    assert rig.of_shards("lease") == {}
    assert supervisor.no_traceback()


@pytest.mark.slow
def test_what_is_cut_short_of_whichever_generation_makes_it_3(make_rig: MakeRig, supervise: Supervise) -> None:
    rig = make_rig(LOWQ_SHUTDOWN_TIMEOUT=0.3, LOWQ_LEASE_TTL=15)
    supervisor, _ = supervised(rig, supervise, 1)
    rig.push("a", 1, do="wait")
    rig.begun("a", 1)
    supervisor.signal(signal.SIGHUP)
    supervisor.says("deployed: generation 2 works")
    assert supervisor.stop() == 3
    assert len(supervisor.lines("exited with code 3")) == 1
    supervisor.all_gone()


def test_a_second_int_ends_it_at_once(make_rig: MakeRig, supervise: Supervise) -> None:
    rig = make_rig()
    supervisor, _ = supervised(rig, supervise, 1)
    rig.push("a", 1, do="sleep", for_=NEVER)
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
    supervisor, pids = supervised(rig, supervise, 2)
    frozen = pids["1.2"]
    rig.history.frozen(frozen)
    os.kill(frozen, signal.SIGSTOP)
    assert supervisor.stop() == 3
    assert f"(pid {frozen}) does not end: killed" in supervisor.log
    supervisor.all_gone()


def test_tstp_makes_all_quiet(make_rig: MakeRig, supervise: Supervise) -> None:
    rig = make_rig()
    supervisor, pids = supervised(rig, supervise, 1)
    supervisor.signal(signal.SIGTSTP)
    supervisor.says("goes quiet")
    until(lambda: not rig.of_shards("lease"), "end of all leases")
    rig.push("a", 1)
    kill(rig, pids["1.1"])
    supervisor.says("not replaced, as it is quiet")
    assert rig.performs() == []
    assert supervisor.stop() == 0
    assert supervisor.started() == set(pids.values())


@pytest.mark.slow
@pytest.mark.parametrize("numbers", [[signal.SIGTSTP, signal.SIGTERM], [signal.SIGTERM]])
def test_signals_while_it_starts(make_rig: MakeRig, supervise: Supervise, numbers: list[signal.Signals]) -> None:
    rig = make_rig()
    write_code(rig, 1)
    supervisor = supervise(rig, "--processes", "2")
    supervisor.says("process 1.1")
    for number in numbers:
        supervisor.signal(number)
    assert supervisor.wait() == 0
    supervisor.all_gone()
    assert supervisor.no_traceback()


def test_kill_9_of_the_supervisor_leaves_nobody_behind(make_rig: MakeRig, supervise: Supervise) -> None:
    rig = make_rig(LOWQ_LEASE_TTL=15)
    supervisor, _ = supervised(rig, supervise, 2)
    rig.push("a", 1, do="wait")
    rig.begun("a", 1)
    supervisor.kill()
    until(lambda: len(supervisor.lines("the supervisor has ended")) == 2, "both processes say so")
    Path(f"{rig.history.path}.go").touch()
    supervisor.all_gone()
    assert rig.performs("a")[0].ok  # they stop as by TERM
    assert rig.of_shards("lease") == {}
    assert supervisor.no_traceback()


def test_a_process_still_starting_ends_with_its_supervisor_too(make_rig: MakeRig, supervise: Supervise) -> None:
    rig = make_rig()
    write_code(rig, 1, f"import time\ntime.sleep({NEVER})\n")
    supervisor = supervise(rig, "--processes", "2")
    supervisor.says("process 1.1")
    (pid,) = supervisor.started()
    until(lambda: b"--supervised" in command_of(pid), "a process that runs")
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

    def start(self, supervise: Supervise, rig: Rig, *args: str) -> SupervisorProcess:
        write_code(rig, 1)
        streams = {"stdin": self.end, "stdout": self.end, "stderr": self.end}
        return supervise(rig, *args, **streams, start_new_session=False, preexec_fn=self.take)

    def read(self) -> str:
        while self._output.select(0):
            try:
                self.text += os.read(self.main, 65536).decode(errors="replace")
            except OSError:  # all have closed it
                break
        return self.text

    def until(self, pattern: str, times: int = 1) -> None:
        until(lambda: len(re.findall(pattern, self.read())) >= times, pattern)

    def close(self) -> None:
        os.close(self.end)
        os.close(self.main)


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


def test_ctrl_c_in_a_terminal_stops_each_process_once(
    make_rig: MakeRig, supervise: Supervise, terminal: Terminal
) -> None:
    rig = make_rig()
    supervisor = terminal.start(supervise, rig, "--processes", "2")
    terminal.until("is ready", 2)
    rig.push("a", 1, do="wait")
    rig.begun("a", 1)
    # What is typed reaches the session in the foreground: told by the terminal, too, a process could be cut short.
    assert os.getsid(supervisor.pid) not in {os.getsid(node.pid) for node in rig.app.nodes()}
    os.write(terminal.main, b"\x03")
    terminal.until(r"\[1\.\d\].* stops", 2)
    Path(f"{rig.history.path}.go").touch()
    assert supervisor.wait() == 0
    text = terminal.read()
    assert "Traceback" not in text
    assert len(re.findall(r"\[1\.\d\].* stops", text)) == 2
    assert rig.performs("a")[0].ok
    terminal.close()


@pytest.mark.parametrize("nohup", often([False, True], [True]), ids=["plain", "nohup"])
def test_a_terminal_that_is_closed_stops_it_unless_nohup(
    make_rig: MakeRig, supervise: Supervise, terminal: Terminal, nohup: bool
) -> None:
    rig = make_rig()
    with hangup(ignored=nohup):
        supervisor = terminal.start(supervise, rig, "--processes", "1")
    terminal.until("is ready")
    (pid,) = until(lambda: [node.pid for node in rig.app.nodes()], "a heartbeat")
    terminal.close()
    if nohup:
        rig.push("a", 1)
        rig.done("a", 1)
        assert supervisor.process.poll() is None
        supervisor.signal(signal.SIGTERM)
    assert supervisor.wait() == 0
    until(lambda: not lives(pid), "end of its process")


@pytest.mark.parametrize("nohup", often([False, True], [True]), ids=["plain", "nohup"])
def test_a_single_node_is_stopped_by_that_too_unless_nohup_though_hup_reloads_it(
    make_rig: MakeRig, supervise: Supervise, terminal: Terminal, nohup: bool
) -> None:
    rig = make_rig()
    with hangup(ignored=nohup):
        node = terminal.start(supervise, rig)
    terminal.until("shards held: 5")
    node.signal(signal.SIGHUP)  # by hand
    terminal.until("starts with new code")
    terminal.until("shards held: 5", 2)
    terminal.close()
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
    supervisor = supervise(rig, "--processes", "1", stdin=None, stdout=write, stderr=write)
    os.close(write)
    os.read(read, 100)
    os.close(read)  # as `| head -1` does: whoever writes now gets EPIPE
    (first,) = until(lambda: [node.pid for node in rig.app.nodes()], "a node")
    kill(rig, first)
    until(lambda: {node.pid for node in rig.app.nodes()} - {first}, "a new process")
    rig.push("a", 1)
    rig.done("a", 1)
    assert supervisor.stop() == 0


def test_a_process_is_started_as_it_was_and_says_whom_to_ask_for_a_reload(
    make_rig: MakeRig, supervise: Supervise
) -> None:
    rig = make_rig()
    options = ("-t", "2", "-q", "Orders", "--no-prefetch", "--log-level", "debug")
    supervisor, pids = supervised(rig, supervise, 1, *options, program=("-X", "dev", "-m", "lowq"))
    command = command_of(pids["1.1"]).decode().split("\0")
    given = command[command.index("-X") :]  # behind the interpreter, and the loader that it may be started through
    assert given[:5] == ["-X", "dev", "-m", "lowq", "run"]
    assert set(given[5:9]) == {"--require=app.py", "--threads=2", "--queue=Orders", "--no-prefetch"}
    assert given[9] == "--log-level=debug"
    (node,) = until(rig.app.nodes, "a node")
    assert (node.supervisor["pid"], node.supervisor["version"]) == (supervisor.pid, lowq.__version__)
    assert node.started_at is not None
    assert node.supervisor["started_at"] <= node.started_at + 1  # whole seconds
    with pytest.raises(lowq.ConfigError, match=f"send HUP to that one, pid {supervisor.pid}"):
        rig.app.send_command(node.name, "reload")
    os.kill(pids["1.1"], signal.SIGHUP)
    supervisor.says("can't be reloaded: it is a process of a supervisor")
    assert supervisor.stop() == 0
