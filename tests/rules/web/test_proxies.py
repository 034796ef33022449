"""Behind a proxy that is trusted: where a request comes from, and who the proxy says it is."""

import asyncio
import logging
from typing import Any

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.testclient import TestClient

import lowq
import lowq_web
from lowq_web.auth import UserHeader, checked_networks
from tests.rows import case
from tests.rules.web.conftest import OWN, Open, dashboard

PROXY = "10.0.0.9"


class TestAddress:
    """Where a request comes from, as the audit log says."""

    def test_it_is_what_trusted_proxies_have_added(self) -> None:
        proxies = ["10.0.0.0/24", "2001:db8::77"]
        rows: list[tuple[str, list[str], list[str], str]] = [
            ("192.0.2.1", ["198.51.100.1"], proxies, "192.0.2.1"),  # anybody may send the header
            ("127.0.0.1", ["198.51.100.1"], [], "127.0.0.1"),
            (PROXY, [""], proxies, PROXY),
            (PROXY, ["6.6.6.6, 198.51.100.1"], proxies, "198.51.100.1"),  # the first was sent by the client
            (PROXY, ["6.6.6.6", "198.51.100.1"], proxies, "198.51.100.1"),  # one chain
            (PROXY, ["198.51.100.1, 10.0.0.7, 10.0.0.8"], proxies, "198.51.100.1"),
            (PROXY, ["198.51.100.1:4711"], proxies, "198.51.100.1"),
            (PROXY, ["[2001:db8::1]:4711"], proxies, "2001:db8::1"),
            (PROXY, [",,,"], proxies, PROXY),
            (PROXY, ["fe80::1%" + "x" * 60_000], proxies, "fe80::1%" + "x" * 92),
            ("::ffff:10.0.0.9", ["198.51.100.1"], proxies, "198.51.100.1"),
            # IPv4 addresses that IPv6 carries: of proxies, and of the client.
            (PROXY, ["198.51.100.1, ::ffff:10.0.0.7, [::ffff:a00:8]:80"], proxies, "198.51.100.1"),
            (PROXY, ["::ffff:198.51.100.1"], proxies, "198.51.100.1"),
            (PROXY, ["198.51.100.1, ::ffff:10.0.1.7"], proxies, "10.0.1.7"),  # of no proxy
            # What is no address: the proxy's own.
            (PROXY, ["bogus"], proxies, PROXY),
            (PROXY, ["198.51.100.1, unknown, 10.0.0.7"], proxies, PROXY),
            (PROXY, ["x" * 60_000], proxies, PROXY),
            (PROXY, ["10.0.0.7%x"], proxies, PROXY),
            ("198.51.100.9", ["bogus"], proxies, "198.51.100.9"),
        ]  # fmt: skip
        for peer, chains, trusted, found in rows:
            with (
                case(peer, chains),
                dashboard("http://127.0.0.1", trusted_proxies=trusted, no_auth=True) as (app, direct),
            ):
                app.registrations.enter("Orders", 1)
                headers = [*OWN.items(), *(("x-forwarded-for", chain) for chain in chains)]
                assert through(direct, peer).post("/queues/Orders/pause", headers=headers).status_code == 303
                assert [entry.address for entry in app.audit()] == [found]

    def test_what_is_no_network_of_proxies_is_refused(self) -> None:
        for network in ["", "proxy.example.com", "10.0.0.0/33", "10.0.0.7/8", "::/0"]:
            with case(network), pytest.raises(lowq.ConfigError, match="--trusted-proxy"):
                checked_networks([network])

    def test_the_cookie_is_for_tls_alone_where_a_trusted_proxy_speaks_it(self, browse: Open) -> None:
        options: dict[str, Any] = {"auth": lambda _request: lowq_web.User("ann"), "trusted_proxies": [PROXY]}
        client = browse("http://dash.example.com", **options)
        for peer, proto, is_secure in ((PROXY, "https", True), (PROXY, "http", False), ("192.0.2.1", "https", False)):
            with case(peer, proto):
                answer = through(client, peer).get("/", headers={"x-forwarded-proto": proto})
                assert ("Secure" in answer.headers["set-cookie"]) is is_secure


def through(client: TestClient, address: str = PROXY) -> TestClient:
    """The same application, for connections from this address."""
    return TestClient(client.app, base_url=str(client.base_url), follow_redirects=False, client=(address, 5))


SSO: dict[str, Any] = {
    "auth_header": "X-Forwarded-User", "admins": ["ann", "@ops"], "trusted_proxies": ["10.0.0.0/24"]
}  # fmt: skip


