"""Keys and fields do not change without a record and a note for those who run two releases."""

from tests.rows import case
from tests.wire_format import PAGE, RECORD, items, problems, renewed


def test_the_record_and_the_notes_have_all_changes() -> None:
    """If this fails: run `python -m tests.wire_format`, and write into docs/compatibility.md what each change means."""
    assert problems(RECORD.read_text("utf-8"), PAGE.read_text("utf-8"), items()) == []


def test_the_record_has_every_kind_of_item() -> None:
    assert {"format v1", "shard due zset", "shard payloads:<id> zset", "shard meta.fence field",
            "shard wake channel", "namespace nodes hash", "namespace limit:<limit> hash"} <= set(items())  # fmt: skip


def test_a_change_without_a_line_in_the_record_or_a_note_is_found() -> None:
    record, page, now = RECORD.read_text("utf-8"), PAGE.read_text("utf-8"), items()
    for changed in ([*now, "shard meta.newer field"], now[:-1]):
        with case(changed[-1]):
            (unrecorded,) = problems(record, page, changed)
            assert "not recorded" in unrecorded
            new_record, new_page = renewed(record, page, changed)
            (unwritten,) = problems(new_record, new_page, changed)
            assert "has no note" in unwritten
            (needless,) = problems(record, new_page, now)
            assert "no such change" in needless
