"""What the tests of the doctor are given."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.rules.doctor.clinic import Clinic


@pytest.fixture
def clinic(store_url: str) -> Iterator[Clinic]:
    with closing(Clinic(store_url)) as clinic:
        yield clinic
