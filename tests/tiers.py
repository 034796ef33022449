"""Which parameters of a test run in `make test`, and which in `make test-slow` only."""

from collections.abc import Sequence
from typing import Any

import pytest

#: For what is the same on both stores, or takes long on the embedded one: `make test` runs it on a real server alone.
real_redis_often = pytest.mark.parametrize(
    "store_url", [pytest.param("memory", marks=pytest.mark.slow), "redis"], indirect=True
)


def often(values: Sequence[Any], chosen: Sequence[Any]) -> list[Any]:
    """The values of one parameter: `make test` runs the chosen ones, `make test-slow` the others."""
    assert all(value in values for value in chosen), "what is chosen must be one of the values"
    return [value if value in chosen else pytest.param(value, marks=pytest.mark.slow) for value in values]
