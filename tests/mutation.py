"""How much the suite notices: small changes of lowq's code, drawn by a seed, of which the tests that run the line must
fail.

    python -m tests.mutation --count 400 --seed 1
    python -m tests.mutation --only lowq/push --count 40 --show      # what would be changed, and no more

First all tests of the tiers `TIERS` run once, and `coverage` notes which of them runs which line (``--map FILE`` keeps
that for the next time, or reads it). Then each mutant runs, in a copy of the tree, the tests that run its line, fastest
first, until one fails or `BUDGET` is spent. Changes in what is logged are left out, and so are texts.
"""

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from queue import Empty, SimpleQueue

import coverage

ROOT = Path(__file__).parent.parent
#: What is run: tests whose code runs in their own process, so that the lines are known that they run.
TIERS = ("tests/rules",)
#: Seconds that the tests of one mutant may be expected to take; the fastest ones that fit are run.
BUDGET = 30.0
#: Seconds after which a mutant that hangs is ended, and counts as caught.
LIMIT = 240
#: pytest's exit code when there is no test of that name, and also when the mutant can't be imported.
_WRONG_USAGE = 4
#: What is needed in the copy of the tree.
COPIED = (
    "lowq", "lowq_pytest", "web", "tests", "examples", "benchmarks", "docs", "deploy", "pyproject.toml", "README.md",
    "Makefile", "CHANGELOG.md", "CONTRIBUTING.md",
)  # fmt: skip

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
}  # fmt: skip


@dataclass(frozen=True, slots=True, order=True)
class Mutant:
    """A piece of a file, and what stands there instead."""

    path: str
    line: int
    start: int
    end: int
    before: str
    after: str

    def __str__(self) -> str:
        before, after = (re.sub(r"\s+", " ", text)[:70] for text in (self.before, self.after))
        return f"{self.path}:{self.line}: {before}  ->  {after}"

    @property
    def package(self) -> str:
        parts = self.path.split("/")
        return parts[1] if len(parts) > 2 else "lowq"

    def apply(self, source: str) -> str:
        return source[: self.start] + self.after + source[self.end :]


def mutants_of(path: str, source: str) -> Iterator[Mutant]:
    """All mutants of a file, each another one."""
    lines = source.splitlines(keepends=True)
    starts = [0, *accumulate(map(len, lines))]

    def at(line: int, column: int) -> int:
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    for node, after in _changes(ast.parse(source)):
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start, end = at(node.lineno, node.col_offset), at(node.end_lineno, node.end_col_offset)
        text = ast.unparse(after)
        yield Mutant(
            path, node.lineno, start, end, source[start:end], f"({text})" if isinstance(after, ast.expr) else text
        )


def _changes(tree: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, ast.expr | ast.stmt]]:
    """Nodes, and what stands in their place."""
    for node in ast.iter_child_nodes(tree):
        if _is_left_out(node):
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for part in [*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body]:
                yield from _change(part)
                yield from _changes(part)
            continue
        if isinstance(node, ast.AnnAssign):
            if node.value is not None:
                yield from _change(node.value)
                yield from _changes(node.value)
            continue
        yield from _change(node)
        yield from _changes(node)


def _is_left_out(node: ast.AST) -> bool:
    """What is logged, said or only read by type checkers."""
    if isinstance(node, ast.JoinedStr):
        return True
    if isinstance(node, ast.FunctionDef) and node.name in ("__repr__", "__str__"):
        return True
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
        return True
    called = node.value if isinstance(node, ast.Expr) else node
    return (
        isinstance(called, ast.Call)
        and isinstance(called.func, ast.Attribute)
        and isinstance(called.func.value, ast.Name)
        and called.func.value.id in ("log", "warnings")
    )


def _change(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, ast.expr | ast.stmt]]:
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in _COMPARISONS:
            yield node, ast.Compare(node.left, [_COMPARISONS[type(operator)]()], node.comparators)
        case ast.BoolOp():
            yield node, ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
        case ast.UnaryOp(op=ast.Not()):
            yield node, node.operand
        case ast.BinOp() if type(node.op) in _OPERATORS and not _has_text(node):
            yield node, ast.BinOp(node.left, _OPERATORS[type(node.op)](), node.right)
        case ast.Constant(value=bool()):
            yield node, ast.Constant(not node.value)
        case ast.Constant(value=int() | float() as number):
            yield node, ast.Constant(number + 1)
        case ast.If(test=ast.Name() | ast.Attribute() | ast.Call()):
            yield node.test, ast.UnaryOp(ast.Not(), node.test)
        case ast.Return(value=ast.expr()) if not (isinstance(node.value, ast.Constant) and node.value.value is None):
            yield node, ast.Return(ast.Constant(None))
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.Raise():
            yield node, ast.Pass()


def _has_text(node: ast.AST) -> bool:
    return any(
        isinstance(part, ast.JoinedStr) or (isinstance(part, ast.Constant) and isinstance(part.value, str | bytes))
        for part in ast.walk(node)
    )


def draw(count: int, seed: int, only: str = "lowq") -> list[Mutant]:
    """So many of all mutants, the same for the same seed."""
    found: list[Mutant] = []
    for path in sorted((ROOT / only).rglob("*.py") if (ROOT / only).is_dir() else [ROOT / only]):
        found += mutants_of(str(path.relative_to(ROOT)), path.read_text())
    return sorted(random.Random(seed).sample(sorted(found), min(count, len(found))))


# --- which tests run which line ---


