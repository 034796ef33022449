"""Keys of ours that somebody gave another type: which one it is, for whoever is answered that nothing can be read."""

import lowq
from lowq.store.keys import audit_key, history_key, nodes_key, queues_key

#: After the prefix of a shard -> the type that it must have. `lowq.store.keys` tells what they are for.
_OF_SHARD = {
    "due": "zset", "retries": "zset", "errors": "hash", "solo": "set", "taken": "hash", "crashes": "hash",
    "morgue": "zset", "morgue:errors": "hash", "pushed": "list", "repeated": "zset", "meta": "hash", "lease": "string",
}  # fmt: skip


def explain(app: lowq.Lowq, error: lowq.ScriptError) -> str | None:
    """A sentence on the key that the error is about; None: it is about something else.

    Raises:
        RedisUnavailable, RedisRefused
    """
    if "WRONGTYPE" not in str(error) or error.key is None:
        return None
    if error.key.endswith(":"):
        expected = {error.key + name: kind for name, kind in _OF_SHARD.items()}
    else:
        namespace = app.config.namespace
        is_hash = error.key in (queues_key(namespace), nodes_key(namespace)) or error.key.startswith(
            history_key(namespace, "")
        )
        if not is_hash and error.key != audit_key(namespace):
            return None
        expected = {error.key: "hash" if is_hash else "list"}
    kinds = app.client.commands([("TYPE", key) for key in expected], key=error.key)
    for (key, wanted), raw in zip(expected.items(), kinds, strict=True):
        found = raw.decode() if isinstance(raw, bytes) else str(raw)
        if found not in ("none", wanted):
            return (
                f"The key {key!r} in Redis is a {found} and must be a {wanted}: it was written by hand or by another "
                "program, and nothing that needs it works. Look at it, rename or remove it; `lowq doctor` tells what "
                "else is wrong."
            )
    return None
