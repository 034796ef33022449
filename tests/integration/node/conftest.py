"""Every test of nodes, with workers in threads and with async workers in an event loop."""

import pytest

from tests.integration.support import Rig


@pytest.fixture(params=["threads", pytest.param("loop", marks=pytest.mark.slow)], autouse=True)
def kind_of_worker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of all rigs that the test makes."""
    kind: str = request.param
    if kind == "loop":
        monkeypatch.setattr(Rig, "defaults", {"ORDERS_ASYNC": "1"})
    return kind
