"""Keys of ours that somebody gave another type: the answer says which one, not that something broke."""

from starlette.testclient import TestClient

import lowq
import lowq_web
from lowq.store.keys import shard_prefix
from tests.rows import case
from tests.rules.web.conftest import OWN

SHARD = shard_prefix("lowq", "Orders", 0)


def test_it_is_named(store_url: str) -> None:
    rows: list[tuple[str, str, list[str]]] = [
        ("lowq:v1:queues", "hash", ["/", "/search?id=1", "/queues/Orders", "/api/v1/queues", "/api/v1/search?id=1"]),
        ("lowq:v1:nodes", "hash", ["/", "/nodes", "/api/v1/nodes", "/queues/Orders/shards"]),
        ("lowq:v1:tasks", "hash", ["/tasks", "/tasks/x", "/api/v1/tasks", "/api/v1/tasks/x"]),
        ("lowq:v1:audit", "list", ["/audit", "/api/v1/audit"]),
        ("lowq:v1:history:Orders", "hash", ["/queues/Orders", "/", "/api/v1/rates", "/api/v1/queues/Orders/rates"]),
        ("lowq:v1:error_groups:Orders", "hash", ["/errors", "/errors?queue=Orders", "/api/v1/errors"]),
        (SHARD + "due", "zset", ["/queues/Orders", "/search?id=1", "/queues/Orders/job?id=1", "/api/v1/search?id=1"]),
        (SHARD + "taken", "hash", ["/queues/Orders", "/queues/Orders/shards", "/api/v1/queues/Orders/shards"]),
        (SHARD + "meta", "hash", ["/queues/Orders", "/api/v1/queues/Orders/shards"]),
    ]
    for number, (name, must_be, paths) in enumerate(rows):
        with case(name, must_be, paths):
            app = lowq.Lowq(redis_url=store_url, namespace=f"row{number}")
            key = name.replace("lowq", f"row{number}", 1)
            app.queue("Orders", 1).push({"id": 1, "delay": 60})
            app.client.command("DEL", key)
            app.client.command("SET", key, "x")
            made = lowq_web.create_app(app)
            client = TestClient(made, base_url="http://127.0.0.1", headers=OWN, follow_redirects=False)
            for path in paths:
                answer = client.get(path)
                assert answer.status_code == 503, path
                said = answer.json()["error"] if path.startswith("/api") else answer.text.replace("&#39;", "'")
                assert f"The key '{key}' in Redis is a string and must be a {must_be}" in said, path
                assert "`lowq doctor`" in said, path
            app.client.command("SET", f"row{number}:v1:audit", "x")
            delete = {"action": "delete", "ids": ["1"]}
            refused = client.post("/api/v1/queues/Orders/actions", json=delete)
            assert refused.status_code == 503, "nothing is done that can't be written down"
            app.close()
