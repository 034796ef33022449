"""The history of any git repository as a stream of changes, and a table kept in step with it.

Each path that a commit changes is one job: its id is the path, its score the position of the commit in the
history. The jobs are pushed shuffled, some of them twice, from several threads at once, and workers keep a
table path -> blob in SQLite. Once the queue is empty the table must be what `git ls-tree -r HEAD` says, path
for path: a change that was lost, or an old one written over a newer one, would show.

In one process, without Redis:

    python examples/git_history.py run-embedded REPO

With Redis (LOWQ_REDIS_URL), and as many nodes as you like that write one table:

    lowq run examples/git_history.py            # in one terminal, or in three
    python examples/git_history.py push REPO       # in another
    python examples/git_history.py verify REPO     # waits until the queue is empty, then compares

The table's file is GIT_HISTORY_DB, by default git_history.sqlite3; take a new one for another repository or
for a history that was rewritten. Needs git 2.31 or later.

Merges. A position needs a line, and a history with merges is none. So it is read along the first parents
(HEAD, its first parent, the first parent of that, down to a root), each commit as its difference from its
first parent: a merge is one step that brings in all that was merged. In that line each difference starts from
the tree where the one before it ended, the first from the empty tree. So they add up to HEAD's tree exactly,
whatever the repository; of a shallow clone too, where the first step brings all that its oldest commit has.

Paths. A path is bytes, an id is text of at most 512 bytes. A path is written as text in a way that can be
undone (`text_of`, `path_of`); one that is too long gets a short id (`id_of`) and travels in the payload.
"""

import hashlib
import os
import random
import re
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import cached_property
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NotRequired, TypeAlias, TypedDict
from urllib.parse import unquote_to_bytes

import click

import lowq
from lowq.node.node import Node

# ------------------------------------------------------------------------------------------ the history


class Change(TypedDict):
    """What one commit did to one path: the payload."""

    position: int  #: of the commit in the history, from 1; the job's score too
    commit: str
    op: str  #: A added, M modified (content or mode), T another type, D deleted
    mode: str | None  #: 100644, 100755, 120000 (symlink), 160000 (submodule); None: deleted
    blob: str | None  #: of a submodule: its commit; None: deleted
    path: NotRequired[str]  #: only where the id isn't the path


#: path as text -> (mode, blob)
Tree: TypeAlias = dict[str, tuple[str, str]]


def head_of(repo: Path) -> str | None:
    """The id of the commit at HEAD; None in a repository without commits."""
    command = ["git", "-C", str(repo), "rev-parse", "--verify", "--quiet", "HEAD^{commit}"]
    found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if found.returncode not in (0, 1):  # 1: HEAD is a branch that has no commit yet
        raise click.ClickException(f"{repo} can't be read by git")
    return found.stdout.strip() or None


def read_history(repo: Path, head: str) -> Iterator[tuple[str, Change]]:
    """Each (path as text, change) up to the commit `head`, oldest first, while git still writes."""
    options = (
        "--format=%H --raw -z --reverse --first-parent --diff-merges=first-parent "
        # Whatever the user's configuration says:
        "--root --no-renames --no-abbrev --no-relative --no-show-signature --ignore-submodules=none"
    )
    position, commit = 0, ""
    records = git_records(repo, "log", *options.split(), head)
    for record in records:
        if record.startswith((b":", b"\n:")):  # ":old-mode new-mode old-blob new-blob op", then the path
            _, mode, _, blob, op = record.decode().split(" ")
            gone = op == "D"
            yield (
                text_of(next(records)),
                {
                    "position": position,
                    "commit": commit,
                    "op": op,
                    "mode": None if gone else mode,
                    "blob": None if gone else blob,
                },
            )
        else:
            position, commit = position + 1, record.decode()


