"""The command line without Redis: verbs and options, what is shown, NDJSON, the embedded store's protocol, -r."""

import json
import math
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import lowq
from lowq import Lowq
from lowq.cli import main, output
from lowq.cli.loading import load_app, users_traceback
from lowq.cli.output import Failure, moment
from lowq.cli.push import lines_but
from lowq.clock import ago, duration
from lowq.codec import MAX_TIME
from lowq.job import Job
from lowq.store.embedded import encode, take_command
from lowq.version import VERSION
from tests.rows import case


def invoke(*args: str) -> Result:
    return CliRunner().invoke(main, args)


# --- verbs and options ---


def test_options_may_stand_before_the_verb_and_run_may_be_left_out() -> None:
    rows: list[tuple[list[str], list[str]]] = [
        (["-r", "no.py"], ["run", "-r", "no.py"]),
        (["-r", "no.py", "--help"], ["run", "--help"]),
        (["--redis-url=memory://verbs", "--json", "stats"], ["stats", "--json", "--redis-url=memory://verbs"]),
        (["-r", "stats", "jobs", "Q"], ["jobs", "-r", "stats", "Q"]),
        (["help", "stats"], ["stats", "--help"]),
        (["stats", "-h"], ["stats", "--help"]),
    ]
    for typed, meant in rows:
        with case(typed, meant):
            found, expected = invoke(*typed), invoke(*meant)
            assert (found.exit_code, found.output) == (expected.exit_code, expected.output)


def test_every_verb_is_listed_and_explains_itself() -> None:
    assert invoke("--version").stdout == f"lowq {VERSION}\n"
    listed = invoke("--help").stdout
    assert len(main.commands) > 30
    for verb in main.commands:
        with case(verb):
            assert f"\n  {verb} " in listed
            help_text = invoke(verb, "--help")
            assert help_text.exit_code == 0
            assert ("--redis-url" in help_text.stdout) is (verb not in ("init", "completion", "ready"))


def test_wrong_usage_exits_2_and_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[tuple[list[str], str]] = [
        (["stat"], "did you mean stats"),
        (["perform_now", "Q", "1"], "did you mean perform-now?"),
        (["app.py"], "did you mean: lowq run app.py"),
        (["run", "nowhere"], "lowq: nowhere: there is no module 'nowhere'"),
        (["run"], "lowq run app.py"),
        (["-r", "app.py", "--embedded", "--redis-url", "redis://h"], "leave out --redis-url"),
        (["stats", "--jsn"], "--json"),
        (["jobs", "Q", "--state", "dead"], "'morgue'"),
        (["jobs", "Q", "--min", "soon"], "it is a time: "),
        (["kick", "Q"], "--all"),
        (["kick", "Q", "1", "--all"], "not both"),
        (["kick", "Q", "--state", "due"], "morgue"),
        (["stats", "a{b"], "queue name"),
        (["push", "Q", '{"id": 1}'], '{"id": 1}: no such file; jobs come from a file or the standard input: echo '),
        (["push", "Q", '{"id": 42}' * 50], """: echo '{"id": 42, "payload": {"version": 7}}' | lowq push Q\n"""),
        (["put", "Q", "paid"], "the payload is no JSON"),
        (["put", "Q", "paid"], "; a text needs its quotes: '\"text\"'\n"),
        (["put", "Q", "{status: 1}"], '; names and texts need double quotes: \'{"status": "new"}\'\n'),
        (["consume", "Q"], "lowq consume QUEUE -- COMMAND {id}"),
        (["take", "Q", "--timeout", "-1"], "-1"),
        (["push", "Q", "--id", "1", "--payload", "{x"], "the payload is no JSON"),
        (["push", "Q", "--id", "1", "--score", "high"], "--score high: it must be a number"),
        (["push", "Q", "--score", "1"], "give its --id"),
        (["push", "Q", "--id", "1", "--skip", "1"], "leave out the file and --skip"),
        (["-r", "app.py", "--processes", "0"], "0 is not in the range x>=1"),
        (["-r", "app.py", "--processes", "2", "--embedded", "--redis-url", "memory://"], "brings its own store"),
        (["-r", "app.py", "--supervised", "1.1"], "lowq run --processes N"),
        (["-r", "app.py", "--supervised", "1.1:500:501"], "lowq run --processes N"),
        (["zzz"], "verbs are run, consume, web, outbox, stats"),
        (["kick", "Q", "--all", "--match", "4*"], "leave one of them out"),
        (["push", "Q", "--id", "1", "--perform-at", "soon"], "--perform-at soon"),
        (["-r", "app.py", "--graphite", "graphite"], "write HOST:PORT"),
        (["run", "-r", "app.py", "--processes", "2", "--statsd", "tcp://statsd:8125"], "write HOST:PORT"),
        (["consume", "q", "--graphite", "graphite", "--", "true"], "write HOST:PORT"),
    ]
    for args, says in rows:
        with case(args, says), monkeypatch.context() as patch:
            patch.setenv("LOWQ_REDIS_URL", "redis://127.0.0.1:1")  # nobody is there: wrong usage is named without it
            result = invoke(*args)
            assert result.exit_code == 2, result.output
            assert says in result.stderr
            assert "Traceback" not in result.stderr
            assert result.stdout == ""


