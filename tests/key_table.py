"""The tables of keys in docs/keys.md, from lowq/store/keys.py: ``python -m tests.key_table`` writes them there."""

import re
from collections.abc import Sequence
from pathlib import Path

from lowq.store.keys import NAMESPACE_KEYS, SHARD_KEYS, Key

PAGE = Path(__file__).resolve().parents[1] / "docs" / "keys.md"
TABLES: dict[str, Sequence[Key]] = {"keys of a shard": SHARD_KEYS, "keys of the namespace": NAMESPACE_KEYS}


def main() -> None:
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def with_tables(page: str) -> str:
    """The page with the tables as they should be."""
    for title, keys in TABLES.items():
        between = re.compile(f"(<!-- {title}: begin.*? -->\n).*?(<!-- {title}: end -->)", re.DOTALL)
        assert between.search(page), f"the page has no place for the {title}"
        page = between.sub(lambda found, keys=keys: f"{found[1]}\n{table(keys)}\n{found[2]}", page)  # type: ignore[misc]  # mypy does not know the default
    return page


def table(keys: Sequence[Key]) -> str:
    """Rows of Markdown."""
    rows = [f"| `{key.name}` | {_type(key)} | {_content(key)} | {_owners(key)} | {key.lifetime} |" for key in keys]
    return "\n".join(["| key | type | content | changed by | is there |", "|---|---|---|---|---|", *rows, ""])


def _type(key: Key) -> str:
    return " or ".join(name if name == "channel" else name.upper() for name in key.types)


def _owners(key: Key) -> str:
    return ", ".join(f"`{name}`" for name in key.owners)


def _content(key: Key) -> str:
    return key.content or ", ".join(f"{name} ({means})" if means else name for name, means in key.fields.items())


if __name__ == "__main__":
    main()
