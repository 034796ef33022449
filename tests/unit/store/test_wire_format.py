"""Keys and fields do not change without a record and a note for those who run two releases."""

from tests.rows import case
from tests.wire_format import MISSING, PAGE, RECORD, items, problems, read, renewed

RECORDED = "# begin\nformat v1\nshard due zset\nshard meta hash\nshard meta.owner field\n# changes\n+ shard solo set\n"
EMPTY = "<!-- changes of keys: begin -->\n| key | change | what |\n|---|---|---|\n<!-- changes of keys: end -->\n"
NOTE = "| `shard solo set` | added | It leaves it as it is. |\n"
WRITTEN = EMPTY.replace("<!-- changes of keys: end", f"{NOTE}<!-- changes of keys: end")
NOW = read(RECORDED)[0]


def test_the_record_and_the_notes_have_all_changes() -> None:
    """If this fails: run `python -m tests.wire_format`, and write into docs/compatibility.md what each change means."""
    assert problems(RECORD.read_text("utf-8"), PAGE.read_text("utf-8"), items()) == []


def test_the_record_has_every_kind_of_item() -> None:
    assert {"format v1", "shard due zset", "shard payloads:<id> zset or string", "shard meta.fence field",
            "shard wake channel", "namespace nodes hash", "namespace limit:<limit> hash"} <= set(items())  # fmt: skip


def test_nothing_is_to_be_done_when_all_is_recorded_and_noted() -> None:
    assert problems(RECORDED, WRITTEN, NOW) == []
    assert renewed(RECORDED, WRITTEN, NOW) == (RECORDED, WRITTEN)


def test_a_change_needs_a_line_in_the_record_and_a_note() -> None:
    rows: list[tuple[list[str], str]] = [
        ([*NOW, "shard meta.epoch field"], "+ shard meta.epoch field"),
        (NOW[:3] + NOW[4:], "- shard meta.owner field"),
        (["format v2", *NOW[1:]], "- format v1\n+ format v2"),
        ([item.replace("due zset", "due list") for item in NOW], "- shard due zset\n+ shard due list"),
    ]
    for now, line in rows:
        with case(now, line):
            lines = line.splitlines()
            assert [
                problem for problem in problems(RECORDED, WRITTEN, now) if "run python -m tests.wire_format" in problem
            ]
            record, page = renewed(RECORDED, WRITTEN, now)
            assert record == f"{RECORDED}{line}\n"
            asked = problems(record, page, now)
            assert len(asked) == len(lines)
            assert all("say there what an older release does with it" in problem for problem in asked)
            assert problems(record, page.replace(MISSING, "It ignores it."), now) == []
            assert renewed(record, page, now) == (record, page)


def test_a_line_that_was_only_added_to_the_record_by_hand_is_found() -> None:
    (problem,) = problems(RECORDED, EMPTY, NOW)
    assert "has no note about `shard solo set` (added): say there what an older release does" in problem


def test_a_note_about_nothing_is_found() -> None:
    other = WRITTEN.replace("solo", "alone")
    assert any("has a note about `shard alone set`, added: no such change" in problem
               for problem in problems(RECORDED, other, NOW))  # fmt: skip
