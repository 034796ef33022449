"""The reading half of examples/git_history.py: small real repositories, nothing of Redis.

What they all come to: the changes that are read, replayed in order, give `git ls-tree -r HEAD`.
"""

import os
import random
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise, permutations
from pathlib import Path

import click
import pytest

from examples import git_history
from examples.git_history import Change, Tree
from tests.rows import case
from tests.tiers import often

# ---------------------------------------------------------------------------------- repositories to read


@pytest.fixture(autouse=True)
def _no_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the developer's own git configuration, and no clock: commits say their time."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    for who in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{who}_NAME", "somebody")
        monkeypatch.setenv(f"GIT_{who}_EMAIL", "somebody@example.org")
        monkeypatch.setenv(f"GIT_{who}_DATE", "2020-01-01T00:00:00+00:00")


class Repo:
    """A repository in a folder, with the few words that the tests need."""

    def __init__(self, path: Path, object_format: str = "sha1") -> None:
        self.path = path
        path.mkdir()
        self.git("init", "--quiet", "--initial-branch=main", f"--object-format={object_format}")

    def git(self, *arguments: str, stdin: bytes = b"") -> bytes:
        return subprocess.run(["git", *arguments], cwd=self.path, input=stdin, check=True, capture_output=True).stdout

    def write(self, path: str | bytes, content: str) -> None:
        file = self.path / os.fsdecode(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)

    def commit(self, *options: str) -> str:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message=a change", *options)
        return self.git("rev-parse", "HEAD").decode().strip()

    @property
    def head(self) -> str:
        head = git_history.head_of(self.path)
        assert head is not None
        return head

    def history(self) -> list[tuple[str, Change]]:
        return list(git_history.read_history(self.path, self.head))

    def changes_of(self, path: str) -> list[tuple[int, str]]:
        """(position, op) of a path, oldest first."""
        return [(change["position"], change["op"]) for name, change in self.history() if name == path]


@pytest.fixture
def repo(tmp_path: Path) -> Repo:
    return Repo(tmp_path / "repo")


def assert_replay_gives_head(repo: Repo) -> None:
    """Replays the history, and has git itself say what should have come out: bytes, nothing decoded."""
    replayed: dict[bytes, tuple[str, str]] = {}
    last = 0
    for text, change in repo.history():
        assert change["position"] >= last
        last = change["position"]
        path = git_history.path_of(text)
        if change["op"] == "D":
            assert change["mode"] is change["blob"] is None
            del replayed[path]  # a deletion of what isn't there would be a misread history
        else:
            assert change["mode"] is not None
            assert change["blob"] is not None
            assert (path in replayed) == (change["op"] != "A")
            replayed[path] = (change["mode"], change["blob"])

    expected = {}
    for record in repo.git("ls-tree", "-r", "-z", "--full-tree", "HEAD").split(b"\0")[:-1]:
        entry, path = record.split(b"\t", 1)
        mode, _, blob = entry.decode().split()
        expected[path] = (mode, blob)
    assert replayed == expected

    as_text = {git_history.text_of(path): entry for path, entry in expected.items()}
    assert git_history.read_tree(repo.path, repo.head) == as_text


# -------------------------------------------------------------------------------------- what git can hold


def test_add_edit_delete_and_add_again(repo: Repo) -> None:
    repo.write("a", "1")
    repo.write("b", "1")
    repo.commit()
    repo.write("a", "2")
    repo.commit()
    repo.git("rm", "--quiet", "a")
    repo.commit()
    repo.write("a", "3")
    repo.commit()
    assert repo.changes_of("a") == [(1, "A"), (2, "M"), (3, "D"), (4, "A")]
    assert_replay_gives_head(repo)


def test_a_change_names_its_commit_and_the_whole_blob_id(repo: Repo) -> None:
    repo.write("a", "1")
    commit = repo.commit()
    blob = repo.git("hash-object", "a").decode().strip()
    expected = {"position": 1, "commit": commit, "op": "A", "mode": "100644", "blob": blob}
    assert repo.history() == [("a", expected)]


def test_a_rename_is_a_deletion_and_an_addition(repo: Repo) -> None:
    repo.write("old", "the same content")
    repo.commit()
    repo.git("mv", "old", "new")
    repo.commit()
    assert repo.changes_of("old") == [(1, "A"), (2, "D")]
    assert repo.changes_of("new") == [(2, "A")]
    assert_replay_gives_head(repo)


