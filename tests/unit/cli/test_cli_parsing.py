"""The command line without Redis: verbs and options, what is shown, NDJSON, the embedded store's protocol, -r."""

import io
import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

import lowq
from lowq import Lowq
from lowq.cli import main, output
from lowq.cli.failure import Failure
from lowq.cli.loading import load_app, users_traceback
from lowq.cli.look import _seconds, moment
from lowq.cli.push import BadLine, Line, LinesToSkip, Source, lines_but
from lowq.codec import MAX_TIME
from lowq.duration import LONGEST_WAIT, ago, duration
from lowq.job import Job
from lowq.store.embedded import encode, take_command
from lowq.version import VERSION
from tests.rows import case


def invoke(*args: str) -> Result:
    return CliRunner().invoke(main, args)


# --- verbs and options ---


def test_options_may_stand_before_the_verb_and_run_may_be_left_out() -> None:
    rows: list[tuple[list[str], list[str]]] = [
        (["-r", "app.py"], ["run", "-r", "app.py"]),
        (["-rapp.py", "-t", "10", "--embedded"], ["run", "-rapp.py", "-t", "10", "--embedded"]),
        (["-r", "app.py", "--help"], ["run", "-r", "app.py", "--help"]),
        (["stats", "Orders"], ["stats", "Orders"]),
        (["--redis-url", "redis://h", "stats", "Orders"], ["stats", "--redis-url", "redis://h", "Orders"]),
        (["--namespace=shop", "--json", "peek", "Q", "1"], ["peek", "--namespace=shop", "--json", "Q", "1"]),
        (["-r", "stats", "jobs", "Q"], ["jobs", "-r", "stats", "Q"]),
        (["--help"], ["--help"]),
        (["-h"], ["-h"]),
        (["-r", "app.py", "-h"], ["run", "-r", "app.py", "-h"]),
        (["help"], ["--help"]),
        (["help", "stats"], ["stats", "--help"]),
        (["--version"], ["--version"]),
        ([], []),
    ]
    for typed, meant in rows:
        with case(typed, meant):
            assert main._verb_first(typed) == meant


def test_every_verb_is_listed_and_explains_itself() -> None:
    listed = invoke("--help")
    assert listed.exit_code == 0
    verbs = [
        "run",
        "consume",
        "web",
        "stats",
        "statistics",
        "nodes",
        "shards",
        "jobs",
        "peek",
        "why",
        "rates",
        "errors",
        "times",
        "audit",
        "doctor",
        "push",
        "put",
        "take",
        "kick",
        "bury",
        "delete",
        "perform-now",
        "release-all",
        "pause",
        "resume",
        "reshard",
        "schedules",
        "drop",
        "quiet",
        "stop",
        "reload",
        "web-user",
        "init",
        "completion",
    ]
    assert sorted(main.commands) == sorted(verbs)
    for verb in verbs:
        assert f"\n  {verb} " in listed.stdout
        help_text = invoke(verb, "--help")
        assert help_text.exit_code == 0
        assert ("--redis-url" in help_text.stdout) is (verb not in ("web-user", "init", "completion"))
        assert invoke(verb, "-h").stdout == invoke("help", verb).stdout == help_text.stdout
    assert invoke("-h").stdout == invoke("help").stdout == listed.stdout


def test_version() -> None:
    assert invoke("--version").stdout == f"lowq {VERSION}\n"


