"""The users of docs/operations.md: what is written there is what the tests work with."""

import re
import shlex
from pathlib import Path
from typing import Any

from lowq.store.calls import load_scripts

DOCUMENT = Path(__file__).parents[1] / "docs" / "operations.md"
#: What users are refused that the document calls optional, as ACL LOG names it.
OPTIONAL = {"info", "config|get", "client|setinfo"}
SECRET = "s3cret"
#: What scripts call and can do without.
CAN_DO_WITHOUT = {"spublish", "memory|usage"}

_CALL = re.compile(r"redis\.p?call\(\s*'(\w+)'(?:,\s*'(USAGE)')?")
#: Commands that reach a call by a variable.
_BY_NAME = re.compile(r"'([HSZ]SCAN|HLEN|[SZ]CARD|ZMSCORE|HMGET|ZREM|SREM|HDEL)'")


def commands(names: tuple[str, ...]) -> set[str]:
    sources = [load_scripts()[name].source for name in names]
    called = {"|".join(filter(None, found)).lower() for source in sources for found in _CALL.findall(source)}
    return called | {name.lower() for source in sources for name in _BY_NAME.findall(source)}


def rules() -> dict[str, list[str]]:
    """User -> the rules of its ACL SETUSER."""
    text = DOCUMENT.read_text().replace("\\\n", " ")
    found = {}
    for line in re.findall(r"^ACL SETUSER .*$", text, re.MULTILINE):
        _, _, user, *words = shlex.split(line)
        found[user] = words
    return found


def allowed(user: str) -> set[str]:
    """The commands that a user may run, in small letters."""
    return {word.removeprefix("+") for word in rules()[user] if word.startswith("+")}


def create(client: Any, user: str, *more: str) -> None:
    """The user as the document has it, and perhaps with more rules."""
    words = [word.replace(">SECRET", f">{SECRET}") for word in rules()[user]]
    client.execute_command("ACL", "SETUSER", user, "reset", *words, *more)


def refused(client: Any) -> set[str]:
    """What was refused to any user, besides what is optional."""
    return {str(entry["object"]) for entry in client.acl_log(count=128)} - OPTIONAL


def as_user(url: str, user: str) -> str:
    """The URL of a server for that user."""
    return url.replace("redis://", f"redis://{user}:{SECRET}@")