def test_changes_of_mode_and_of_type(repo: Repo) -> None:
    repo.write("file", "1")
    repo.commit()
    (repo.path / "file").chmod(0o755)
    repo.commit()
    (repo.path / "file").unlink()
    (repo.path / "file").symlink_to("somewhere else")
    repo.commit()
    assert repo.changes_of("file") == [(1, "A"), (2, "M"), (3, "T")]
    assert [change["mode"] for _, change in repo.history()] == ["100644", "100755", "120000"]
    assert_replay_gives_head(repo)


def test_a_file_becomes_a_folder_and_a_file_again(repo: Repo) -> None:
    repo.write("name", "1")
    repo.commit()
    (repo.path / "name").unlink()
    repo.write("name/below", "1")
    repo.commit()
    (repo.path / "name" / "below").unlink()
    (repo.path / "name").rmdir()
    repo.write("name", "2")
    repo.commit()
    assert_replay_gives_head(repo)


def test_submodules_come_move_and_go(repo: Repo) -> None:
    for commit in ("1" * 40, "2" * 40):
        repo.git("update-index", "--add", "--cacheinfo", f"160000,{commit},vendor/library")
        repo.git("commit", "--quiet", "--message=submodule")
    entries = [(change["mode"], change["blob"]) for _, change in repo.history()]
    assert entries == [("160000", "1" * 40), ("160000", "2" * 40)]
    assert_replay_gives_head(repo)
    repo.git("rm", "--cached", "--quiet", "vendor/library")
    repo.write("other", "1")
    repo.commit()
    assert repo.changes_of("vendor/library") == [(1, "A"), (2, "M"), (3, "D")]
    assert_replay_gives_head(repo)


ODD_PATHS = [
    b"with space",
    b" leading and trailing ",
    b"two\nlines",
    b"\nnewline first",
    b"tab\tand \x01 control",
    b":colon first",
    b"100% sure",
    b"%41",
    b'quote"d and back\\slash',
    "größe/データ/🎉".encode(),
    b"latin-1 \xe9",
    b"half a character \xf0\x9f",
    b"\xed\xa0\x80 surrogate",
    b"-option",
    b"x/" + b"y" * 200 + b"/" + b"z" * 200 + b"/" + b"\xe9" * 200,
]


def test_odd_paths(repo: Repo) -> None:
    for path in ODD_PATHS:
        repo.write(path, "1")
    repo.commit()
    for path in ODD_PATHS[::2]:
        repo.write(path, "2")
    for path in ODD_PATHS[1::4]:
        (repo.path / os.fsdecode(path)).unlink()
    repo.commit()
    assert {git_history.path_of(path) for path, _ in repo.history()} == set(ODD_PATHS)
    assert_replay_gives_head(repo)


def test_commits_without_changes_count_as_positions(repo: Repo) -> None:
    repo.commit()
    repo.write("a", "1")
    repo.commit()
    repo.commit()
    repo.write("a", "2")
    repo.commit()
    assert repo.changes_of("a") == [(2, "A"), (4, "M")]
    assert_replay_gives_head(repo)


def test_an_emptied_tree(repo: Repo) -> None:
    repo.write("a", "1")
    repo.commit()
    repo.git("rm", "--quiet", "a")
    repo.commit()
    assert git_history.read_tree(repo.path, repo.head) == {}
    assert_replay_gives_head(repo)


def test_a_sha256_repository(tmp_path: Path) -> None:
    repo = Repo(tmp_path / "repo", object_format="sha256")
    repo.write("a", "1")
    repo.commit()
    repo.git("rm", "--quiet", "a")
    repo.write("b", "1")
    repo.commit()
    assert all(len(change["blob"]) == 64 for _, change in repo.history() if change["blob"])
    assert repo.changes_of("a") == [(1, "A"), (2, "D")]
    assert_replay_gives_head(repo)


def test_a_repository_without_commits_has_no_head(repo: Repo) -> None:
    assert git_history.head_of(repo.path) is None


def test_what_is_no_repository_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(click.ClickException, match="can't be read by git"):
        git_history.head_of(tmp_path)


