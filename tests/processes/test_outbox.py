"""`lowq outbox` as a process: commands, signals, and what is left when anybody is killed at any step."""

import os
import random
import signal
import sqlite3
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import psycopg
import pytest

import lowq
from lowq.contrib import outbox
from tests.postgres_server import PostgresServer
from tests.processes.cli.support import Cli, Process, Start
from tests.redis_server import RedisServer
from tests.waiting import PATIENCE, until

#: Performs by writing down what was handed over, in order.
APP = """
import os, signal
from pathlib import Path
import lowq

def die(queue, jobs, call):
    when = os.environ.get("DIE", "")
    if when == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    result = call()
    if when == "after":
        os.kill(os.getpid(), signal.SIGKILL)
    return result

lowq.app.config.client_middlewares = [die]

@lowq.worker(shards_count=3)
class OrderSync(lowq.Worker):
    def perform(self, payloads_by_id):
        lines = "".join(f"{i} {p['version']}\\n" for i, payloads in payloads_by_id.items() for p in payloads)
        with open(os.environ.get("HANDED", os.devnull), "a") as file:
            file.write(lines)
"""

#: Changes orders and pushes their versions, each in one transaction, until it is killed.
WRITER = """
import random, sys, time
import psycopg
import lowq
from lowq.contrib import outbox

random.seed(sys.argv[2])
while True:
    try:
        with psycopg.connect(sys.argv[1], connect_timeout=5) as connection:
            while True:
                order = random.randrange(1, 9)
                update = "UPDATE orders SET version = version + 1 WHERE id = %s RETURNING version"
                (version,) = connection.execute(update, (order,)).fetchone()
                outbox.push("OrderSync", order, {"version": version}, connection=connection)
                if random.random() < 0.2:
                    time.sleep(random.random() / 50)
                if random.random() < 0.2:
                    connection.rollback()
                else:
                    connection.commit()
                time.sleep(0.002)
    except psycopg.Error:
        time.sleep(0.05)
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    start = Start(tmp_path)
    yield start
    start.close()


@pytest.fixture
def sqlite(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(tmp_path / "shop.db", timeout=PATIENCE)  # a relay may be held up in a commit
    outbox.create_table(connection)
    yield connection
    connection.close()


@pytest.fixture
def sqlite_url(tmp_path: Path, sqlite: sqlite3.Connection) -> str:
    return f"sqlite:///{tmp_path / 'shop.db'}"


def test_the_command_says_what_it_needs(redis_url: str, sqlite: sqlite3.Connection, sqlite_url: str) -> None:
    cli = Cli(redis_url)
    assert "set DATABASE_URL" in cli("outbox", code=2).stderr
    assert "not with 'mysql'" in cli("outbox", "mysql://root@127.0.0.1/shop", code=2).stderr
    assert "CREATE TABLE lowq_outbox" in cli("outbox", "--sql", "postgresql").stdout
    assert "can't be used: OperationalError" in cli("outbox", sqlite_url + "x", "--once", code=1).stderr
    nobody = cli("outbox", "postgresql://lowq@127.0.0.1:1/shop", "--once", code=1).stderr
    assert "can't be used: OperationalError" in nobody
    outbox.push("OrderSync", 42, connection=sqlite)
    sqlite.commit()
    assert "shards_count" in cli("outbox", sqlite_url, "--once", code=2).stderr
    cli.app.queue("OrderSync", 3).push(1)
    assert "1 job pushed" in cli("outbox", sqlite_url, "--once").stderr
    sqlite.execute("INSERT INTO lowq_outbox (queue, id, payload) VALUES ('OrderSync', '43', '{')")
    sqlite.commit()
    assert "0 jobs pushed; 1 row kept with an error" in cli("outbox", sqlite_url, "--once").stderr
    assert "1 row" in cli("outbox", sqlite_url, "--retry").stderr
    sqlite.execute("DROP TABLE lowq_outbox")
    assert "lowq outbox --sql sqlite" in cli("outbox", sqlite_url, "--once", code=2).stderr
    cli.app.close()


def test_it_relays_until_it_is_ended(redis_url: str, sqlite: sqlite3.Connection, sqlite_url: str, start: Start) -> None:
    app = lowq.Lowq(redis_url=redis_url)
    queue = app.queue("OrderSync", 3)
    environment = {"LOWQ_REDIS_URL": redis_url, "DATABASE_URL": sqlite_url}
    relay = start("outbox", "-r", "app.py", app=APP, environment=environment)
    for number in range(3):
        outbox.push("OrderSync", number, {"version": 1}, connection=sqlite)
        sqlite.commit()
        relay.until(lambda n=number: queue.peek(n))  # type: ignore[misc]
    assert relay.ends_after(signal.SIGTERM) == 0
    app.close()


class Handed:
    """Versions of one order that are pushed one after the other, each when the one before was handed over."""

    def __init__(self, redis_url: str, sqlite: sqlite3.Connection, path: Path) -> None:
        self._sqlite, self._path = sqlite, path
        self.environment = {"LOWQ_REDIS_URL": redis_url, "HANDED": str(path), "LOWQ_LEASE_TTL": "1"}
        self.pushed: list[int] = []

    def push(self, node: Process) -> None:
        self.pushed.append(len(self.pushed) + 1)
        outbox.push("OrderSync", 42, {"version": self.pushed[-1]}, connection=self._sqlite)
        self._sqlite.commit()
        node.until(lambda: self._path.exists() and self._path.read_text().endswith(f"42 {self.pushed[-1]}\n"))

    def are_in_order(self) -> bool:
        versions = [int(line.split()[1]) for line in self._path.read_text().splitlines()]
        return list(dict.fromkeys(versions)) == self.pushed


def test_a_node_relays_also_with_new_code(
    redis_url: str, sqlite: sqlite3.Connection, sqlite_url: str, start: Start, tmp_path: Path
) -> None:
    handed = Handed(redis_url, sqlite, tmp_path / "handed")
    node = start("run", "-r", "app.py", app=APP, environment={**handed.environment, "LOWQ_OUTBOX": sqlite_url})
    handed.push(node)
    node.process.send_signal(signal.SIGHUP)
    node.until(lambda: " starts with new code: " in node.err)
    handed.push(node)
    assert node.ends_after(signal.SIGTERM) == 0
    assert handed.are_in_order()


@pytest.mark.slow
def test_processes_of_a_supervisor_relay_whichever_of_them_dies(
    redis_url: str, sqlite: sqlite3.Connection, sqlite_url: str, start: Start, tmp_path: Path
) -> None:
    handed = Handed(redis_url, sqlite, tmp_path / "handed")
    options = ("--processes", "2", "--outbox", sqlite_url)
    supervisor = start("run", "-r", "app.py", *options, app=APP, environment=handed.environment)
    handed.push(supervisor)
    supervisor.until(lambda: supervisor.err.count(" is ready") == 2)
    children = Path(f"/proc/{supervisor.process.pid}/task/{supervisor.process.pid}/children").read_text().split()
    assert len(children) == 2
    for child in children:
        os.kill(int(child), signal.SIGKILL)
        handed.push(supervisor)
    assert supervisor.ends_after(signal.SIGTERM) == 0
    assert handed.are_in_order()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_relay_that_is_killed_at_the_push_loses_nothing(
    redis_url: str, sqlite: sqlite3.Connection, sqlite_url: str, start: Start, when: str
) -> None:
    app = lowq.Lowq(redis_url=redis_url)
    jobs = [{"id": 42, "payload": {"version": version}} for version in range(1, 6)]
    outbox.push("OrderSync", jobs, connection=sqlite)
    sqlite.commit()
    environment = {"LOWQ_REDIS_URL": redis_url, "DATABASE_URL": sqlite_url}
    killed = start("outbox", "-r", "app.py", app=APP, environment={**environment, "DIE": when})
    assert killed.wait() == -signal.SIGKILL
    assert sqlite.execute("SELECT count(*) FROM lowq_outbox").fetchone() == (5,)
    assert start("outbox", "-r", "app.py", "--once", app=APP, environment=environment).wait() == 0
    job = app.queue("OrderSync", 3).peek(42)
    assert job is not None
    assert [payload["version"] for payload, _ in job.payloads] == [1, 2, 3, 4, 5]
    assert sqlite.execute("SELECT count(*) FROM lowq_outbox").fetchone() == (0,)
    app.close()


SHORT = ("relay", "redis", "writer", "database")
LONG = (*SHORT, "pause", "relay", "relay", "redis", "database", "writer", "relay", "pause", "database", "relay")


@pytest.mark.parametrize("harms", [SHORT, pytest.param(LONG, marks=pytest.mark.slow)], ids=["short", "long"])
def test_nothing_committed_is_lost_or_out_of_order_whoever_is_killed(
    own_server: RedisServer, own_postgres: PostgresServer, start: Start, tmp_path: Path, harms: Sequence[str]
) -> None:
    url, handed = own_postgres.empty_database(), tmp_path / "handed"
    with psycopg.connect(url) as connection:
        outbox.create_table(connection)
        connection.execute("CREATE TABLE orders (id int PRIMARY KEY, version int NOT NULL)")
        connection.execute("INSERT INTO orders SELECT id, 0 FROM generate_series(1, 8) AS id")
    environment = {
        "LOWQ_REDIS_URL": own_server.url, "DATABASE_URL": url, "HANDED": str(handed), "LOWQ_PUSH_TIMEOUT": "2",
    }  # fmt: skip
    start("run", "-r", "app.py", app=APP, environment=environment)
    chance = random.Random(7)

    def relay() -> Process:
        return start("outbox", "-r", "app.py", "--interval", "0.1", app=APP, environment=environment)

    def writer() -> Process:
        program = (sys.executable, "-c", WRITER)
        return start(url, str(chance.random()), program=program, environment=environment)

    def progress(done: int) -> bool:
        return handed.exists() and handed.stat().st_size > done

    relays, writers = [relay(), relay()], [writer(), writer()]
    until(lambda: progress(0), "something is performed")
    for harm in harms:
        before = handed.stat().st_size
        if harm in ("writer", "relay"):
            processes, another = (writers, writer) if harm == "writer" else (relays, relay)
            victim = processes.pop(0)
            victim.process.kill()
            victim.process.wait()
            processes.append(another())
        elif harm == "redis":
            own_server.kill()
            time.sleep(0.5)
            own_server.start()
        elif harm == "pause":
            own_server.pause()
            time.sleep(3)  # longer than a push waits for it
            own_server.cont()
        else:
            own_postgres.kill()
            time.sleep(0.3)
            own_postgres.start()
        until(lambda size=before: progress(size + 100), f"work goes on after: {harm}")  # type: ignore[misc]
    for process in writers:
        process.close()

    app = lowq.Lowq(redis_url=own_server.url)
    with psycopg.connect(url, autocommit=True) as connection:
        count = "SELECT count(*) FROM lowq_outbox"
        until(lambda: connection.execute(count).fetchone() == (0,), "all rows are relayed")
        versions: dict[int, int] = dict(connection.execute("SELECT id, version FROM orders").fetchall())

    def is_idle() -> bool:
        stats = app.queue("OrderSync").stats()
        return not stats.length and not stats.taken

    until(is_idle, "all jobs are performed")
    sequences: dict[int, list[int]] = defaultdict(list)
    for line in handed.read_text().splitlines():
        order, version = map(int, line.split())
        sequences[order].append(version)
    assert sum(versions.values()) > 50
    for order, version in versions.items():
        assert list(dict.fromkeys(sequences[order])) == list(range(1, version + 1)), "each, in order"
        assert sequences[order][-1:] == [version] or not version, "and the newest is the last"
    app.close()
    said = "".join(process.err for process in relays)
    assert "Traceback" not in said, said
    assert "can't be pushed" not in said, said
