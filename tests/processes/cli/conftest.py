"""What the tests of the command line are given."""

from collections.abc import Iterator

import pytest

from tests.processes.cli.support import Cli


@pytest.fixture
def cli(redis_url: str) -> Iterator[Cli]:
    cli = Cli(redis_url)
    yield cli
    cli.app.close()
