"""A consumer's session: the name under which it comes back to what it had, held by one consumer at a time.

::

    Redis: the session's key        says which start of a consumer has it, for as long as a lease
           owner of a shard         begins with the session's digest: so the next start knows what the last one had
"""

import secrets
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from lowq.errors import ConfigError, SessionInUse
from lowq.settings import Config
from lowq.shards.shard import Shard
from lowq.store import Call, Client, Command, registry
from lowq.store.keys import session_key


class Session:
    """Whoever starts with the same ``name`` on the same queue continues it; None: a random one, which is nobody's yet.

    Raises:
        ConfigError: the name is none.
    """

    def __init__(self, client: Client, config: Config, queue: str, name: object) -> None:
        self.name = checked_name(name)
        #: Whether there may have been a consumer with it before.
        self.is_named = name is not None
        #: Stands for it in what the shards say of their owners.
        self.digest = blake2b(f"{queue}\0{self.name}".encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
        self._client = client
        self._queue = queue
        self._seconds = config.lease_ttl
        self._key = session_key(config.namespace, self.digest)
        self._instance = secrets.token_hex(8)

    def acquire(self) -> None:
        """Gets it, for as long as a lease.

        Raises:
            SessionInUse: another consumer has it. RedisUnavailable, RedisRefused
        """
        got = self._client.call(self._call(self._seconds))
        if not got.is_own:
            raise SessionInUse(
                f"another consumer of queue {self._queue!r} has the session {self.name!r}: it is free once that one "
                f"has detached or was closed, or {got.seconds:.1f} s after its process has died"
            )

    def keep(self, client: Client) -> bool:
        """Keeps it for as long as a lease from now; whether it was still this consumer's. It is asked once.

        Raises:
            RedisUnavailable, RedisRefused
        """
        call = self._call(self._seconds)
        (reply,) = client.run_many([call], repeats=0)
        if isinstance(reply, Exception):
            raise reply
        return call.read(reply).is_own

    def release(self) -> None:
        """The next one with this name need not wait. Should Redis be away, it has to."""
        self._client.run_many([self._call(None)])

    def _call(self, seconds: float | None) -> Call[registry.SessionReply]:
        return registry.session(self._key, self._instance, seconds)

    def shards_left(self, shards: Sequence[Shard]) -> list[Shard]:
        """The shards that the last consumer with this session had; nobody has had them since.

        Raises:
            RedisUnavailable, RedisRefused
        """
        if not self.is_named:
            return []
        owners: list[Any] = self._client.run_many(
            [Command(shard.prefix, "HGET", f"{shard.prefix}meta", "owner") for shard in shards]
        )
        for owner in owners:
            if isinstance(owner, Exception):
                raise owner
        mine = self.digest.encode()
        return [shard for shard, owner in zip(shards, owners, strict=True) if owner and owner.startswith(mine)]


def checked_name(name: object) -> str:
    """The name of a session, a random one for None.

    Raises:
        ConfigError
    """
    if name is None:
        return secrets.token_hex(16)
    if not isinstance(name, str) or not 1 <= len(name) <= 512:
        raise ConfigError(f"session={name!r:.100} must be a text of 1 to 512 characters")
    return name