def test_wrong_usage_exits_2_and_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[tuple[list[str], str]] = [
        (["stat"], "did you mean stats"),
        (["perform_now", "Q", "1"], "did you mean perform-now?"),
        (["app.py"], "did you mean: lowq run app.py"),
        (["shop.workers"], "did you mean: lowq run shop.workers"),
        (["run", "nowhere"], "lowq: nowhere: there is no module 'nowhere'"),
        (["zzz"], "verbs are run, consume, web, stats"),
        (["run"], "lowq run app.py"),
        (["-t", "3"], "lowq run app.py"),
        (["-r", "app.py", "--embedded", "--redis-url", "redis://h"], "leave out --redis-url"),
        (["-r", "nowhere.py"], "there is no such file"),
        (["stats", "--jsn"], "--json"),
        (["shards"], "Missing argument 'QUEUE'"),
        (["jobs", "Q", "--state", "dead"], "'morgue'"),
        (["jobs", "Q", "--limit", "0"], "1<=x<=1000"),
        (["jobs", "Q", "--min", "soon"], "it is a time: "),
        (["kick", "Q"], "--all"),
        (["kick", "Q", "1", "--all"], "not both"),
        (["kick", "Q", "--all", "--match", "4*"], "leave one of them out"),
        (["kick", "Q", "--state", "due"], "morgue"),
        (["stats", "a{b"], "queue name"),
        (["stats", "--redis-url", "http://h"], "redis://"),
        (["push", "Q", "--shards-count", "1", "--id", "1", "--payload", "paid"], "the payload is no JSON"),
        (["put", "Q", "paid", "--shards-count", "1"], "the payload is no JSON"),
        (["put", "Q", "1", "--shards-count", "1", "--perform-at", "soon"], "--perform-at soon"),
        (["consume", "Q"], "lowq consume QUEUE -- COMMAND {id}"),
        (["consume", "Q", "-c", "0", "--", "true"], "0 is not in the range"),
        (["take", "Q", "--timeout", "-1"], "-1"),
        (["push", "Q", "--shards-count", "1", "--id", "1", "--score", "high"], "--score high: it must be a number"),
        (["push", "Q", "--shards-count", "1", "--id", "1", "--perform-at", "soon"], "--perform-at soon"),
        (["push", "Q", "--shards-count", "1", "--score", "1"], "give its --id"),
        (["push", "Q", "--shards-count", "1", "--id", "1", "--skip", "1"], "leave out the file and --skip"),
        (["push", "Q", "nowhere.ndjson"], "does not exist"),
        (["-r", "app.py", "--processes", "0"], "0 is not in the range x>=1"),
        (["-r", "app.py", "--processes", "many"], "'many' is not a valid integer"),
        (["--processes", "2"], "lowq run app.py"),
        (["-r", "app.py", "--processes", "2", "--embedded", "--redis-url", "memory://"], "brings its own store"),
        (["-r", "app.py", "--supervised", "1.1"], "lowq run --processes N"),
        (["-r", "app.py", "--supervised", "1.1:500:501"], "lowq run --processes N"),
    ]
    for args, says in rows:
        with case(args, says), monkeypatch.context() as patch:
            patch.setenv("LOWQ_REDIS_URL", "memory://cli-usage")
            result = invoke(*args)
            assert result.exit_code == 2, result.output
            assert says in result.stderr
            assert "Traceback" not in result.stderr
            assert result.stdout == ""


def test_an_address_for_figures_is_checked_before_anything_starts() -> None:
    all_args: list[list[str]] = [["run", "-r", "app.py"], ["run", "-r", "app.py", "--processes", "2"], ["consume", "q"]]
    rows: list[tuple[str, str]] = [("--graphite", "graphite"), ("--statsd", "tcp://statsd:8125")]
    for args, (option, value) in product(all_args, rows):
        with case(args, option, value):
            result = invoke(*args, option, value, *(["--", "true"] if args[0] == "consume" else []))
            assert result.exit_code == 2
            assert option in result.output
            assert "write HOST:PORT" in result.output


def test_a_wrong_environment_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWQ_REDIS_URL", "localhost")
    result = invoke("stats")
    assert result.exit_code == 2
    assert result.stderr.startswith("lowq: environment variable LOWQ_REDIS_URL")
    assert result.stderr.count("\n") == 1


def test_the_seconds_of_watch_are_told_from_a_queue() -> None:
    rows: list[tuple[str, float | None]] = [("2", 2.0), (".5", 0.5), ("0", 0.1), ("Orders", None), ("1e9", None)]
    for text, seconds in rows:
        with case(text, seconds):
            assert _seconds(text) == seconds


def test_watch_never_sleeps_longer_than_a_process_can() -> None:
    assert _seconds("9" * 30) == LONGEST_WAIT


def test_times_are_numbers_or_iso() -> None:
    assert moment("1800000000.5") == 1800000000.5
    assert moment("2027-01-15T08:00:00Z") == 1800000000
    assert moment("9999-12-31T23:59:59Z") == moment("9999-12-31T23:59:59-12:00") == MAX_TIME
    for wrong in ("soon", "0001-01-01", "nan", "inf", "-inf", "1e999"):
        with pytest.raises(ValueError, match=r".*"):
            moment(wrong)


# --- what is shown ---


def test_durations_have_the_two_largest_units() -> None:
    rows: list[tuple[float, str]] = [
        (0, "0 s"), (1.26, "1.3 s"), (59.6, "1 min"), (250, "4 min 10 s"), (3600, "1 h"), (90061, "1 d 1 h"),
    ]  # fmt: skip
    for seconds, text in rows:
        with case(seconds, text):
            assert duration(seconds) == text


def test_times_are_told_relatively() -> None:
    assert ago(1250, 1000) == "in 4 min 10 s"
    assert ago(820, 1000) == "3 min ago"
    assert ago(1000.2, 1000) == "now"
    assert ago(None, 1000) == ""
    assert ago(math.inf, 1000) == ""