def test_a_wrong_environment_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWQ_REDIS_URL", "localhost")
    result = invoke("stats")
    assert result.exit_code == 2
    assert result.stderr.startswith("lowq: environment variable LOWQ_REDIS_URL")
    assert result.stderr.count("\n") == 1


def test_times_are_numbers_or_iso() -> None:
    assert moment("1800000000.5") == 1800000000.5
    assert moment("2027-01-15T08:00:00Z") == 1800000000
    assert moment("9999-12-31T23:59:59Z") == moment("9999-12-31T23:59:59-12:00") == MAX_TIME
    for wrong in ("soon", "0001-01-01", "nan", "inf", "-inf", "1e999"):
        with pytest.raises(ValueError, match=r".*"):
            moment(wrong)


# --- what is shown ---


def test_times_numbers_and_texts_are_shown_for_people() -> None:
    rows: list[tuple[str, str]] = [
        *((duration(seconds), text) for seconds, text in (
            (0, "0 s"), (1.26, "1.3 s"), (59.6, "1 min"), (250, "4 min 10 s"), (3600, "1 h"), (90061, "1 d 1 h"))),
        (ago(1250, 1000), "in 4 min 10 s"),
        (ago(820, 1000), "3 min ago"),
        (ago(1000.2, 1000), "now"),
        (ago(None, 1000), ""),
        (ago(math.inf, 1000), ""),
        *((output.score(value), text) for value, text in (
            (7.0, "7"), (7.5, "7.5"), (-1.0, "-1"), (2.0**60, "1.152921504606847e+18"))),
        (output.count(1, "job"), "1 job"),
        (output.count(1234, "job"), "1,234 jobs"),
        (output.shorten("abcdef", 6), "abcdef"),
        (output.shorten("abcdef", 5), "abcd…"),
        (output.shorten("価格価格", 5), "価格…"),  # columns, not characters
        (output.shorten("abc", math.inf), "abc"),
        (output.payload_text({"a": [1, "ü"]}), '{"a":[1,"ü"]}'),
        (output.payload_text("\x1b[2J\x9b31m\u202e\x00"), '"\\u001b[2J\\x9b31m\\u202e\\u0000"'),
    ]  # fmt: skip
    for shown, expected in rows:
        with case(expected):
            assert shown == expected


def test_tables_are_aligned_cut_and_leave_out_empty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    lines = output.table(("id", "n", "note?"), [["a", "1", ""], ["価格", "1,000", ""]], right=("n",))
    assert [line.replace("\x1b[2m", "").replace("\x1b[0m", "") for line in lines] == [
        "ID        N",
        "a         1",
        "価格  1,000",
    ]
    assert output.table(("id", "text"), [["1", "x" * 50]])[1] == "1   " + "x" * 15 + "…"
    assert output.table(("id",), [["a\x1b[31m\nb\udcff"]])[1] == "a\\x1b[31m\\nb\\udcff"


def test_a_job_in_full_shows_payloads_error_and_what_was_left_out() -> None:
    job = Job("4\x07", "retrying", [({"version": 7}, 7.0)], 1250.0, 2, "Traceback\n  boom\x1b[2J", 1, None, 1001)
    assert output.job_block(job, 1000.0, 25) == [
        "4\\x07  retrying, in 4 min 10 s, attempt 4 of 26, crashed 1 time",
        '  score 7  {"version":7}',
        "  and 1,000 payloads more, of higher scores",
        "  last error:",
        "    Traceback",
        "      boom\\x1b[2J",
    ]


def test_json_knows_the_values_of_the_handle(capsys: pytest.CaptureFixture[str]) -> None:
    output.echo_json({"jobs": [Job("é\udcff", "due", [({"v": 1}, 1.0)], 5.0)], "other": {1}})
    text = capsys.readouterr().out
    assert text.isascii()
    document = json.loads(text)
    assert document["jobs"][0]["id"] == "é\udcff"
    assert document["jobs"][0]["payloads"] == [[{"v": 1}, 1.0]]
    assert document["other"] == "{1}"


