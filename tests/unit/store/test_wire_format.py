"""Keys and fields do not change without a record and a note for those who run two releases."""

from tests.wire_format import PAGE, RECORD, items, problems


def test_the_record_and_the_notes_have_all_changes() -> None:
    """If this fails: run `python -m tests.wire_format`, and write into docs/compatibility.md what each change means."""
    assert problems(RECORD.read_text("utf-8"), PAGE.read_text("utf-8"), items()) == []


def test_the_record_has_every_kind_of_item() -> None:
    assert {"format v1", "shard due zset", "shard payloads:<id> zset or string", "shard meta.fence field",
            "shard wake channel", "namespace nodes hash", "namespace limit:<limit> hash"} <= set(items())  # fmt: skip
