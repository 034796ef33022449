"""Drivers: found by name, among lowq's own and the entry points of packages."""

import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, EntryPoints
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import lowq
from lowq import codec, drivers
from lowq.errors import ConfigError
from lowq.shards.scheduler import LagScheduler, SeqScheduler
from lowq.shards.splitter import BalancedSplitter, DefaultSplitter
from tests.rows import case
from tests.waiting import PATIENCE

Install = Callable[..., None]

#: What the entry points of these tests name.
CODEC = SimpleNamespace(dump_payload=lambda _: b"x", load_payload=lambda _: "x")
NO_CODEC = SimpleNamespace(dump_payload=lambda _: b"x")
NUMBER = 5


class OwnQueue(lowq.Queue):
    """A queue class."""


def make_scheduler() -> SeqScheduler:
    return SeqScheduler()


@pytest.fixture
def app() -> lowq.Lowq:
    return lowq.Lowq(redis_url="memory://")


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs entry points: their group, their name, and what they name in this module."""
    points: list[EntryPoint] = []

    def add(group: str, name: str, value: str) -> None:
        points.append(EntryPoint(name, value if ":" in value else f"{__name__}:{value}", group))

    monkeypatch.setattr(drivers, "entry_points", lambda **wanted: EntryPoints(points).select(**wanted))
    return add


def test_lowqs_own_need_no_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[tuple[drivers.Kind, str, object]] = [
        ("scheduler", "lag", LagScheduler), ("scheduler", "seq", SeqScheduler),
        ("splitter", "balanced", BalancedSplitter), ("splitter", "default", DefaultSplitter),
        ("codec", "json", codec), ("queue", "default", lowq.Queue),
    ]  # fmt: skip
    monkeypatch.setattr(drivers, "entry_points", lambda **_: pytest.fail("they were read"))
    for kind, name, driver in rows:
        with case(kind, name):
            assert drivers.check(kind, name) == name
            assert drivers.load(kind, name) is driver


def test_importing_lowq_reads_no_entry_points() -> None:
    code = "import importlib.metadata as metadata\nmetadata.entry_points = None\nimport lowq\nlowq.config.freeze()\n"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(lowq.__file__).parents[1], timeout=120)


def test_a_package_brings_one(install: Install) -> None:
    rows: list[tuple[drivers.Kind, str, object]] = [
        ("splitter", "lowq.shards.splitter:DefaultSplitter", DefaultSplitter),
        ("scheduler", "make_scheduler", make_scheduler), ("codec", "CODEC", CODEC),
        ("merge", "builtins:list", list), ("queue", "OwnQueue", OwnQueue),
    ]  # fmt: skip
    for kind, value, driver in rows:
        with case(kind, value):
            install(drivers.GROUPS[kind], "mine", value)
            assert "mine" in drivers.names(kind)
            assert drivers.check(kind, "mine") == "mine"
            assert drivers.load(kind, "mine") is driver


def test_a_wrong_name_is_refused_with_those_that_there_are(install: Install) -> None:
    rows: list[tuple[drivers.Kind, str]] = [
        ("splitter", "balanced, default"), ("scheduler", "lag"), ("codec", "json"),
        ("merge", "append, collapse, latest"), ("queue", "default"),
    ]  # fmt: skip
    functions: list[Callable[[drivers.Kind, Any], object]] = [drivers.check, drivers.load]
    for kind, own in rows:
        install(drivers.GROUPS[kind], "mine", "NUMBER")
        for find, wrong in product(functions, ("yours", None)):
            message = rf"no {kind} .*There are {own}.*mine.*'{drivers.GROUPS[kind]}'"
            with case(kind, find, wrong), pytest.raises(ConfigError, match=message):
                find(kind, wrong)
    with pytest.raises(ConfigError, match="Did you mean 'lag'"):
        drivers.load("scheduler", "lagg")


@pytest.mark.parametrize(("kind", "value", "message"), [
    ("splitter", "NUMBER", "it must be .*threads"), ("scheduler", "NUMBER", "it must be .*callable"),
    ("codec", "NO_CODEC", "it must be .*load_payload"), ("merge", "NUMBER", "it must be .*payloads"),
    ("queue", "make_scheduler", r"it must be .*lowq\.Queue"), ("queue", "builtins:dict", r"it must be .*lowq\.Queue"),
    ("codec", "no_such_module_at_all:x", "can't be imported"), ("codec", "lowq:no_such_name", "can't be imported"),
])  # fmt: skip
def test_what_can_not_be_used_is_refused(install: Install, kind: drivers.Kind, value: str, message: str) -> None:
    install(drivers.GROUPS[kind], "mine", value)
    with pytest.raises(ConfigError, match=rf"{kind} 'mine', .*{message}"):
        drivers.load(kind, "mine")


def test_a_name_that_two_packages_give(install: Install) -> None:
    install("lowq.merges", "mine", "builtins:list")
    install("lowq.merges", "mine", "builtins:list")
    assert drivers.load("merge", "mine") is list  # the same package, seen twice
    install("lowq.merges", "mine", "builtins:sorted")
    with pytest.raises(ConfigError, match=r"more than once.*builtins:list.*builtins:sorted"):
        drivers.load("merge", "mine")


# --- where they are named ---


@pytest.mark.parametrize("setting", ["splitter", "scheduler", "codec"])
def test_a_setting_with_a_wrong_name(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = lowq.Config()
    with pytest.raises(ConfigError, match=f"{setting}='no'.*there is no {setting} 'no'.*lowq.{setting}s"):
        setattr(config, setting, "no")
    monkeypatch.setenv(f"LOWQ_{setting.upper()}", "no")
    with pytest.raises(ConfigError, match=f"LOWQ_{setting.upper()}: .*there is no {setting} 'no'"):
        config.freeze()


def test_a_codec_by_name_brings_both_ways_and_the_last_one_set_holds(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("lowq.codecs", "mine", "CODEC")
    config = lowq.Config(codec="mine", load_payload=bytes.decode)
    assert (config.dump_payload, config.load_payload) == (CODEC.dump_payload, bytes.decode)
    config.codec = "mine"
    assert (config.dump_payload, config.load_payload) == (CODEC.dump_payload, CODEC.load_payload)
    config.codec = "json"
    assert (config.dump_payload, config.load_payload) == (codec.dump_payload, codec.load_payload)
    monkeypatch.setenv("LOWQ_CODEC", "mine")
    assert lowq.Config().dump_payload is CODEC.dump_payload


def test_a_queue_class_by_name(install: Install, app: lowq.Lowq) -> None:
    install("lowq.queues", "mine", "OwnQueue")
    assert type(app.queue("plain", 2)) is lowq.Queue
    assert type(app.queue("own", 2, driver="mine")) is OwnQueue

    @app.worker(driver="mine", shards_count=3)
    def orders(payloads_by_id: dict[str, list[Any]]) -> None: ...

    assert type(orders.queue) is type(app.queue("orders")) is type(app.queue("orders", 3)) is OwnQueue
    assert type(app.with_own_pool(1).queue("orders")) is OwnQueue
    assert type(app.queue("orders", driver="default")) is lowq.Queue
    with pytest.raises(ConfigError, match=r"no queue 'no'.*lowq\.queues"):
        app.queue("own", driver="no")
    with pytest.raises(ConfigError, match=r"no queue 'no'.*lowq\.queues"):
        app.worker(driver="no")(lambda _payloads_by_id: None)


def test_a_merge_policy_by_name(install: Install, app: lowq.Lowq) -> None:
    install("lowq.merges", "mine", "builtins:sorted")
    queue = app.queue("pages", 1, merge="mine")
    queue.push([{"id": 1, "payload": number, "score": -number} for number in range(3)])
    with queue.consumer() as consumer:
        (job,) = consumer.take(timeout=PATIENCE)
        assert job.payloads == [0, 1, 2]  # by score they are the other way round
    with pytest.raises(ConfigError, match=r"^queue 'pages': merge='apend': .*append, collapse, latest"):
        app.queue("pages", 1, merge="apend")
