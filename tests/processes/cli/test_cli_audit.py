"""What the command line changes is in the log of what people did."""

import getpass
import socket
from typing import Any

import pytest

from lowq import Queue
from lowq.errors import RedisRefused
from lowq.operate import audit
from tests.processes.cli.support import Cli


def entries(cli: Cli) -> list[tuple[str, str, int | None, dict[str, Any]]]:
    """Action, target, count and detail of all, the oldest first."""
    found = cli.app.audit(1000)[::-1]
    assert {entry.who for entry in found} <= {f"{getpass.getuser()}@{socket.gethostname()}"}
    assert {entry.address for entry in found} <= {"cli"}
    return [(entry.action, entry.target, entry.count, dict(entry.detail)) for entry in found]


def test_every_verb_that_changes_something_is_written_down(cli: Cli) -> None:
    cli.app.queue("Orders", 2).push([{"id": number, "delay": 60} for number in range(20)])
    cli("bury", "Orders", "1", "2", "gone", "--reason", "not ours", code=1)
    cli("kick", "Orders", "1")
    cli("perform-now", "Orders", "3")
    cli("delete", "Orders", "-", stdin="4\n5\n")
    cli("delete", "Orders", "--match", "1?", "--yes")
    cli("pause", "Orders")
    cli("pause", "Orders")
    cli("resume", "Orders")
    cli("release-all", "Orders")
    cli("doctor", "Orders", "--repair", "--ignore", "persistence", code=0 if not cli_findings(cli) else 1)
    cli("drop", "Orders", "--yes")
    assert entries(cli) == [
        ("bury", "Orders", 2, {"ids": ["1", "2", "gone"], "named": 3, "reason": "not ours", "missing": 1}),
        ("kick", "Orders", 1, {"ids": ["1"], "named": 1}),
        ("perform_now", "Orders", 1, {"ids": ["3"], "named": 1}),
        ("delete", "Orders", 2, {}),
        ("delete", "Orders", 10, {"match": "1?"}),
        ("pause", "Orders", None, {}),
        ("pause", "Orders", None, {"changed": False}),
        ("resume", "Orders", None, {}),
        ("release_all", "Orders", 0, {}),
        ("repair", "Orders", None, {}),
        ("drop", "Orders", 8, {}),
    ]


def cli_findings(cli: Cli) -> bool:
    """Whether doctor finds anything wrong with the server of the tests."""
    return any(finding.wrong and finding.code != "persistence" for finding in cli.app.examine("Orders"))


def test_what_only_looks_or_moves_jobs_through_is_not(cli: Cli) -> None:
    cli("push", "Orders", "--shards-count", "1", "--id", "1")
    cli("put", "Orders", "{}")
    cli("take", "Orders", "--ack")
    for verb in ("stats", "nodes", "audit"):
        cli(verb)
    cli("jobs", "Orders")
    cli("delete", "Nobodys", "1", code=2)
    cli("pause", "Nobodys", code=2)
    cli("delete", "Orders", "--all", code=2)  # nobody said yes
    assert entries(cli) == []


def test_a_failure_is_written_down(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    cli.app.registrations.enter("Orders", 1)
    cli("stop", "nobody", code=1)

    def interrupted(*_args: object, **_options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Queue, "kick", interrupted)
    cli("kick", "Orders", "1", code=130)
    stop, kick = entries(cli)
    assert stop[:3] == ("stop", "nobody", None)
    assert stop[3]["outcome"] == "failed"
    assert "nobody" in stop[3]["error"]
    assert (kick[0], kick[3]["outcome"]) == ("kick", "interrupted")


def test_while_it_runs_an_action_is_in_the_log_as_started(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """So is one whose process has died."""
    cli.app.registrations.enter("Orders", 1)
    seen: list[Any] = []
    resume = Queue.resume

    def looked_at(self: Queue) -> bool:
        seen.extend(entries(cli))
        return resume(self)

    monkeypatch.setattr(Queue, "resume", looked_at)
    cli("resume", "Orders")
    assert seen == [("resume", "Orders", None, {"outcome": "started"})]
    assert entries(cli) == [("resume", "Orders", None, {"changed": False})]


def test_without_an_entry_nothing_is_done(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    cli.app.queue("Orders", 1).push({"id": 1, "delay": 60})

    def refused(*_args: object, **_options: object) -> str:
        raise RedisRefused("NOPERM no permission for the key of the log")

    monkeypatch.setattr(audit, "note", refused)
    assert "NOPERM" in cli("delete", "Orders", "1", code=1).stderr
    assert cli.app.queue("Orders").stats().length == 1


def test_the_log_is_filtered(cli: Cli) -> None:
    cli.app.note("ann", "perform_now", "Orders", 3, address="198.51.100.1")
    cli.app.note("bob", "pause", "Mails")
    cli.app.note("eve\x1b[31m", "kick", "Orders")
    assert "198.51.100.1" in cli("audit", "--action", "perform-now").stdout
    assert "\x1b" not in cli("audit").stdout
    (line,) = cli("audit", "--who", "AN", "--to", "Orders", "--since", "-1h").stdout.splitlines()[1:]
    assert "ann" in line
    assert cli("audit", "--until", "-1h").stderr == "no such entry\n"
    cursor = cli.app.audit(1)[0].cursor
    assert f"--after {cursor}" in cli("audit", "--limit", "1").stderr
    (line,) = cli("audit", "--limit", "1", "--after", cursor).stdout.splitlines()[1:]
    assert "bob" in line
    assert "--since soon" in cli("audit", "--since", "soon", code=2).stderr
