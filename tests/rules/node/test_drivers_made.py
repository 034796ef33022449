"""What makes a splitter or a scheduler gives none: the node does not start with it."""

from typing import Any

import pytest

import lowq

pytestmark = pytest.mark.parametrize("store_url", ["redis"], indirect=True)


@pytest.mark.parametrize("kind", ["splitter", "scheduler"])
def test_what_is_not_callable_is_refused_at_the_start(store_url: str, kind: str) -> None:
    makes_none: dict[str, Any] = {f"build_{kind}": lambda: None}
    app = lowq.Lowq(redis_url=store_url, **makes_none)
    work: Any = type("Work", (lowq.Worker,), {"perform": lambda _self, _payloads_by_id: None})
    app.worker(shards_count=1)(work)
    with pytest.raises(lowq.ConfigError, match=rf"makes the {kind} .* gave None; it must be callable"):
        lowq.Node(app, threads=1).start()
    assert app.nodes() == []
    app.close()
