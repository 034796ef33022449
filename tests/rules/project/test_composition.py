"""No class of ours shares its private names with a class of the standard library.

From Python 3.13 on `threading.Thread` has an attribute `_handle`: a subclass with a method of that name broke.
"""

import ast
import importlib
import inspect
import multiprocessing.process
import pkgutil
import sys
import textwrap
import threading
from collections.abc import Iterator

import lowq
import lowq_web

#: What has no private names written in Python: bases of types, and containers and exceptions of `builtins`.
_PLAIN = {"abc", "builtins", "collections.abc", "enum", "typing"}
#: What a class is to hold, and not to be: their private names do most of the work, and change.
_HELD = (threading.Thread, multiprocessing.process.BaseProcess)


def classes() -> Iterator[type]:
    for package in (lowq, lowq_web):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            # Django's modules want a project that is set up.
            if not found.name.endswith(".__main__") and not found.name.startswith("lowq.contrib.django"):
                module = importlib.import_module(found.name)
                yield from (
                    kind
                    for kind in vars(module).values()
                    if isinstance(kind, type) and kind.__module__ == module.__name__
                )


def private_names(owner: type) -> set[str]:
    """The names with one underscore that the class itself defines or assigns."""
    nodes = list(ast.walk(ast.parse(textwrap.dedent(inspect.getsource(owner)))))
    names = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    names |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


def faults(owner: type) -> list[str]:
    bases = [
        base
        for base in owner.__mro__[1:]
        if base.__module__.partition(".")[0] in sys.stdlib_module_names and base.__module__ not in _PLAIN
    ]
    if not bases:
        return []
    if any(issubclass(base, _HELD) for base in bases):
        return [f"{owner.__qualname__} is a {bases[0].__name__}: let it have one"]
    return [f"{owner.__qualname__}.{name}, of a {bases[0].__name__}" for name in private_names(owner)]


def test_no_class_is_a_thread_or_shares_private_names_with_the_standard_library() -> None:
    found = list(classes())
    assert len(found) > 100
    assert [fault for owner in found for fault in faults(owner)] == []


def test_the_walk_sees_what_is_forbidden_and_leaves_exceptions_alone() -> None:
    class Thread(threading.Thread):
        pass

    class Event(threading.Event):
        def clear(self) -> None:
            self._flag = True

    class Local(threading.local):
        def _look(self) -> None: ...

    class Error(ValueError):
        def _look(self) -> None: ...

    assert all(map(faults, (Thread, Event, Local)))
    assert faults(Error) == []
