"""Which primary has a key, and how it is followed. A single server is a cluster of one, whose primary has all keys.

`Topology` is that cluster of one: the server of the URL, the primary that sentinels name, or the embedded store.
`lowq.store.cluster.Cluster` is the one of several primaries.
"""

from typing import Any

from redis import exceptions

from lowq.errors import RedisRefused
from lowq.store.deadline import Deadline
from lowq.store.pool import Pool

Address = tuple[str, int]

#: Errors after which a primary may have been replaced: no answer, or it does not serve.
SILENCE = (exceptions.ConnectionError, exceptions.TimeoutError, exceptions.ClusterDownError)


class Topology:
    """One primary, which has all keys."""

    #: Whether there may be several primaries, of which one may be away while others serve.
    is_cluster = False

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        #: The connections for all keys; None: there may be several primaries.
        self.only_pool: Pool | None = pool

    def pool_for(self, _key: str, _deadline: Deadline | None = None) -> Pool:
        """The connections to the primary of a key. A cluster may have to ask its nodes.

        Raises:
            redis-py's errors, RedisUnavailable
        """
        return self._pool

    def pool_at(self, _address: Address | None) -> Pool:
        """The connections to a primary of the cluster; None: to any."""
        return self._pool

    def known_pool(self, _key: str) -> Pool | None:
        """As `pool_for`, as far as that is known without asking."""
        return self._pool

    def pools(self) -> dict[str, Pool]:
        """Those of all primaries, by their addresses; "" is the only one."""
        return {"": self._pool}

    def primary_of(self, _key: str) -> Address | None:
        """The primary of a cluster that has a key, as far as that is known."""
        return None

    def address_of(self, _key: str) -> Address | None:
        """The server that has a key, as far as that is known. None also where it is always the same."""
        return self._pool.address

    def replicas_of(self, _key: str) -> int:
        """How many replicas a cluster has for the primary of a key."""
        return 0  # a server says that itself

    def redirected(self, _key: str, error: Any, _deadline: Deadline | None) -> Pool:
        """Where a call is to go that was answered with MOVED or ASK."""
        raise RedisRefused(f"the server is part of a cluster ({error} was its answer); use redis+cluster://")

    def follow(self) -> None:
        """Has sentinels asked, for those who use connections of their own. It does not block."""
        self._pool.follow()

    def find_again(self, key: str) -> None:
        """Finds out which primary has the keys, as what is known is wrong. It blocks."""
        raise RedisRefused(f"the server of {key} is part of a cluster; use redis+cluster://")

    def failed(self, pool: Pool, error: Exception, deadline: Deadline | None) -> None:
        """Notes that a primary did not answer, or does not serve: another one may have its keys."""

    def answered(self, pool: Pool) -> None:
        """Notes that a primary has answered."""

    @property
    def is_partial(self) -> bool:
        """Whether a primary does not answer or serve: what others answer says nothing about it."""
        return False

    @property
    def is_known(self) -> bool:
        """Whether a node of a cluster has said which primary has which keys: the URL is right."""
        return False

    def started_at(self) -> float:
        """When the youngest of the servers was started, monotonic."""
        return self._pool.started_at

    def reset(self) -> None:
        """Forgets all connections: after a fork they are the parent's."""
        self._pool.reset()

    def close(self) -> None:
        """Closes the connections that nobody uses."""
        self._pool.close()