def test_a_git_that_fails_is_an_error_not_a_short_history(repo: Repo) -> None:
    with pytest.raises(click.ClickException, match="git log failed"):
        list(git_history.read_history(repo.path, "1" * 40))


# ------------------------------------------------------------------------------------------------- merges


def test_a_merge_is_one_step_from_its_first_parent(repo: Repo) -> None:
    repo.write("a", "1")
    repo.commit()
    repo.git("checkout", "--quiet", "-b", "side")
    repo.write("side", "1")
    repo.commit()
    repo.write("side", "2")
    repo.commit()
    repo.git("checkout", "--quiet", "main")
    repo.write("a", "2")
    repo.commit()
    repo.git("merge", "--quiet", "--no-edit", "side")
    assert repo.changes_of("a") == [(1, "A"), (2, "M")]
    assert repo.changes_of("side") == [(3, "A")]
    assert_replay_gives_head(repo)


def test_a_merge_that_changes_what_no_parent_has(repo: Repo) -> None:
    repo.write("a", "1")
    repo.commit()
    repo.git("checkout", "--quiet", "-b", "side")
    repo.write("a", "side")
    repo.commit()
    repo.git("checkout", "--quiet", "main")
    repo.write("a", "main")
    repo.commit()
    repo.git("merge", "--quiet", "--no-commit", "--strategy=ours", "side")
    repo.write("a", "both")
    repo.write("only in the merge", "1")
    repo.commit()
    assert_replay_gives_head(repo)


def test_a_merge_that_throws_the_side_away(repo: Repo) -> None:
    repo.write("a", "1")
    repo.commit()
    repo.git("checkout", "--quiet", "-b", "side")
    repo.write("side", "1")
    repo.commit()
    repo.git("checkout", "--quiet", "main")
    repo.write("a", "2")
    repo.commit()
    repo.git("merge", "--quiet", "--no-edit", "--strategy=ours", "side")
    assert repo.changes_of("side") == []
    assert_replay_gives_head(repo)


def test_a_merged_history_with_a_root_of_its_own(repo: Repo) -> None:
    repo.write("a", "1")
    repo.commit()
    repo.git("checkout", "--quiet", "--orphan", "other")
    repo.git("rm", "--quiet", "-rf", ".")
    repo.write("b", "1")
    repo.commit()
    repo.git("checkout", "--quiet", "main")
    repo.git("merge", "--quiet", "--no-edit", "--allow-unrelated-histories", "other")
    assert_replay_gives_head(repo)


def test_a_shallow_clone_starts_with_all_that_its_oldest_commit_has(repo: Repo, tmp_path: Path) -> None:
    for content in "12345":
        repo.write("a", content)
        repo.write(f"b{content}", content)
        repo.commit()
    shallow = Repo(tmp_path / "shallow")
    shallow.git("fetch", "--quiet", "--depth=2", f"file://{repo.path}", "main:fetched")
    shallow.git("checkout", "--quiet", "fetched")
    assert shallow.changes_of("a") == [(1, "A"), (2, "M")]
    assert_replay_gives_head(shallow)


def random_history(dice: random.Random, commits: int) -> Iterator[str]:
    """A stream for git fast-import: merges of up to four branches, several roots, times out of order."""
    paths = [f"{folder}{name}" for folder in ("", "d/", "d/e/", "f") for name in "abcd"]
    for mark in range(1, commits + 1):
        parents = dice.sample(range(1, mark), k=min(mark - 1, dice.choice([1, 1, 1, 2, 2, 3, 4])))
        if dice.random() < 0.05:
            parents = []
        # Most commits are built on the one before, or HEAD's line of first parents would be short.
        if mark > 1 and dice.random() < 0.6:
            parents = [mark - 1, *(parent for parent in parents if parent != mark - 1)]
        yield f"reset refs/heads/main\ncommit refs/heads/main\nmark :{mark}\n"
        yield f"committer x <x@example.org> {dice.randrange(10**9)} +0000\ndata 0\n"
        for word, parent in zip(["from", *["merge"] * 3], parents, strict=False):
            yield f"{word} :{parent}\n"
        for path in dice.sample(paths, k=dice.randrange(6)):
            if dice.random() < 0.4:
                yield f"D {path}\n"
            else:
                content = str(dice.randrange(3))
                mode = dice.choice(["100644", "100755", "120000"])
                yield f"M {mode} inline {path}\ndata {len(content)}\n{content}\n"
        yield "\n"