def read_tree(repo: Path, head: str) -> Tree:
    """What the table must be in the end."""
    tree = {}
    for record in git_records(repo, "ls-tree", "-r", "-z", "--full-tree", head):
        entry, path = record.split(b"\t", 1)
        mode, _, blob = entry.decode().split(" ")
        tree[text_of(path)] = (mode, blob)
    return tree


def git_records(repo: Path, *arguments: str) -> Iterator[bytes]:
    """The NUL-terminated records that a git command writes, never more than a block of them in memory."""
    with subprocess.Popen(["git", "-C", str(repo), *arguments], stdout=subprocess.PIPE) as git:
        assert git.stdout is not None
        with git.stdout as output:  # a reader that leaves early closes the pipe, and that ends git
            rest = b""
            while block := output.read(1 << 16):
                *records, rest = (rest + block).split(b"\0")
                yield from records
    if git.returncode != 0:
        raise click.ClickException(f"git {arguments[0]} failed in {repo}")


# ----------------------------------------------------------------------------------------- paths and ids


def text_of(path: bytes) -> str:
    """A path as text: %XX for bytes that are no UTF-8, for control characters, and for % itself."""
    return _NOT_PLAIN.sub(_percent, path.decode("utf-8", "surrogateescape"))


def path_of(text: str) -> bytes:
    """The way back from `text_of`."""
    return unquote_to_bytes(text)


_NOT_PLAIN = re.compile("[%\x00-\x1f\x7f-\x9f\udc80-\udcff]")


def _percent(character: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in character[0].encode("utf-8", "surrogateescape"))


LONGEST_ID = 512  #: bytes


def id_of(path: str) -> str:
    """The path itself; of one that is too long its beginning and a digest of the whole.

    After a % in a path's text two hexadecimal digits follow, never ~: no short id is another path's id.
    """
    raw = path.encode()
    if len(raw) <= LONGEST_ID:
        return path
    end = "%~" + hashlib.sha256(raw).hexdigest()
    return raw[: LONGEST_ID - len(end)].decode(errors="ignore") + end


# --------------------------------------------------------------------------------- the table, the worker

CREATE = """
    CREATE TABLE IF NOT EXISTS paths (
        path TEXT PRIMARY KEY,
        position INTEGER NOT NULL,
        "commit" TEXT NOT NULL,
        mode TEXT,
        blob TEXT
    ) WITHOUT ROWID
"""

# A deleted path keeps its row, with blob NULL: an older change that comes later must meet something newer
# than itself, or it would bring the path back.
APPLY = """
    INSERT INTO paths (path, position, "commit", mode, blob)
    VALUES (:path, :position, :commit, :mode, :blob)
    ON CONFLICT (path) DO UPDATE SET
        position = excluded.position, "commit" = excluded."commit", mode = excluded.mode, blob = excluded.blob
    WHERE excluded.position > position
"""


def open_table() -> sqlite3.Connection:
    """A connection to the table, for the calling thread alone."""
    path = os.environ.get("GIT_HISTORY_DB") or "git_history.sqlite3"
    table = sqlite3.connect(path, timeout=30)  # busy_timeout: seconds to wait while others write
    # Of several that open a new file at once one turns WAL on; the others aren't made to wait for that, but
    # told that the file is locked.
    for _ in range(100):
        with suppress(sqlite3.OperationalError):
            table.execute("PRAGMA journal_mode = WAL")
            break
        time.sleep(0.05)
    table.execute(CREATE)
    return table


def apply(table: sqlite3.Connection, changes: Iterable[tuple[str, Change]]) -> None:
    """Writes each (path, change) that is newer than what the table has of the path, in one transaction."""
    with table:
        table.executemany(APPLY, ({**change, "path": path} for path, change in changes))


def read_table(table: sqlite3.Connection) -> Tree:
    """The paths that are there, without the deleted ones."""
    rows = table.execute("SELECT path, mode, blob FROM paths WHERE blob IS NOT NULL")
    return {path: (mode, blob) for path, mode, blob in rows}


