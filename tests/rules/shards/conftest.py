from collections.abc import Iterator

import pytest

from tests.rules.shards.dispatching import Waiting


@pytest.fixture
def waiting() -> Iterator[Waiting]:
    made = Waiting()
    yield made
    made.close()
