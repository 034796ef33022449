"""The log of what people did, and the names of those who paused."""

from contextlib import closing
from typing import Any

import pytest

import lowq
from lowq.operate import audit
from lowq.operate.audit import MAX_TEXT
from lowq.store import Client
from lowq.store.keys import audit_key
from tests.rules.queue_rig import QueueRig
from tests.rules.support import NOW, job, run_script

pytestmark = pytest.mark.parametrize("store_url", ["memory"], indirect=True)

KEY = audit_key("lowq")


def test_entries_come_newest_first_with_the_servers_time_and_from_where(rig: QueueRig) -> None:
    rig.app.note("ann", "kick", "Orders", 3, {"match": "4*"}, address="198.51.100.1")
    rig.client.command("LPUSH", KEY, "nonsense of another version")
    rig.app.note("bob", "pause", "Orders")
    newest, oldest = rig.app.audit()
    assert (newest.who, newest.action, newest.target, newest.count, newest.detail) == (
        "bob",
        "pause",
        "Orders",
        None,
        {},
    )
    assert (oldest.count, oldest.detail) == (3, {"match": "4*"})
    assert (newest.address, oldest.address) == (None, "198.51.100.1")
    assert newest.at >= oldest.at > 1_700_000_000
    assert rig.app.audit(1) == [newest]


def test_an_entry_replaces_another_wherever_that_is(rig: QueueRig) -> None:
    began = rig.app.note("ann", "delete", "Orders", None, {"outcome": "started", "match": '"token": "'})
    for number in range(250):
        rig.app.note("bob", "kick", "Orders", number)
    rig.app.note("ann", "delete", "Orders", 7, {"outcome": "done"}, replaces=began)
    entries = rig.app.audit(1000)
    assert [entry.count for entry in entries] == [7, *range(249, -1, -1)]
    assert entries[0].detail == {"outcome": "done"}
    rig.app.note("ann", "delete", "Orders", 8, replaces=began)
    assert len(rig.app.audit(1000)) == 252, "what is gone already can't be replaced, and nothing else is"


def test_the_log_is_bounded_in_entries_and_in_text_and_a_repeated_note_leaves_one(rig: QueueRig) -> None:
    rig.app.note("x" * 10_000, "kick", "Orders", 1, {"ids": ["y" * 10_000] * 50}, address="x" * 10_000)
    (entry,) = rig.app.audit()
    assert (len(entry.who), len(entry.address or "")) == (MAX_TEXT, MAX_TEXT)
    assert [len(text) for text in entry.detail["ids"]] == [MAX_TEXT] * 5
    for token, length in (("a", 2), ("a", 2), ("b", 3), ("c", 3)):
        run_script(rig.client, "audit_append", KEY, repr(NOW), f'{{"token": "{token}"}}', 3)
        assert rig.client.command("LLEN", KEY) == length


def test_why_names_who_paused_until_that_has_ended(rig: QueueRig) -> None:
    rig.push(job("a"), job("b", perform_at=NOW + 60))
    rig.queue.pause(by="ann", now=NOW)
    rig.queue.pause(by="bob", now=NOW + 1)
    why = rig.queue.why("a", now=NOW + 90)
    assert (why.reason, why.paused_by) == ("paused", "ann")
    assert why.detail == "due, and the queue has been paused for 1 min 30 s by ann; resume it"
    assert "paused by ann, too" in rig.queue.why("b", now=NOW).detail
    rig.queue.resume()
    rig.queue.pause(now=NOW)
    assert rig.queue.why("a", now=NOW + 5).paused_by is None


def test_the_embedded_store_says_little_of_itself_and_a_server_much(rig: QueueRig, redis_url: str) -> None:
    info = rig.app.redis_info()
    assert (info.version, info.warnings) == ("", ())
    with closing(QueueRig(redis_url)) as server:
        info = server.app.redis_info()
        assert info.version.startswith(("Redis ", "Valkey "))
        assert (info.eviction, info.persistence) == ("noeviction", "none")
        assert info.warnings == ("Nothing is persisted: all jobs are lost when Redis ends.",)
        assert (info.used_memory > 100_000, info.clients >= 1) == (True, True)


def test_entries_are_found_by_who_what_to_what_and_when(rig: QueueRig) -> None:
    rig.app.note("Ann", "kick", "Orders")
    rig.app.note("bob", "kick", "Orders2")
    rig.app.note("joann@host", "stop", "node-1")
    stop, kick, first = rig.app.audit()

    def found(**wanted: Any) -> list[str]:
        return [entry.who for entry in rig.app.audit(**wanted)]

    assert found(who="aNN") == ["joann@host", "Ann"]
    assert found(action="kick") == ["bob", "Ann"]
    assert found(target="Orders") == found(who="ann", action="kick") == ["Ann"]
    assert found(since=kick.at) == ["joann@host", "bob"]
    assert found(since=kick.at, until=kick.at) == ["bob"]
    assert found(who="*") == found(target="") == found(after=first.cursor) == []
    assert found(after=stop.cursor) == ["bob", "Ann"]
    with pytest.raises(lowq.ConfigError, match="no cursor"):
        rig.app.audit(after="yesterday")


def test_pages_of_the_log_have_each_entry_once_while_others_are_written(rig: QueueRig) -> None:
    for number in range(450):
        rig.app.note("ann", "kick" if number % 3 else "bury", "Orders", number)
    seen: list[int | None] = []
    after = None
    while page := rig.app.audit(70, action="kick", after=after):
        seen += [entry.count for entry in page]
        after = page[-1].cursor
        rig.app.note("bob", "kick", "Orders", 1000)
    assert seen == [number for number in range(449, -1, -1) if number % 3]


def test_a_page_goes_on_after_an_entry_that_is_gone(rig: QueueRig) -> None:
    tokens = [rig.app.note("ann", "delete", "Orders", number) for number in range(3)]
    cursor = rig.app.audit()[1].cursor
    rig.app.note("ann", "delete", "Orders", 7, replaces=tokens[1])
    assert [entry.count for entry in rig.app.audit(after=cursor)] == [0]


def test_while_it_is_read_entries_may_be_written(rig: QueueRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "_TOGETHER", 5)
    for number in range(12):
        rig.app.note("ann", "kick", "Orders", number)
    command = Client.command

    def while_others_write(self: Client, *args: Any, **options: Any) -> Any:
        found = command(self, *args, **options)
        if args[0] == "LRANGE":
            rig.app.note("bob", "kick", "Orders", 99)
        return found

    monkeypatch.setattr(Client, "command", while_others_write)
    assert [entry.count for entry in rig.app.audit()] == list(range(11, -1, -1))
