"""The wire format as data: scripts, functions and documentation say the same."""

import re
from pathlib import Path
from typing import get_args

from lowq.doctor.jobs import KNOWN_KEYS, PAYLOADS, SETS
from lowq.doctor.shards import _META
from lowq.store import keys
from lowq.store.keys import NAMESPACE_KEYS, SHARD_KEYS, Key, Type, kind_of
from tests.key_table import PAGE, with_tables
from tests.rows import case

ROOT = Path(__file__).resolve().parents[3]
LUA = ROOT / "lowq" / "store" / "lua"
TEXTS = {path.name: re.sub(r"--[^\n]*", "", path.read_text("utf-8")) for path in sorted(LUA.rglob("*.lua"))}
SOURCE = "\n".join(TEXTS.values())
OF_SHARD = {key.name: key for key in SHARD_KEYS}
ONES = {key.name for key in SHARD_KEYS if key.is_one}


def names_in(text: str) -> set[str]:
    return set(re.findall(r"'([^']*)'", text))


def test_the_page_has_the_tables_of_the_code() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert with_tables(page) == page, "python -m tests.key_table"


def test_an_entry_is_complete() -> None:
    all_keys: list[Key] = [*SHARD_KEYS, *NAMESPACE_KEYS]
    for key in all_keys:
        with case(key):
            assert set(key.types) <= set(get_args(Type))
            assert bool(key.content) != bool(key.fields)
            assert bool(key.lifetime) == (key.types != ("channel",))
            for owner in key.owners:
                assert (ROOT / "lowq" / owner).is_dir() or (ROOT / "lowq" / f"{owner}.py").is_file()
            assert not key.has_ids or key.is_one


def test_names_are_there_once() -> None:
    for some in (SHARD_KEYS, NAMESPACE_KEYS):
        named = [(key.name, key.types == ("channel",)) for key in some]
        assert len(set(named)) == len(named)


def test_scripts_append_these_names_and_no_others() -> None:
    appended = set(re.findall(r"\bprefix \.\. '([^']+)'", SOURCE))
    assert appended
    assert appended <= {key.head for key in SHARD_KEYS}
    assert {key.head for key in SHARD_KEYS} <= names_in(SOURCE)


def test_fields_of_meta_are_these() -> None:
    fields = OF_SHARD["meta"].fields.keys()
    read = re.findall(r"(?:prefix \.\. 'meta'|key_meta)((?:,\s*'[a-z_]+')+)", SOURCE)
    used = {name for part in read for name in names_in(part)}
    assert used
    assert used <= fields
    assert {field.partition("<")[0] for field in fields} <= names_in(SOURCE)
    assert set(_META) <= fields


def test_the_doctor_is_told_every_key_whose_type_is_wrong() -> None:
    text = TEXTS["shard_snapshot.lua"]
    checked = dict(re.findall(r"[{(] ?'([\w:]+)', '(zset|hash|set|list|string)'", text))
    assert checked == {name: OF_SHARD[name].types[0] for name in ONES}


def test_the_doctor_knows_all_keys() -> None:
    assert set(SETS) == {key.name for key in SHARD_KEYS if key.has_ids}
    assert {name.decode() for name in KNOWN_KEYS} == ONES
    assert {f"{kind.decode()}<id>" for kind in PAYLOADS} == {key.name for key in SHARD_KEYS} - ONES - {
        key.name for key in SHARD_KEYS if key.types == ("channel",)
    }


def test_nothing_that_does_not_end_by_itself_is_left_of_a_dropped_shard() -> None:
    (rest,) = re.findall(r"ipairs\(\{([^}]*)\}\) do\s+rest\[i\]", TEXTS["drop.lua"])
    emptied = {"due", "taken", "morgue"}  # and then they are not there
    expire = {name for name in ONES if OF_SHARD[name].lifetime.startswith("expires")}
    assert names_in(rest) == ONES - emptied - expire


def test_a_key_of_the_namespace_has_one_function_that_names_it() -> None:
    made = {
        keys.queues_key("n"),
        keys.nodes_key("n"),
        keys.history_key("n", "<queue>"),
        keys.error_groups_key("n", "<queue>"),
        keys.audit_key("n"),
        keys.tasks_key("n"),
        keys.logins_key("n"),
        keys.notices_key("n"),
        keys.confirmations_key("n"),
        keys.logins_key("n"),
        keys.session_key("n", "<session>"),
        keys.limit_key("n", "<limit>"),
    }
    assert made == {f"n:v1:{key.name}" for key in NAMESPACE_KEYS}
    functions = {name for name in vars(keys) if name.endswith("_key") and not name.startswith("_")}
    assert len(functions) == len(made)
    assert keys.shard_prefix("n", "Orders", 3) == "n:v1:{Orders:3bb}:"


def test_the_kind_of_a_key_outside_the_shards() -> None:
    rows: list[tuple[str, Key | None]] = [
        ("n:v1:queues", keys.QUEUES), ("n:v1:nodes", keys.NODES), ("n:v1:history:Orders", keys.HISTORY),
        ("n:v1:audit", keys.AUDIT),
        ("n:v1:session:ab", keys.SESSION), ("n:v1:audits", None), ("m:v1:audit", None), ("n:v1:{Orders:1}:due", None),
    ]  # fmt: skip
    for name, kind in rows:
        with case(name, kind):
            assert kind_of("n", name) is kind