@pytest.mark.parametrize("seed", often(range(25), range(8)))
def test_random_histories_with_merges(repo: Repo, seed: int) -> None:
    stream = "".join(random_history(random.Random(seed), commits=60))
    repo.git("fast-import", "--quiet", "--force", stdin=stream.encode())
    repo.git("symbolic-ref", "HEAD", "refs/heads/main")
    assert_replay_gives_head(repo)


SIGNER = """#!/bin/sh
cat > /dev/null
echo '[GNUPG:] SIG_CREATED ' >&2
printf -- '-----BEGIN PGP SIGNATURE-----\\n\\nx\\n-----END PGP SIGNATURE-----\\n'
"""


def test_the_configuration_of_the_user_changes_nothing(repo: Repo, tmp_path: Path) -> None:
    signer = tmp_path / "signer"
    signer.write_text(SIGNER)
    signer.chmod(0o755)
    repo.git("config", "gpg.program", str(signer))
    repo.write("folder/old", "the same content")
    repo.write("größe", "1")
    repo.commit("--gpg-sign=somebody")
    repo.git("checkout", "--quiet", "-b", "side")
    repo.git("update-index", "--add", "--cacheinfo", f"160000,{'1' * 40},module")
    repo.git("commit", "--quiet", "--message=submodule")
    repo.git("checkout", "--quiet", "main")
    repo.git("mv", "folder/old", "folder/new")
    repo.commit()
    repo.git("merge", "--quiet", "--no-edit", "side")
    plain = repo.history()
    settings = {
        "color.ui": "always",
        "core.abbrev": "4",
        "core.quotePath": "true",
        "diff.ignoreSubmodules": "all",
        "diff.relative": "true",
        "diff.renames": "copies",
        "diff.submodule": "log",
        "format.pretty": "fuller",
        "log.abbrevCommit": "true",
        "log.decorate": "full",
        "log.diffMerges": "combined",
        "log.showRoot": "false",
        "log.showSignature": "true",
    }
    for name, value in settings.items():
        repo.git("config", name, value)
    assert repo.history() == plain
    assert_replay_gives_head(repo)
    inside = repo.path / "folder"
    assert list(git_history.read_history(inside, repo.head)) == plain
    assert git_history.read_tree(inside, repo.head) == git_history.read_tree(repo.path, repo.head)


# ---------------------------------------------------------------------------------------- paths and ids


def test_a_path_as_text_is_plain_and_can_be_undone() -> None:
    for path in ODD_PATHS:
        with case(path):
            text = git_history.text_of(path)
            assert text.encode()  # no inline surrogates
            assert text.isprintable()
            assert git_history.path_of(text) == path


def test_every_byte_survives_as_text() -> None:
    for byte in range(1, 256):
        for path in (bytes([byte]), b"a" + bytes([byte]) + b"b", b"\xc3" + bytes([byte])):
            assert git_history.path_of(git_history.text_of(path)) == path


def test_a_readable_path_is_its_own_text_and_id() -> None:
    assert git_history.id_of(git_history.text_of("src/größe (1).py".encode())) == "src/größe (1).py"


def test_long_paths_get_ids_that_fit_and_differ() -> None:
    fits, longer = "x" * 512, "x" * 513
    assert git_history.id_of(fits) == fits
    ids = {git_history.id_of(longer + end) for end in ("", "1", "2", "größe" * 100)}
    ids |= {git_history.id_of("größe" * count) for count in range(100, 140)}
    assert len(ids) == 44
    assert all(len(job_id.encode()) <= 512 for job_id in ids)
    assert git_history.id_of(longer) == git_history.id_of(longer)


def test_a_short_id_is_no_other_paths_id() -> None:
    short = git_history.id_of("%25" * 200)
    assert git_history.id_of(git_history.text_of(short.encode())) != short


def test_a_job_carries_its_path_only_when_the_id_does_not(repo: Repo) -> None:
    change: Change = {"position": 7, "commit": "c", "op": "D", "mode": None, "blob": None}
    assert git_history.job_of("a", change) == {"id": "a", "payload": change, "score": 7}
    job = git_history.job_of("x" * 600, change)
    assert job["payload"] == {**change, "path": "x" * 600}
    assert job["score"] == 7