def test_scores_are_shown_as_they_were_given() -> None:
    assert [output.score(value) for value in (7.0, 7.5, -1.0, 2.0**60)] == ["7", "7.5", "-1", "1.152921504606847e+18"]


def test_counts_have_a_plural() -> None:
    assert output.count(1, "job") == "1 job"
    assert output.count(1234, "job") == "1,234 jobs"


def test_text_is_cut_to_columns_and_not_to_characters() -> None:
    assert output.shorten("abcdef", 6) == "abcdef"
    assert output.shorten("abcdef", 5) == "abcd…"
    assert output.shorten("価格価格", 5) == "価格…"
    assert output.shorten("abc", math.inf) == "abc"


def test_payloads_are_compact_and_drive_no_terminal() -> None:
    assert output.payload_text({"a": [1, "ü"]}) == '{"a":[1,"ü"]}'
    text = output.payload_text("\x1b[2J\x9b31m\u202e\x00")
    assert text.isprintable()
    assert "\\u001b[2J" in text


def test_tables_are_aligned_cut_and_leave_out_empty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    lines = output.table(("id", "n", "note?"), [["a", "1", ""], ["価格", "1,000", ""]], right=("n",))
    assert [line.replace("\x1b[2m", "").replace("\x1b[0m", "") for line in lines] == [
        "ID        N",
        "a         1",
        "価格  1,000",
    ]
    assert output.table(("id", "text"), [["1", "x" * 50]])[1] == "1   " + "x" * 15 + "…"


def test_ids_in_tables_are_escaped() -> None:
    assert output.table(("id",), [["a\x1b[31m\nb\udcff"]])[1] == "a\\x1b[31m\\nb\\udcff"


