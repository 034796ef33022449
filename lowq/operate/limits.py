"""All limits over all nodes, and how far they are used."""

from collections.abc import Iterable
from dataclasses import replace

from lowq.backend import Backend
from lowq.limits import LimitRule, registered_limits
from lowq.operate.explain import LimitState, read_limits
from lowq.operate.nodes import nodes
from lowq.operate.queues import queues


def limits(backend: Backend, *declared: tuple[str, Iterable[LimitRule]]) -> list[LimitState]:
    """The limits of all workers, and those around calls that live nodes have used lately, or that were ``declared``, by
    their names. Each has a key.

    Raises:
        RedisUnavailable, RedisRefused
    """
    found: dict[str, LimitRule] = {}
    of_queues = [(info.name, registered_limits(info.options.get("limit"))) for info in queues(backend)]
    of_nodes = [("", registered_limits(node.limits)) for node in nodes(backend)]
    for name, rules in [*of_queues, *of_nodes, *declared]:
        for rule in rules:
            found.setdefault(rule.name(name), rule if rule.key else replace(rule, key=name))
    rules = [found[name] for name in sorted(found)]
    options = {"limit": [rule.shown() for rule in rules]}
    return read_limits(backend.client, backend.config.namespace, "", options)