# --- NDJSON ---


def push(name: str, *args: str, lines: bytes, **environment: str) -> tuple[Result, list[str]]:
    """`lowq push` of these lines into an empty queue; the ids that wait there afterwards."""
    url = f"memory://lines-{name}"
    command = ["push", "Q", "--shards-count", "1", "--redis-url", url, *args]
    result = CliRunner().invoke(main, command, input=lines, env=environment)
    with closing(Lowq(redis_url=url)) as app:
        return result, [job.id for job in app.queue("Q", 1).jobs().jobs] if app.queues() else []


def test_a_malformed_line_is_named_and_nothing_of_its_chunk_is_written() -> None:
    rows: list[tuple[bytes, str]] = [
        (b'{"id": 1', "line 3 is no JSON: Input data was truncated"),
        (b'{"id": "\xff"}', "line 3 is no JSON"),
        (b"[1]", 'line 3 is no JSON object, such as {"id": 42}: [1]'),
        (b'{"id": 1, "payload": "' + b"x" * 100_000 + b'"}', "line 3 is longer than "),
        (b'{"id": 1, "scor": 3}', "line 3: job 1: unknown field 'scor'; did you mean 'score'?"),
        (b'{"id": 1, "perform_at": 60}', "give delay=60 instead"),
    ]
    for number, (line, says) in enumerate(rows):
        with case(line, says):
            lines = b'{"id": 1}\n\n' + line + b'\n{"id": 3}\n'
            result, waiting = push(f"wrong-{number}", lines=lines, LOWQ_MAX_PAYLOAD_BYTES="100")
            assert (result.exit_code, waiting) == (1, [])
            assert says in result.stderr
            assert result.stderr.endswith("; nothing was pushed\n")
            assert result.stderr.count("\n") == 1


def test_blank_lines_are_no_jobs_and_skipped_ones_are_not_even_parsed() -> None:
    result, waiting = push("blank", lines=b'\xef\xbb\xbf{"id": 1}\n\n  \r\n{"id": 2}')
    assert (result.exit_code, sorted(waiting)) == (0, ["1", "2"])
    result, waiting = push("skipped", "--skip", "1", lines=b'nonsense\n{"id": 2}\n')
    assert (result.exit_code, waiting) == (0, ["2"])


def test_lines_are_left_out_as_they_are_named() -> None:
    all_wanted: list[list[int]] = [[], [1], [7], [2, 3, 5], [1, 2, 3, 4, 5, 6, 7], [4, 5, 6, 7]]
    for number, wanted in enumerate(all_wanted):
        with case(wanted):
            lines = b"".join(b'{"id": %d}\n' % (number + 1) for number in range(9))
            _, waiting = push(f"but-{number}", "--skip", lines_but(wanted, 7), lines=lines)
            assert sorted(map(int, waiting)) == [*wanted, 8, 9]
    short = [lines_but(wanted, 7) for wanted in ([4, 5, 6, 7], [2, 4], [1, 2], [1, 3])]
    assert short == ["3", "1,3,5-7", "3-7", "2,4-7"]
    assert lines_but([1], 2) == "2-2"  # "2" would be the first two
    for text in ["", "x", "-1", "3-", "3-2", "4-5,2", "1-3,3", "1 2"]:
        with case(text):
            assert push("none", f"--skip={text}", lines=b"")[0].exit_code == 2


# --- the embedded store's protocol ---


def test_commands_are_taken_only_when_they_are_complete() -> None:
    whole = b"*2\r\n$3\r\nGET\r\n$4\r\na\r\nb\r\n*1\r\n$4\r\nPING\r\n"
    for cut in range(len(whole)):
        buffer = bytearray(whole[:cut])
        taken = []
        while (command := take_command(buffer)) is not None:
            taken.append(command)
        buffer += whole[cut:]
        while (command := take_command(buffer)) is not None:
            taken.append(command)
        assert taken == [[b"GET", b"a\r\nb"], [b"PING"]]
    with pytest.raises(ValueError, match="RESP"):
        take_command(bytearray(b"GET / HTTP/1.1\r\n"))


def test_replies_are_written_in_resp2() -> None:
    assert encode([None, 7, b"a", ["b"], {"k": True}]) == (
        b"*5\r\n$-1\r\n:7\r\n$1\r\na\r\n*1\r\n$1\r\nb\r\n*2\r\n$1\r\nk\r\n:1\r\n"
    )
    assert encode(ValueError("unknown\r\ncommand")) == b"-ERR unknown command\r\n"
    assert encode(ValueError("LEASELOST gone")) == b"-LEASELOST gone\r\n"


