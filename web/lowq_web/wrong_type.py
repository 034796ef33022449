"""Finds the key that another program gave a wrong type, for the answer to a request that fails because of it."""

import lowq
from lowq.store.keys import SHARD_KEYS, kind_of


def explain(app: lowq.Lowq, error: lowq.ScriptError) -> str | None:
    """A sentence on the key that the error is about; None: it is about something else.

    Raises:
        RedisUnavailable, RedisRefused
    """
    if "WRONGTYPE" not in str(error) or error.key is None:
        return None
    if error.key.endswith(":"):
        expected = {error.key + key.name: key.types[0] for key in SHARD_KEYS if key.is_one}
    else:
        kind = kind_of(app.config.namespace, error.key)
        if kind is None:
            return None
        expected = {error.key: kind.types[0]}
    kinds = app.client.commands([("TYPE", key) for key in expected], key=error.key)
    for (key, wanted), raw in zip(expected.items(), kinds, strict=True):
        found = raw.decode() if isinstance(raw, bytes) else str(raw)
        if found not in ("none", wanted):
            return (
                f"The key {key!r} in Redis is a {found} and must be a {wanted}: it was written by hand or by another "
                "program, and nothing that needs it works. Look at it, rename or remove it; `lowq doctor` shows what "
                "else is wrong."
            )
    return None
