"""The addresses by which nodes of a cluster name each other."""

import pytest
from redis import exceptions

from lowq.errors import RedisUnavailable
from lowq.store import Client
from lowq.store.endpoints import servers_for


def test_ipv6() -> None:
    servers = servers_for("redis+cluster://user:secret@[::1]:7001", 1, 1.0, 1.0, None)
    connection = servers.pool_at("fe80::2", 7002).connect()
    assert (connection.host, connection.port) == ("fe80::2", 7002)
    assert (connection.username, connection.password) == ("user", "secret")


def test_a_node_that_names_a_port_only_means_its_own_host(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = servers_for("redis+cluster://10.0.0.1:7001", 1, 1.0, 1.0, None)
    ranges = [[0, 16383, [None, 7001, b"id"]]]
    servers._take_ranges(ranges, "10.0.0.1")  # type: ignore[union-attr]
    monkeypatch.setattr(servers, "_look_again", lambda _deadline: None)
    moved = exceptions.MovedError("3999 :7002")
    connection = servers.moved("key", moved.host, moved.port, None).connect()
    assert (connection.host, connection.port) == ("10.0.0.1", 7002)
    assert servers.known_primary("key") == ("10.0.0.1", 7002)


def test_that_a_slot_has_moved_and_no_node_answers_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client("redis+cluster://10.0.0.1:7001", size=1, timeout=1.0)
    servers = client._servers
    servers._take_ranges([[0, 16383, [None, 7001, b"id"]]], "10.0.0.1")  # type: ignore[union-attr]

    def refused(*_args: object) -> None:
        raise exceptions.MovedError("3999 10.0.0.1:7002")

    def nobody(_deadline: object = None) -> None:
        raise exceptions.ConnectionError("nobody answers")

    monkeypatch.setattr(client, "_commands_once", refused)
    monkeypatch.setattr(servers, "refresh", nobody)
    with pytest.raises(RedisUnavailable, match="nobody answers"):
        client.command("GET", "key", key="key")
