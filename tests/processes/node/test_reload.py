"""New code for a single node: the same process, the same name, the same leases."""

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lowq.cli import main
from tests.processes.conftest import MakeRig
from tests.processes.supervising import SOURCE, Supervise, SupervisorProcess, code_folder, write_code
from tests.processes.support import NEVER, Rig, until
from tests.redis_server import free_port
from tests.rows import case
from tests.tiers import often


def loaded(rig: Rig, pid: int) -> list[int]:
    """The versions of the code that the process itself has loaded, one after the other."""
    return [event["code"] for event in rig.events("loaded") if event["pid"] == pid]


def runs(rig: Rig, node: SupervisorProcess, code: int) -> None:
    """Waits until the node works with that version."""
    until(lambda: loaded(rig, node.pid)[-1:] == [code], f"code {code} in the node")
    starts = len(loaded(rig, node.pid))
    until(lambda: len(node.lines(" starts")) == starts, "start of the node with it")


def names(rig: Rig) -> list[str]:
    return [node.name for node in rig.app.nodes()]


def start(rig: Rig, supervise: Supervise, *args: str, **options: Any) -> SupervisorProcess:
    write_code(rig, 1)
    node = supervise(rig, *args, name="node", **options)
    node.holds_all()
    return node


def inherited(pid: int) -> set[int]:
    """The files of a process that whatever it executes has as well."""
    found = set()
    for path in Path(f"/proc/{pid}/fdinfo").iterdir():
        try:
            flags = re.search(r"^flags:\s*(\d+)", path.read_text(), re.MULTILINE)
        except FileNotFoundError:
            continue
        if flags is not None and not int(flags[1], 8) & os.O_CLOEXEC:
            found.add(int(path.name))
    return found


def leases(rig: Rig) -> dict[int, Any]:
    return rig.of_shards("lease")


def test_under_load_it_goes_on_with_its_leases(make_rig: MakeRig, supervise: Supervise) -> None:
    # No lease runs out and nobody polls: what is not handed on is never worked again.
    rig = make_rig(ORDERS_SHARDS=6, ORDERS_WORK=0.005, LOWQ_LEASE_TTL=NEVER, LOWQ_POLL_INTERVAL=NEVER)
    node = start(rig, supervise)
    (name,), held = names(rig), leases(rig)
    finished = rig.produce(1, ids=40, versions=2, rounds=0, pause=0.05)
    for code in (2, 3):
        seen = len(rig.events("end"))
        rig.performed(seen + 60)
        write_code(rig, code)
        if code == 2:
            node.signal(signal.SIGHUP)
        else:
            done = CliRunner().invoke(main, ["reload", name, "--redis-url", rig.url])
            assert "sent reload to" in done.stderr
        runs(rig, node, code)
        assert names(rig) == [name]
    seen = len(rig.events("end"))
    rig.performed(seen + 60)
    finished()
    rig.drained()
    assert leases(rig) == held  # not even the tokens have changed
    assert {perform.pid for perform in rig.performs()} == {node.pid}
    stats = rig.app.queue(rig.queue_name).stats()
    assert node.stop() == 0
    report = rig.report()
    assert report.problems == []
    assert report.repeats == 0
    assert report.fenced == []
    assert stats.processed == sum(len(perform.jobs) for perform in rig.performs())
    assert rig.merged("crashes") == {}
    assert node.no_traceback()


BROKEN = {
    "syntax": ("def f(:\n", "SyntaxError: invalid syntax (app.py, line 1)"),
    "exit": ("import os\nos._exit(9)\n", "exited with code 9"),
    "shards_count": (
        SOURCE.replace("{settings!r}", "{'ORDERS_SHARDS': '7', 'LOWQ_STRICT_SHARDS_COUNT': '1'}"),
        "has shards_count=5 in Redis",
    ),
    "setup": (
        SOURCE + "from tests.processes.app_orders import Orders\nOrders.setup = lambda self: 1 / 0\n",
        "ZeroDivisionError",
    ),
}