# --- -r ---


@contextmanager
def working_in(folder: Path) -> Iterator[Path]:
    """The current folder; what is imported from it is forgotten afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", sys.path[:])
        patch.setattr(lowq.app, "workers", {})  # those that other tests have decorated
        before = set(sys.modules)
        try:
            yield folder
        finally:
            for name in set(sys.modules) - before:
                del sys.modules[name]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with working_in(tmp_path):
        yield tmp_path


TWO_APPS = """
import lowq
first, second, empty = lowq.Lowq(), lowq.Lowq(), lowq.Lowq()

@first.worker
def One(payloads_by_id): ...

@second.worker
def Two(payloads_by_id): ...
"""


ONE_APP = "import lowq\napp = lowq.Lowq(namespace='shop')\n"
A_WORKER = "@app.worker\ndef One(payloads_by_id): ...\n"


def test_an_application_is_named_in_a_module_or_a_file(folder: Path) -> None:
    (folder / "shop_apps.py").write_text(TWO_APPS)
    for spec in ("shop_apps:second", "shop_apps.py:second", "./shop_apps.py:second"):
        with case(spec):
            app = load_app(spec, workers=True)
            assert list(app.workers) == ["Two"]
            assert app.workers["Two"].__module__ == "shop_apps"
            assert sys.modules["shop_apps"].second is app
    (folder / "shop_settings.py").write_text(ONE_APP)
    assert load_app("shop_settings", workers=False).config.namespace == "shop"


def test_what_is_wrong_with_r_is_said(tmp_path: Path) -> None:
    rows: list[tuple[str, str]] = [
        ("shop_apps", "has 2 applications; choose one: shop_apps:first or shop_apps:second"),
        ("shop_apps:Two", "it is of type type, not Lowq"),
        ("shop_apps:empty", "shop_apps:empty registers no worker"),
        ("time", "time registers no worker"),
        ("shop_aps", "did you mean shop_apps?"),
        ("shop_aps.py", "did you mean shop_apps.py?"),
        (":app", ":app: write app.py, pkg.module or pkg.module:app"),
        ("nowhere.py", "nowhere.py: there is no such file; nothing in {own} has a similar name"),
        ("nowhere", "nowhere: there is no module 'nowhere'; nothing in {own} has a similar name"),
        (
            "shop_folder",
            "shop_folder is a folder: name a file in it, such as shop_folder/workers.py, or cd shop_folder",
        ),
        ("elsewhere/app.py", "there is no folder elsewhere"),
        ("no-name", "no-name: write app.py, pkg.module or pkg.module:app"),
    ]
    for number, (spec, says) in enumerate(rows):
        own = tmp_path / str(number)
        own.mkdir()
        (own / "shop_folder").mkdir()
        with case(spec, says), working_in(own):
            (own / "shop_apps.py").write_text(TWO_APPS)
            with pytest.raises(Failure) as failure:
                load_app(spec, workers=True)
            assert says.format(own=own) in failure.value.message
            assert failure.value.exit_code == 2


def test_a_file_in_a_package_is_imported_under_its_full_name_and_once(folder: Path) -> None:
    package = folder / "shop_pkg"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "work.py").write_text(f"from . import helper\n{ONE_APP}{A_WORKER}")
    (package / "helper.py").write_text("import shop_pkg.work\n")
    app = load_app("shop_pkg/work.py", workers=True)
    assert sys.modules["shop_pkg.work"].app is app
    assert "work" not in sys.modules


def test_a_file_named_like_a_module_of_python_does_not_replace_it(folder: Path) -> None:
    (folder / "shop").mkdir()
    (folder / "shop" / "queue.py").write_text(ONE_APP + A_WORKER)
    import queue

    assert list(load_app("shop/queue.py", workers=True).workers) == ["One"]
    assert sys.modules["queue"] is queue


def test_the_users_traceback_is_without_our_frames(folder: Path) -> None:
    sys.path.insert(0, str(folder))
    (folder / "shop_bad.py").write_text("import lowq\n@lowq.Lowq().worker(shard_count=3)\ndef One(p): ...\n")
    with pytest.raises(ValueError, match="shards_count") as caught:
        __import__("shop_bad")
    text = users_traceback(caught.value)
    assert "shop_bad.py" in text
    assert "lowq/application.py" not in text
    assert text.endswith("did you mean 'shards_count'?\n")