class TestUserHeader:
    @pytest.fixture
    def client(self, browse: Open) -> TestClient:
        return through(browse("https://dash.example.com", **SSO))

    def test_who_is_among_the_admins_may_act_and_others_may_look(self) -> None:
        rows: list[tuple[dict[str, str], bool]] = [
            ({"x-forwarded-user": "ann"}, True),
            ({"x-forwarded-user": "bob"}, False),
            ({"x-forwarded-user": "@ops"}, False),  # a name, no group
            ({"x-forwarded-user": "bob", "x-forwarded-groups": "dev, ops"}, True),
            ({"x-forwarded-user": "bob", "x-forwarded-groups": "devops,@ops"}, False),
        ]
        for headers, may_act in rows:
            with case(headers, may_act), dashboard("https://dash.example.com", **SSO) as (app, direct):
                client = through(direct)
                app.registrations.enter("Orders", 1)
                assert client.get("/", headers=headers).status_code == 200
                done = client.post("/queues/Orders/pause", headers={**OWN, **headers})
                assert done.status_code == (303 if may_act else 403)
                assert app.queue("Orders").stats().paused is may_act

    def test_a_request_without_a_user_or_with_two_is_refused(self, client: TestClient) -> None:
        for headers in ({}, {"x-forwarded-user": "  "}, {"x-forwarded-groups": "ops"}):
            answer = client.get("/", headers=headers)
            assert (answer.status_code, "www-authenticate" in answer.headers) == (401, False)
        for name in ("x-forwarded-user", "x-forwarded-groups"):
            twice = [("x-forwarded-user", "bob"), (name, "ann"), (name, "ops")]
            answer = client.get("/", headers=twice)
            assert (answer.status_code, "replace" in answer.text) == (400, True)
        assert client.get("/", headers={"x-forwarded-user": "ann" * 100}).status_code == 400

    def test_from_elsewhere_nothing_is_believed_and_that_is_logged(
        self, browse: Open, app: lowq.Lowq, caplog: pytest.LogCaptureFixture
    ) -> None:
        app.registrations.enter("Orders", 1)
        for headers in ({"x-forwarded-user": "ann"}, {}, {"x-forwarded-for": PROXY}):
            with case(headers):
                caplog.clear()
                client = through(browse("https://dash.example.com", **SSO), "198.51.100.7")
                assert client.get("/", headers=headers).status_code == 403
                refused = client.post("/queues/Orders/pause", headers={**OWN, **headers})
                assert (refused.status_code, "--trusted-proxy" in refused.text) == (403, True)
                assert not app.queue("Orders").stats().paused
                (line,) = [record for record in caplog.records if record.name == "lowq_web.auth"]  # one for both
                assert (line.levelno, "198.51.100.7" in line.getMessage()) == (logging.WARNING, True)
                assert ("X-Forwarded-User" in line.getMessage()) is ("x-forwarded-user" in headers)
                assert client.get("/healthz").status_code == 200

    def test_strangers_are_logged_once_a_minute(self, caplog: pytest.LogCaptureFixture) -> None:
        now = [0.0]
        header = UserHeader("X-Forwarded-User", checked_networks([PROXY]), clock=lambda: now[0])
        for number, later, logged in ((0, 0, 1), (1, 0, 1), (0, 59, 1), (2, 1, 2)):
            with case(number, later):
                now[0] += later
                scope = {"type": "http", "lowq_peer": f"192.0.2.{number}", "headers": [(b"x-forwarded-user", b"ann")]}
                with pytest.raises(HTTPException):
                    asyncio.run(header(Request(scope)))
                assert len(caplog.records) == logged

    def test_hostile_names_are_only_text(self, client: TestClient) -> None:
        for name in (b"<script>alert(1)</script>", "\xe4nn".encode(), b"a\tb", b"\xff\xfe"):
            with case(name):
                answer = client.get("/", headers=[(b"x-forwarded-user", name)])
                assert (answer.status_code, "<script>alert" in answer.text) == (200, False)

    def test_another_header_may_have_the_groups(self, browse: Open) -> None:
        client = through(
            browse(auth_header="Remote-User", groups_header="Remote-Groups", admins=["@ops"], trusted_proxies=[PROXY])
        )
        for header, status in (("remote-groups", 404), ("x-forwarded-groups", 403)):
            headers = {**OWN, "remote-user": "bob", header: "ops"}
            assert client.post("/queues/None/pause", headers=headers).status_code == status


def test_what_makes_no_sense_is_refused_at_the_start(app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[tuple[dict[str, Any], str]] = [
        ({"auth_header": "X-Forwarded-User"}, "--trusted-proxy"), ({"admins": ["ann"]}, "--auth-header"),
        ({"groups_header": "X-Groups"}, "--auth-header"), ({**SSO, "no_auth": True}, "--no-auth"),
        ({**SSO, "auth": lambda _request: None}, "auth="), ({**SSO, "auth_header": "X User"}, "--auth-header"),
        ({**SSO, "groups_header": "x-forwarded-user"}, "--groups-header"), ({**SSO, "admins": ["ann", ""]}, "--admins"),
        ({**SSO, "admins": ["@"]}, "--admins"), ({**SSO, "trusted_proxies": ["0.0.0.0/0"]}, "--trusted-proxy"),
    ]  # fmt: skip
    for options, why in rows:
        with case(options, why), pytest.raises(lowq.ConfigError, match=why):
            lowq_web.create_app(app, **options)
    monkeypatch.setenv("LOWQ_WEB_USER", "ann")
    monkeypatch.setenv("LOWQ_WEB_PASSWORD", "s3cret of ann")
    with pytest.raises(lowq.ConfigError, match="LOWQ_WEB_"):
        lowq_web.create_app(app, **SSO)