# ----------------------------------------------------------------------------------- shuffling, the table


def numbered(count: int) -> Iterator[tuple[str, Change]]:
    for position in range(1, count + 1):
        change: Change = {"position": position, "commit": "c", "op": "M", "mode": "100644", "blob": "b"}
        yield f"path {position % 7}", change


def positions(seed: int, *, count: int = 1000, duplicates: float = 0.3, window: int = 100) -> list[int]:
    jobs = git_history.shuffled(numbered(count), seed=seed, duplicates=duplicates, window=window)
    return [int(job["score"]) for job in jobs]


def test_shuffling_loses_nothing_and_repeats_a_share() -> None:
    times = Counter(positions(seed=1))
    assert set(times) == set(range(1, 1001))
    assert set(times.values()) == {1, 2}
    assert 200 < sum(times.values()) - 1000 < 400


def test_shuffling_mixes_and_the_seed_repeats_it() -> None:
    assert positions(seed=1) == positions(seed=1)
    assert positions(seed=1) != positions(seed=2)
    order = positions(seed=1, duplicates=0)
    behind = sum(later < earlier for earlier, later in pairwise(order))
    assert behind > 300


def test_shuffling_at_the_edges_of_the_window() -> None:
    for count, window in [(0, 10), (1, 10), (10, 10), (11, 10), (50, 1)]:
        with case(count, window):
            assert sorted(positions(seed=1, count=count, duplicates=0, window=window)) == list(range(1, count + 1))


def test_shuffling_holds_no_more_than_its_window() -> None:
    read = 0

    def counted() -> Iterator[tuple[str, Change]]:
        nonlocal read
        for item in numbered(10_000):
            read += 1
            yield item

    jobs = git_history.shuffled(counted(), duplicates=0, window=100)
    for out in range(1, 5001):
        next(jobs)
        assert read <= out + 100


@pytest.fixture
def table_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "table.sqlite3"
    monkeypatch.setenv("GIT_HISTORY_DB", str(file))
    return file


def test_the_table_ends_with_the_newest_whatever_the_order(table_file: Path) -> None:
    story: list[Change] = [
        {"position": 1, "commit": "c1", "op": "A", "mode": "100644", "blob": "b1"},
        {"position": 2, "commit": "c2", "op": "D", "mode": None, "blob": None},
        {"position": 3, "commit": "c3", "op": "A", "mode": "100755", "blob": "b3"},
        {"position": 4, "commit": "c4", "op": "D", "mode": None, "blob": None},
    ]
    with closing(git_history.open_table()) as table:
        for number, order in enumerate(permutations(story)):
            kept, gone = f"kept {number}", f"gone {number}"
            git_history.apply(table, [(gone, change) for change in order])
            git_history.apply(table, [(kept, change) for change in order if change["position"] < 4])
            git_history.apply(table, [(gone, order[0]), (kept, story[0])])  # once more, as after a crash
            assert git_history.read_table(table) == {kept: ("100755", "b3")}
            git_history.apply(table, [(kept, story[3])])


def test_the_worker_writes_the_last_payload_under_the_whole_path(table_file: Path) -> None:
    def changed(position: int, blob: str) -> Change:
        return {"position": position, "commit": "c", "op": "M", "mode": "100644", "blob": blob}

    whole = "x" * 600
    long = git_history.job_of(whole, changed(3, "long"))
    worker = git_history.PathTable()
    worker.perform({"a": [changed(1, "old"), changed(2, "new")], str(long["id"]): [long["payload"]]})
    worker.perform({"a": [changed(1, "old")]})
    worker.table.close()
    with closing(git_history.open_table()) as table:
        assert git_history.read_table(table) == {"a": ("100644", "new"), whole: ("100644", "long")}


def test_differences_are_named_and_sorted() -> None:
    tree: Tree = {"both": ("100644", "1"), "changed": ("100644", "1"), "missing": ("100644", "1")}
    table: Tree = {"both": ("100644", "1"), "changed": ("100755", "1"), "extra": ("100644", "1")}
    assert list(git_history.differences(tree, tree)) == []
    assert list(git_history.differences(tree, table)) == [
        "changed: git has 100644 1, the table has 100755 1",
        "extra: git has nothing, the table has 100644 1",
        "missing: git has 100644 1, the table has nothing",
    ]
