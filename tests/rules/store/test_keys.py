"""The wire format as data: scripts, functions and documentation say the same."""

import re
from inspect import signature
from pathlib import Path
from typing import get_args

from lowq.operate.integrity import KNOWN_KEYS, PAYLOADS, SETS
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


def test_an_entry_is_complete_and_there_once() -> None:
    names = [(key.name, key.types == ("channel",)) for key in (*SHARD_KEYS, *NAMESPACE_KEYS)]
    assert len(set(names)) == len(names)
    for key in (*SHARD_KEYS, *NAMESPACE_KEYS):
        with case(key):
            assert set(key.types) <= set(get_args(Type))
            assert bool(key.content) != bool(key.fields)
            assert bool(key.lifetime) == (key.types != ("channel",))
            for owner in key.owners:
                assert any((ROOT / place).exists() for place in (f"lowq/{owner}", f"lowq/{owner}.py", f"web/{owner}"))
            assert not key.has_ids or key.is_one


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


def test_the_doctor_knows_all_keys_and_is_told_each_whose_type_is_wrong() -> None:
    checked = re.findall(r"[{(] ?'([\w:]+)', '(zset|hash|set|list|string)'", TEXTS["shard_snapshot.lua"])
    assert dict(checked) == {name: OF_SHARD[name].types[0] for name in ONES}
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
    functions = [made for name, made in vars(keys).items() if name.endswith("_key") and name[0] != "_"]
    made = {function("n", *["<>"] * (len(signature(function).parameters) - 1)) for function in functions}
    assert made == {"n:v1:" + re.sub("<.*>", "<>", key.name) for key in NAMESPACE_KEYS}
    assert len(functions) == len(made)
    assert keys.shard_prefix("n", "Orders", 3) == "n:v1:{Orders:3bb}:"


def test_the_kind_of_a_key_outside_the_shards() -> None:
    rows: list[tuple[str, Key | None]] = [
        ("n:v1:queues", keys.QUEUES), ("n:v1:history:Orders", keys.HISTORY), ("n:v1:audits", None),
        ("m:v1:audit", None), ("n:v1:{Orders:1}:due", None),
    ]  # fmt: skip
    for name, kind in rows:
        with case(name, kind):
            assert kind_of("n", name) is kind
