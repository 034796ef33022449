"""A call: one run of a script, or a plain command."""

from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

#: An argument of a script.
Argument = str | bytes | int | float
#: The reply to a call, with its fields named.
R_co = TypeVar("R_co", covariant=True)


def _as_it_is(reply: Any) -> Any:
    return reply


class Call(Generic[R_co]):
    """One run of a script. ``key`` routes it; ``args`` may still be changed until it is sent. ``data`` is what follows
    them: a push has thousands of arguments, which need not be looked at one by one. ``read`` names the fields of its
    reply. ``only_if``: whether somebody still wants it; None: yes.
    """

    __slots__ = ("args", "data", "key", "only_if", "read", "script")

    def __init__(
        self,
        script: str,
        key: str,
        args: Iterable[Argument],
        data: list[bytes] | None = None,
        *,
        read: Callable[[Any], R_co] = _as_it_is,
    ) -> None:
        self.script = script
        self.key = key
        self.args = list(args)
        self.data = data or []
        self.read = read
        self.only_if: Callable[[], bool] | None = None

    def is_wanted(self) -> bool:
        """Whether somebody still wants it. Called each time right before it is sent, on whatever connection; what it is
        after that is sent.
        """
        return self.only_if is None or self.only_if()


class Command(Call[Any]):
    """A plain command among calls of scripts, reading or otherwise fit to be repeated. ``script`` is its name."""

    __slots__ = ()

    def __init__(self, key: str, name: str, *args: str | bytes | int | float) -> None:
        super().__init__(name, key, args)