def test_a_job_in_full_shows_payloads_error_and_what_was_left_out() -> None:
    job = Job("4\x07", "retrying", [({"version": 7}, 7.0)], 1250.0, 2, "Traceback\n  boom\x1b[2J", 1, None, 1001)
    assert output.job_block(job, 1000.0) == [
        "4\\x07  retrying, in 4 min 10 s, failed 3 times, crashed 1 time",
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


def source(text: bytes, skip: int = 0, longest: int = 1000) -> Source:
    return Source(io.BytesIO(text), [range(1, skip + 1)], longest, lambda _: None)


def test_lines_know_their_numbers_and_blank_ones_are_no_jobs() -> None:
    lines = list(source(b'\xef\xbb\xbf{"id": 1}\n\n  \r\n{"id": 2}'))
    assert lines == [{"id": 1}, {"id": 2}]
    assert [(line.place, line.number) for line in lines] == [(1, 1), (2, 4)]


def test_skipped_lines_are_not_even_parsed() -> None:
    assert list(source(b'nonsense\n{"id": 2}\n', skip=1)) == [{"id": 2}]


def test_lines_are_left_out_as_they_are_named() -> None:
    all_wanted: list[list[int]] = [[], [1], [3], [7], [1, 7], [2, 3, 5], [1, 2, 3, 4, 5, 6, 7], [4, 5, 6, 7]]
    for wanted in all_wanted:
        with case(wanted):
            skip = LinesToSkip().convert(lines_but(wanted, 7), None, None)
            lines = b"".join(b'{"id": %d}\n' % (number + 1) for number in range(9))
            found = [job["id"] for job in Source(io.BytesIO(lines), skip, 1000, lambda _: None)]
            assert found == [*wanted, 8, 9]


def test_lines_that_are_left_out_are_named_shortly() -> None:
    assert [lines_but(wanted, 7) for wanted in ([4, 5, 6, 7], [2, 4], [1, 2], [1, 3])] == [
        "3",
        "1,3,5-7",
        "3-7",
        "2,4-7",
    ]
    assert lines_but([1], 2) == "2-2"  # "2" would be the first two


def test_lines_that_are_none_are_refused() -> None:
    texts = ["", "x", "-1", "3-", "3-2", "0-2", "4-5,2", "1-3,3", "1,,2", "1 2", "\u0663"]
    for text in texts:
        with case(text), pytest.raises(click.BadParameter):
            LinesToSkip().convert(text, None, None)


def test_a_malformed_line_is_named() -> None:
    rows: list[tuple[bytes, str]] = [
        (b'{"id": 1', "line 2 is no JSON: Input data was truncated"),
        (b'{"id": 1} x', "line 2 is no JSON"),
        (b'{"id": "\xff"}', "line 2 is no JSON"),
        (b"[1]", 'line 2 is no JSON object, such as {"id": 42}: [1]'),
        (b"null", "line 2 is no JSON object"),
        (b'{"id": "' + b"x" * 1000 + b'"}', "line 2 is longer than 1,000 bytes"),
    ]
    for line, says in rows:
        with case(line, says):
            jobs = source(b'{"id": 1}\n' + line + b'\n{"id": 3}\n')
            with pytest.raises(BadLine) as refused:
                list(jobs)
            assert says in str(refused.value)
            assert [line.number for line in jobs.uncertain()] == [1]


def test_what_is_not_certainly_in_is_remembered_and_no_more() -> None:
    jobs = source(b'{"id": 1}\n\n{"id": 2}\n{"id": 3}\n{"id": 4}\n')
    lines = iter(jobs)
    for _ in range(3):
        next(lines)
    jobs.accepted(2)
    assert [line.number for line in jobs.uncertain()] == [4]
    assert jobs.uncertain([{"id": 9}, Line({"id": 2}, 2, 3)]) == [{"id": 2}]
    jobs.stop()
    assert list(lines) == []


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


@pytest.mark.parametrize("spec", ["shop_apps:second", "shop_apps.py:second", "./shop_apps.py:second"])
def test_an_application_is_named_in_a_module_or_a_file(folder: Path, spec: str) -> None:
    (folder / "shop_apps.py").write_text(TWO_APPS)
    app = load_app(spec, workers=True)
    assert isinstance(app, Lowq)
    assert list(app.workers) == ["Two"]
    assert app.workers["Two"].__module__ == "shop_apps"
    assert sys.modules["shop_apps"].second is app


def test_what_is_wrong_with_r_is_said(tmp_path: Path) -> None:
    rows: list[tuple[str, str]] = [
        ("shop_apps", "has 2 applications; choose one: shop_apps:first or shop_apps:second"),
        ("shop_apps:secnd", "did you mean shop_apps:second?"),
        ("shop_apps:Two", "it is of type type, not Lowq"),
        ("shop_apps:empty", "shop_apps:empty registers no worker"),
        ("shop_aps", "did you mean shop_apps?"),
        ("shop_aps.py", "did you mean shop_apps.py?"),
        ("elsewhere/app.py", "there is no folder elsewhere"),
        ("shop_apps.first", "there is no module 'shop_apps.first'"),
        ("no-name", "no-name: write app.py, pkg.module or pkg.module:app"),
        (":app", ":app: write app.py, pkg.module or pkg.module:app"),
    ]
    for number, (spec, says) in enumerate(rows):
        own = tmp_path / str(number)
        own.mkdir()
        with case(spec, says), working_in(own):
            (own / "shop_apps.py").write_text(TWO_APPS)
            with pytest.raises(Failure) as failure:
                load_app(spec, workers=True)
            assert says in failure.value.message
            assert failure.value.exit_code == 2


def test_a_file_in_a_package_is_imported_under_its_full_name_and_once(folder: Path) -> None:
    package = folder / "shop_pkg"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "work.py").write_text(
        "import lowq\nfrom . import helper\napp = lowq.Lowq()\n@app.worker\ndef One(payloads_by_id): ...\n"
    )
    (package / "helper.py").write_text("import shop_pkg.work\n")
    app = load_app("shop_pkg/work.py", workers=True)
    assert sys.modules["shop_pkg.work"].app is app
    assert "work" not in sys.modules


def test_a_file_named_like_a_module_of_python_does_not_replace_it(folder: Path) -> None:
    (folder / "shop").mkdir()
    (folder / "shop" / "queue.py").write_text(
        "import lowq\napp = lowq.Lowq()\n@app.worker\ndef One(payloads_by_id): ...\n"
    )
    import queue

    app = load_app("shop/queue.py", workers=True)
    assert list(app.workers) == ["One"]
    assert sys.modules["queue"] is queue


def test_a_settings_module_needs_no_worker_where_none_is_run(folder: Path) -> None:
    (folder / "shop_settings.py").write_text("import lowq\napp = lowq.Lowq(namespace='shop')\n")
    assert load_app("shop_settings", workers=False).config.namespace == "shop"


def test_the_users_traceback_is_without_our_frames(folder: Path) -> None:
    sys.path.insert(0, str(folder))
    (folder / "shop_bad.py").write_text("import lowq\n@lowq.Lowq().worker(shard_count=3)\ndef One(p): ...\n")
    with pytest.raises(ValueError, match="shards_count") as caught:
        __import__("shop_bad")
    text = users_traceback(caught.value)
    assert "shop_bad.py" in text
    assert "lowq/application.py" not in text
    assert text.endswith("did you mean 'shards_count'?\n")