@pytest.mark.threads_only
def test_with_broken_code_it_goes_on_as_it_was(make_rig: MakeRig, supervise: Supervise) -> None:
    rig = make_rig()
    node = start(rig, supervise)
    for version, (kind, (source, why)) in enumerate(BROKEN.items(), 1):
        with case(kind):
            write_code(rig, 2, source)
            node.signal(signal.SIGHUP)
            until(lambda: len(node.lines("goes on with the code that it has")) == version, "the end of the reload")  # noqa: B023
            assert why in node.lines("goes on with the code that it has")[-1]
            rig.push("a", version)
            assert rig.done("a", version).pid == node.pid
    assert loaded(rig, node.pid) == [1]
    write_code(rig, 3)  # put right
    node.signal(signal.SIGHUP)
    runs(rig, node, 3)
    assert loaded(rig, node.pid) == [1, 3]
    assert node.stop() == 0
    assert rig.report().problems == []


def test_a_long_job_is_waited_for(make_rig: MakeRig, supervise: Supervise) -> None:
    rig = make_rig(LOWQ_LEASE_TTL=0.5)  # many times as long: the leases are renewed meanwhile
    node = start(rig, supervise)
    held = until(lambda: found if len(found := leases(rig)) == rig.shards_count else {}, "leases of all shards")
    rig.push("a", 1, do="wait")
    rig.begun("a", 1)
    write_code(rig, 2)
    node.signal(signal.SIGHUP)
    node.says("changes to the new code, waiting up to")
    rig.push("b", 1)
    token = next(iter(held.values()))
    renewed = re.compile(rf"^{re.escape(token.partition(':')[0])}:")
    key = next(f"{rig.prefix(shard)}lease" for shard in held)
    before = rig.client.pexpiretime(key)
    until(lambda: rig.client.pexpiretime(key) > before + 500, "renewals")
    assert all(renewed.match(value) for value in leases(rig).values())
    assert rig.performs("b") == []  # nothing is begun any more
    Path(f"{rig.history.path}.go").touch()
    rig.done("b", 1)
    assert loaded(rig, node.pid) == [1, 2]
    assert len(rig.performs("a")) == 1
    until(lambda: leases(rig) == held, "leases with the same tokens")  # one may have run out, and is resumed
    assert node.stop() == 0
    assert rig.report().problems == []


@pytest.mark.threads_only
def test_asked_for_again_while_it_checks_it_checks_again(make_rig: MakeRig, supervise: Supervise) -> None:
    rig = make_rig()
    node = start(rig, supervise)
    gate = code_folder(rig) / "gate"
    slow = "import pathlib, time\nwhile not pathlib.Path('gate').exists():\n    time.sleep(0.01)\n"
    write_code(rig, 2, slow + SOURCE + "raise RuntimeError('half written')\n")
    node.signal(signal.SIGHUP)
    node.says("it checks the new code")
    write_code(rig, 3)
    node.signal(signal.SIGHUP)
    node.says("checks the code once more")
    gate.touch()
    runs(rig, node, 3)
    assert loaded(rig, node.pid) == [1, 3]
    assert node.lines("goes on with the code that it has") == []  # what the first check found is out of date
    rig.push("a", 1)
    rig.done("a", 1)
    assert node.stop() == 0


@pytest.mark.threads_only
@pytest.mark.parametrize("while_it", often(["checks", "finishes"], ["finishes"]))
def test_term_during_a_reload_stops_it(make_rig: MakeRig, supervise: Supervise, while_it: str) -> None:
    rig = make_rig(LOWQ_LEASE_TTL=NEVER)
    node = start(rig, supervise)
    if while_it == "checks":
        write_code(rig, 2, "import time\ntime.sleep(600)\n")
    else:
        rig.push("a", 1, do="wait")
        rig.begun("a", 1)
        write_code(rig, 2)
    node.signal(signal.SIGHUP)
    node.says("it checks the new code" if while_it == "checks" else "changes to the new code")
    node.signal(signal.SIGTERM)
    node.says(" stops")
    Path(f"{rig.history.path}.go").touch()
    assert node.wait() == 0
    assert loaded(rig, node.pid) == [1]
    assert leases(rig) == {}
    assert rig.client.hlen("lowq:v1:nodes") == 0