@lowq.worker(shards_count=24, batch_size=100)
class PathTable(lowq.Worker[Change]):
    """Keeps the table: of each path the newest change that has come so far."""

    @cached_property
    def table(self) -> sqlite3.Connection:
        """Each thread has a worker instance of its own, and so a connection of its own."""
        return open_table()

    def perform(self, payloads_by_id: dict[str, list[Change]]) -> None:
        # Oldest first, so the last is the newest of those that came together. It may still be older than what
        # came before them, or the same once more after a crash: the table refuses it then.
        newest = [(path, payloads[-1]) for path, payloads in payloads_by_id.items()]
        apply(self.table, [(change.get("path", path), change) for path, change in newest])


# --------------------------------------------------------------------------------------- push and verify


def job_of(path: str, change: Change) -> lowq.JobDict[Change]:
    """A change as `perform_async` takes it."""
    job_id = id_of(path)
    payload: Change = change if job_id == path else {**change, "path": path}
    return {"id": job_id, "payload": payload, "score": change["position"]}


def shuffled(
    changes: Iterable[tuple[str, Change]], *, seed: int = 1, duplicates: float = 0.1, window: int = 10_000
) -> Iterator[lowq.JobDict[Change]]:
    """The changes as jobs in random order, a share of them twice; the same order for the same seed.

    Streams: it holds `window` jobs, and each further one pushes a random one out. So a job comes out `window`
    places after it went in on average, some at once, some very late.
    """
    dice = random.Random(seed)
    pool: list[lowq.JobDict[Change]] = []
    for path, change in changes:
        for _ in range(2 if dice.random() < duplicates else 1):
            if len(pool) < window:
                pool.append(job_of(path, change))
            else:
                place = dice.randrange(window)
                yield pool[place]
                pool[place] = job_of(path, change)
    dice.shuffle(pool)
    yield from pool


def push_all(jobs: Iterator[lowq.JobDict[Change]], *, producers: int, chunk: int = 500) -> int:
    """Pushes the jobs from several threads at once, a chunk at a time; returns how many were accepted."""
    turn = threading.Lock()  # guards `jobs`
    stop = threading.Event()

    def produce() -> int:
        accepted = 0
        while not stop.is_set():
            with turn:
                chunk_of_jobs = list(islice(jobs, chunk))
            if not chunk_of_jobs:
                break
            accepted += push_chunk(chunk_of_jobs)
        return accepted

    with ThreadPoolExecutor(producers, "producer") as threads:
        running = [threads.submit(produce) for _ in range(producers)]
        try:
            return sum(producer.result() for producer in running)
        finally:
            stop.set()  # Ctrl-C, or one of them failed: the others end too


def push_chunk(jobs: Iterable[lowq.JobDict[Change]], patience: float = 30) -> int:
    """Pushes some jobs, if need be in several goes: Redis may be away for `patience` seconds."""
    accepted, deadline = 0, time.monotonic() + patience
    while True:
        try:
            return accepted + PathTable.perform_async(jobs)
        except lowq.PushError as error:
            if time.monotonic() > deadline:
                raise
            accepted, jobs = accepted + error.accepted, error.rest
            time.sleep(0.5)


def differences(tree: Tree, table: Tree) -> Iterator[str]:
    """What is wrong with the table, a line for each path."""
    for path in sorted(tree.keys() | table.keys()):
        if tree.get(path) != table.get(path):
            in_git, in_table = (" ".join(side.get(path, ("nothing",))) for side in (tree, table))
            yield f"{path}: git has {in_git}, the table has {in_table}"


def push(repo: Path, head: str | None, *, producers: int, seed: int, duplicates: float, window: int) -> None:
    """Pushes the history up to `head` and says how much that was."""
    if head is None:
        click.echo(f"{repo} has no commits yet: nothing to push")
        return
    commits, changes = 0, 0

    def counted() -> Iterator[tuple[str, Change]]:
        nonlocal commits, changes
        for path, change in read_history(repo, head):
            commits, changes = change["position"], changes + 1
            yield path, change

    began = time.monotonic()
    jobs = shuffled(counted(), seed=seed, duplicates=duplicates, window=window)
    accepted = push_all(jobs, producers=producers)
    seconds = time.monotonic() - began
    click.echo(
        f"pushed {accepted:,} jobs in {seconds:.1f} s: {changes:,} changes, {accepted - changes:,} of them twice "
        f"(commits: {commits:,})"
    )


