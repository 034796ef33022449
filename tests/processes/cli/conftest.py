"""What the tests of the command line are given."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes.cli.support import Cli, Start


@pytest.fixture
def cli(redis_url: str) -> Iterator[Cli]:
    cli = Cli(redis_url)
    yield cli
    cli.app.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    start = Start(tmp_path)
    yield start
    start.close()