@pytest.mark.threads_only
def test_term_while_the_new_code_is_loaded_is_not_lost(make_rig: MakeRig, supervise: Supervise) -> None:
    rig = make_rig(LOWQ_LEASE_TTL=NEVER)
    node = start(rig, supervise)
    gate = code_folder(rig) / "gate"
    # The check goes through; in the node itself it waits while it is imported.
    waits = (
        f"import os, pathlib, time\nif os.getpid() == {node.pid}:\n    pathlib.Path('here').touch()\n"
        "    while not pathlib.Path('gate').exists():\n        time.sleep(0.01)\n"
    )
    write_code(rig, 2, waits + SOURCE)
    node.signal(signal.SIGHUP)
    until((code_folder(rig) / "here").exists, "the new code in the node")
    node.signal(signal.SIGHUP)  # nor does this one end it
    node.signal(signal.SIGTERM)
    gate.touch()
    assert node.wait() == 0
    assert loaded(rig, node.pid) == [1, 2]
    assert leases(rig) == {}
    assert rig.client.hlen("lowq:v1:nodes") == 0


def test_quiet_calls_it_off(make_rig: MakeRig, supervise: Supervise) -> None:
    rig = make_rig()
    node = start(rig, supervise)
    rig.push("a", 1, do="wait")
    rig.begun("a", 1)
    write_code(rig, 2)
    node.signal(signal.SIGHUP)
    node.says("changes to the new code")
    node.signal(signal.SIGTSTP)
    node.says("is not reloaded any more")
    Path(f"{rig.history.path}.go").touch()
    until(lambda: leases(rig) == {}, "end of all leases")
    assert loaded(rig, node.pid) == [1]
    node.signal(signal.SIGHUP)  # and a reload ends being quiet
    runs(rig, node, 2)
    node.holds_all()
    assert node.stop() == 0


@pytest.mark.threads_only
def test_it_starts_as_it_was_started(make_rig: MakeRig, supervise: Supervise) -> None:
    """Whatever the application did to folder, environment and arguments."""
    rig = make_rig()
    spoils = "import os, sys\nos.environ['SPOILT'] = os.environ.get('SPOILT', '') + 'x'\nsys.argv[1:] = ['stats']\n"
    notes = "history.write('spoilt', by=os.environ['SPOILT'], carried='LOWQ_RELOADED' in os.environ)\nos.chdir('/')\n"
    # A port that the node has is no reason against new code.
    listens = f"taken.append(socket.create_server(('127.0.0.1', {free_port()})))"
    notes += f"import socket\ntaken = []\napp.config.on_server_init = lambda: {listens}\n"
    write_code(rig, 1, spoils + SOURCE + notes)
    node = supervise(rig, "--threads=2", name="node")
    node.holds_all()
    write_code(rig, 2, spoils + SOURCE + notes)
    node.signal(signal.SIGHUP)
    runs(rig, node, 2)
    rig.push("a", 2)
    rig.done("a", 2)
    assert "2 threads" in node.lines(" starts with new code")[-1]
    spoilt = [(event["by"], event["carried"]) for event in rig.events("spoilt") if event["pid"] == node.pid]
    assert spoilt == [("x", False)] * 2
    assert inherited(node.pid) <= {0, 1, 2}
    masked = re.search(r"^SigBlk:\s*(\w+)", Path(f"/proc/{node.pid}/status").read_text(), re.MULTILINE)
    assert masked is not None
    assert int(masked[1], 16) == 0  # no signal stays blocked
    assert node.stop() == 0


@pytest.mark.threads_only
def test_an_embedded_store_is_not_thrown_away(make_rig: MakeRig, supervise: Supervise) -> None:
    rig = make_rig()
    write_code(rig, 1)
    node = supervise(rig, "--embedded", name="node", environment={"LOWQ_REDIS_URL": ""})
    node.says(" starts: ")
    node.signal(signal.SIGHUP)
    node.says("can't be reloaded: its store is inside of its process")
    assert node.stop() == 0
