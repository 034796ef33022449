"""A function may be long or deep, not both: of more than 40 lines, at most three levels of branches and loops."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
LINES, LEVELS = 40, 3

_BLOCKS = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match, ast.AsyncFor, ast.AsyncWith)
_OWN = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


def levels(node: ast.AST) -> int:
    """How deep blocks are nested in it. An elif is on the level of its if; functions inside count for themselves."""
    deepest = 0
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _OWN):
            continue
        is_elif = isinstance(child, ast.If) and isinstance(node, ast.If) and node.orelse == [child]
        deepest = max(deepest, levels(child) + (isinstance(child, _BLOCKS) and not is_elif))
    return deepest


def too_long(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            lines = node.end_lineno - node.lineno + 1
            if lines > LINES and (deep := levels(node)) > LEVELS:
                yield f"{node.name}: {lines} lines, {deep} levels"


def test_no_function_is_both_long_and_deep() -> None:
    paths = [*(ROOT / "lowq").rglob("*.py"), *(ROOT / "web/lowq_web").rglob("*.py")]
    assert len(paths) > 100
    assert {function for path in paths for function in too_long(path.read_text())} == set()


def test_one_that_is_both_is_found() -> None:
    deep = "def f():\n if a:\n  for b in c:\n   while d:\n    try:\n     pass\n    finally:\n     pass\n"
    assert list(too_long(deep)) == []
    assert list(too_long(deep + " x = 1\n" * LINES)) == [f"f: {LINES + 8} lines, 4 levels"]
