"""What the tests of the dashboard are given: an application on an empty store, and clients that look like browsers."""

import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
from starlette.testclient import TestClient

import lowq
import lowq_web
from tests.rules.queue_rig import QueueRig
from tests.rules.web.shown import Reader
from tests.waiting import PATIENCE

#: What a browser says of a request that one of our own pages makes.
OWN = {"sec-fetch-site": "same-origin"}
#: The logins of one who may act and of one who may look, for `lowq_web.BasicAuth`.
ANN, BOB = ("ann", "s3cret of ann"), ("bob", "s3cret of bob")
USERS: Any = {ANN[0]: (ANN[1], "admin"), BOB[0]: (BOB[1], "read")}

Open = Callable[..., TestClient]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is no Redis that hangs: pages wait for it as long as tests do."""
    monkeypatch.setattr("lowq_web.stats_cache.CLOCK_PATIENCE", PATIENCE)
    monkeypatch.setattr("lowq_web.stats_cache.PATIENCE", PATIENCE)


@pytest.fixture
def app() -> Iterator[lowq.Lowq]:
    """On an embedded store: the rules of the store are tested elsewhere."""
    app = lowq.Lowq(redis_url=f"memory://{uuid.uuid4().hex}")
    yield app
    app.close()


@pytest.fixture
def rig(store_url: str) -> Iterator[QueueRig]:
    """An empty queue."""
    with closing(QueueRig(store_url)) as rig:
        yield rig


@contextmanager
def dashboard(base_url: str = "http://127.0.0.1:8080", **options: Any) -> Iterator[tuple[lowq.Lowq, TestClient]]:
    """An application on a store of its own, and a browser: for each row of a test whose rows change the store. Options
    are those of `create_app`.
    """
    app = lowq.Lowq(redis_url=f"memory://{uuid.uuid4().hex}")
    try:
        made = lowq_web.create_app(app, **options)
        yield app, TestClient(made, base_url=base_url, headers=OWN, follow_redirects=False)
    finally:
        app.close()


@pytest.fixture
def browse(app: lowq.Lowq) -> Open:
    """Makes a client on this machine; options are those of `create_app`."""

    def browse(base_url: str = "http://127.0.0.1:8080", **options: Any) -> TestClient:
        return TestClient(lowq_web.create_app(app, **options), base_url=base_url, follow_redirects=False)

    return browse


@pytest.fixture
def client(browse: Open) -> TestClient:
    """A browser on this machine, without authentication."""
    client = browse()
    client.headers.update(OWN)
    return client


@pytest.fixture
def reader(client: TestClient) -> Reader:
    """Who reads its pages."""
    return Reader(client)