def wait_until_empty(timeout: float) -> None:
    """Returns when nothing waits and nothing is in flight; `timeout` in seconds."""
    deadline = time.monotonic() + timeout
    while (stats := PathTable.queue.stats()).length or stats.taken:
        if time.monotonic() > deadline:
            raise click.ClickException(
                f"after {timeout:g} s still {stats.length:,} jobs wait and {stats.taken:,} are in flight; "
                "does a node run? lowq run examples/git_history.py"
            )
        time.sleep(0.2)


def verify(repo: Path, head: str | None, timeout: float) -> None:
    """Compares the table with git, once the queue is empty; raises when they differ."""
    wait_until_empty(timeout)
    tree = read_tree(repo, head) if head else {}
    with closing(open_table()) as connection:
        table = read_table(connection)
        (rows,) = connection.execute("SELECT count(*) FROM paths").fetchone()
    wrong = list(differences(tree, table))
    if wrong:
        click.echo("\n".join(wrong[:10]))
        raise click.ClickException(f"{len(wrong):,} of {len(tree.keys() | table.keys()):,} paths differ")
    at = f"at {head[:12]}" if head else "in a repository without commits"
    click.echo(f"identical: {len(tree):,} paths {at}; {rows - len(tree):,} deleted ones are known")


# ------------------------------------------------------------------------------------------ command line

REPO = click.argument("repo", type=click.Path(exists=True, file_okay=False, path_type=Path))
TIMEOUT = click.option("--timeout", default=600.0, show_default=True, help="Seconds for the queue to empty.")


def push_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options of the commands that push."""
    at_least_one = click.IntRange(1)
    for option in (
        click.option("--window", type=at_least_one, default=10_000, show_default=True, help="Jobs shuffled at a time."),
        click.option(
            "--duplicates", type=click.FloatRange(0, 1), default=0.1, show_default=True, help="Share that comes twice."
        ),
        click.option("--seed", default=1, show_default=True, help="Of the order and of what comes twice."),
        click.option("--producers", type=at_least_one, default=4, show_default=True, help="Threads that push."),
    ):
        command = option(command)
    return command


@click.group(help="Keeps a table in step with the history of a git repository.")
def main() -> None: ...


@main.command("push")
@REPO
@push_options
def push_command(repo: Path, **options: Any) -> None:
    """Push the history of REPO, shuffled and with duplicates."""
    push(repo, head_of(repo), **options)


@main.command("verify")
@REPO
@TIMEOUT
def verify_command(repo: Path, timeout: float) -> None:
    """Wait until the queue is empty, then compare the table with REPO's HEAD."""
    verify(repo, head_of(repo), timeout)


@main.command("run-embedded")
@REPO
@TIMEOUT
@push_options
def run_embedded(repo: Path, timeout: float, **options: Any) -> None:
    """Do it all in this process, without Redis: a node, the pushing, the verifying.

    The table is a temporary file unless GIT_HISTORY_DB is set.
    """
    lowq.config.redis_url = "memory://"
    head = head_of(repo)
    with TemporaryDirectory() as folder:
        os.environ["GIT_HISTORY_DB"] = os.environ.get("GIT_HISTORY_DB") or f"{folder}/table.sqlite3"
        node = Node(lowq.app)
        node.start()
        try:
            push(repo, head, **options)
            verify(repo, head, timeout)
        finally:
            node.stop()


if __name__ == "__main__":
    try:
        main()
    except lowq.LowqError as error:
        sys.exit(f"Error: {error}")
