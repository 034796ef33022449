"""What is in a payload, for filters: ``customer:7``, ``order.customer:7``."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from lowq.errors import ConfigError

#: Characters of such a text, and names of fields in it.
MAX_TEXT, MAX_NAMES = 512, 20


class PayloadField(NamedTuple):
    """A field of a payload, by its path, and the value that is looked for."""

    path: tuple[str, ...]
    value: str

    @classmethod
    def parse(cls, text: object) -> "PayloadField":
        """``a.b:7``: the field ``b`` of the object in the field ``a``. The value may have colons.

        Raises:
            ConfigError: it is nothing of that kind.
        """
        check_text("payload", text)
        name, colon, value = str(text).partition(":")
        path = tuple(name.strip().split("."))
        if not colon or not all(path) or not value.strip():
            raise ConfigError(f"payload={text!r:.100}: it is a field and its value, such as customer:7 or order.id:7")
        if len(path) > MAX_NAMES:
            raise ConfigError(f"payload={text!r:.100} has {len(path)} names; a path has at most {MAX_NAMES}")
        return cls(path, value.strip())

    def holds(self, payload: Any) -> bool:
        """Whether the payload has that value there. In a list, one of its elements is enough. 7 is 7 and "7"; a name
        with dots in it counts, too.
        """
        return self._is_in(payload, self.path)

    def _is_in(self, value: Any, path: Sequence[str]) -> bool:
        if isinstance(value, list | tuple):
            return any(self._is_in(item, path) for item in value)
        if not path:
            return self._equals(value)
        if not isinstance(value, dict):
            return False
        for count in range(1, len(path) + 1):
            name = ".".join(path[:count])
            if name in value and self._is_in(value[name], path[count:]):
                return True
        return False

    def _equals(self, value: Any) -> bool:
        if isinstance(value, str):
            return value.strip() == self.value
        if value is None or isinstance(value, bool | int | float):
            return json.dumps(value) == self.value
        return str(value) == self.value


def check_text(name: str, text: object) -> None:
    """
    Raises:
        ConfigError: it is no text, or too long.
    """
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"{name}={text!r:.100}: it is a text to look for")
    if len(text) > MAX_TEXT:
        raise ConfigError(f"{name}={text!r:.50}... has {len(text)} characters; it has at most {MAX_TEXT}")
