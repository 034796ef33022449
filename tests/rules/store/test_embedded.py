"""The embedded store without what it needs."""

import pytest

from lowq.errors import ConfigError
from lowq.store import new_store


def test_a_fakeredis_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("fakeredis.FakeRedisConnection")
    with pytest.raises(ConfigError, match=r"FakeRedisConnection.*pip install 'lowq\[embedded\]'"):
        new_store()