def write_map(folder: Path, jobs: int) -> None:
    """Runs the tests, and notes the lines of each and how long it took."""
    command = [
        sys.executable, "-m", "pytest", "-q", "-n", str(jobs), "--dist", "worksteal", "-m", "not slow", *TIERS,
        "-p", "no:randomly", "--cov=lowq", "--cov-context=test", "--cov-report=", f"--junitxml={folder / 'times.xml'}",
    ]  # fmt: skip
    environment = {**os.environ, "COVERAGE_FILE": str(folder / "lines")}
    subprocess.run(command, cwd=ROOT, env=environment, check=False, stdout=subprocess.DEVNULL)


class Lines:
    """Which tests run a line."""

    def __init__(self, folder: Path) -> None:
        self._data = coverage.CoverageData(str(folder / "lines"))
        self._data.read()
        self._seconds: dict[str, float] = {}
        for case in xml.etree.ElementTree.parse(folder / "times.xml").iter("testcase"):
            file = case.get("classname", "").replace(".", "/")
            self._seconds[f"{file}::{case.get('name')}"] = float(case.get("time", 0))
        self._lines: dict[str, dict[int, list[str]]] = defaultdict(dict)

    def tests(self, mutant: Mutant) -> list[str]:
        """Those that fit into the budget, fastest first."""
        path = str(ROOT / mutant.path)
        if mutant.path not in self._lines:
            self._lines[mutant.path] = self._data.contexts_by_lineno(path)
        names = {name.rpartition("|")[0] for name in self._lines[mutant.path].get(mutant.line, [])} - {""}
        chosen: list[str] = []
        left = BUDGET
        for seconds, name in sorted((self._of(name), name) for name in names):
            left -= seconds
            if left < 0 and chosen:
                break
            chosen.append(name)
        return chosen

    def _of(self, name: str) -> float:
        file, _, case = name.partition("::")
        return self._seconds.get(f"{file.removesuffix('.py')}::{case.rpartition('::')[2]}", 1.0)


# --- one mutant after the other ---


class Copy:
    """A copy of the tree, in which one mutant at a time is tried."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__", "node_modules"))
            elif source.exists():
                shutil.copy(source, folder / name)

    def catches(self, mutant: Mutant, tests: Sequence[str]) -> bool:
        """Whether one of the tests fails.

        Raises:
            ValueError: pytest does not find them.
        """
        path = self._folder / mutant.path
        sound = path.read_text()
        path.write_text(mutant.apply(sound))
        try:
            code = self._run(tests)
        finally:
            path.write_text(sound)
        if code == _WRONG_USAGE and self._run(tests, "--collect-only") == _WRONG_USAGE:
            raise ValueError(f"these tests are not to be found: {' '.join(tests)[:1000]}")
        return code != 0

    def _run(self, tests: Sequence[str], *more: str) -> int:
        arguments = self._folder / "tests.txt"
        arguments.write_text("\n".join(tests))
        command = [
            sys.executable, "-m", "pytest", "-x", "-q", "-n0", "-p", "no:randomly", "-p", "no:cacheprovider",
            *more, f"@{arguments}",
        ]  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": str(self._folder), "PYTHONDONTWRITEBYTECODE": "1"}
        running = subprocess.Popen(
            command, cwd=self._folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        try:
            return running.wait(LIMIT)
        except subprocess.TimeoutExpired:
            return -1
        finally:
            try:
                os.killpg(running.pid, 9)  # servers of one that hung, too
            except ProcessLookupError:
                pass
            running.wait()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="lowq", help="a folder or file of lowq")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--map", type=Path, help="a folder for which test runs which line; read if it is there")
    parser.add_argument("--show", action="store_true", help="show the mutants, and end")
    options = parser.parse_args(arguments)
    drawn = draw(options.count, options.seed, options.only)
    if options.show:
        sys.stdout.write("".join(f"{mutant}\n" for mutant in drawn))
        return 0
    with tempfile.TemporaryDirectory(prefix="mutation-") as name:
        folder = options.map or Path(name) / "map"
        if not (folder / "lines").exists():
            folder.mkdir(parents=True, exist_ok=True)
            write_map(folder, options.jobs)
        outcomes = _try_all(drawn, Lines(folder), Path(name), options.jobs)
    sys.stdout.write("\n".join(["", *_table(outcomes), ""]))
    return 0


def _try_all(drawn: Sequence[Mutant], lines: Lines, folder: Path, jobs: int) -> dict[Mutant, str]:
    """Mutant -> caught, missed or not run."""
    waiting: SimpleQueue[tuple[Mutant, list[str]]] = SimpleQueue()
    for mutant in drawn:
        waiting.put((mutant, lines.tests(mutant)))
    outcomes: dict[Mutant, str] = {}

    def work(number: int) -> None:
        copy = Copy(folder / f"copy-{number}")
        while True:
            try:
                mutant, tests = waiting.get_nowait()
            except Empty:
                return
            began = time.monotonic()
            outcome = "not run" if not tests else "caught" if copy.catches(mutant, tests) else "missed"
            outcomes[mutant] = outcome
            seconds = time.monotonic() - began
            sys.stdout.write(f"{len(outcomes)}/{len(drawn)} {outcome}, {len(tests)} tests, {seconds:.0f} s: {mutant}\n")
            sys.stdout.flush()

    threads = [threading.Thread(target=work, args=[number]) for number in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def _table(outcomes: dict[Mutant, str]) -> list[str]:
    lines = [
        "| package | mutants | caught | missed | in no test's own process |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    packages = sorted({mutant.package for mutant in outcomes})
    for package in [*packages, ""]:
        counts = Counter(outcome for mutant, outcome in outcomes.items() if package in ("", mutant.package))
        row = [package or "all", sum(counts.values()), counts["caught"], counts["missed"], counts["not run"]]
        lines.append(f"| {' | '.join(map(str, row))} |")
    return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
