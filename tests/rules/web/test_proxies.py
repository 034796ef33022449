"""Behind a proxy that is trusted: where a request comes from, and who the proxy says it is."""

import logging
from typing import Any

import pytest
from starlette.exceptions import HTTPException
from starlette.testclient import TestClient

import lowq
import lowq_web
from lowq_web import proxies
from lowq_web.proxies import TrustedProxies, UserHeader
from tests.rows import case
from tests.rules.web.conftest import OWN, Open, dashboard

PROXY = "10.0.0.9"


def scope(client: str | None, *headers: tuple[str, str]) -> dict[str, Any]:
    raw = [(name.lower().encode(), value.encode("utf-8")) for name, value in headers]
    return {"type": "http", "client": None if client is None else (client, 5), "headers": raw}


class TestAddress:
    """Where a request comes from."""

    def test_it_is_what_trusted_proxies_have_added(self) -> None:
        rows: list[tuple[str | None, str, str]] = [
            ("192.0.2.1", "198.51.100.1", "192.0.2.1"),  # anybody may send the header
            (PROXY, "", PROXY),
            (PROXY, "6.6.6.6, 198.51.100.1", "198.51.100.1"),  # the first was sent by the client
            (PROXY, "198.51.100.1, 10.0.0.7, 10.0.0.8", "198.51.100.1"),
            (PROXY, "198.51.100.1, <script>, 10.0.0.8", "10.0.0.8"),
            (PROXY, "198.51.100.1:4711", "198.51.100.1"),
            (PROXY, "[2001:db8::1]:4711", "2001:db8::1"),
            (PROXY, ",,,", PROXY),
            (PROXY, "x" * 100_000 + ",198.51.100.1", "198.51.100.1"),
            ("::ffff:10.0.0.9", "198.51.100.1", "198.51.100.1"),
            (None, "198.51.100.1", ""),
        ]  # fmt: skip
        for client, chain, found in rows:
            with case(client, chain, found):
                trusted = TrustedProxies(["10.0.0.0/24", "2001:db8::77"])
                assert trusted.client_address(scope(client, ("X-Forwarded-For", chain))) == found

    def test_without_a_trusted_proxy_no_header_is_believed(self) -> None:
        assert TrustedProxies().client_address(scope("127.0.0.1", ("X-Forwarded-For", "6.6.6.6"))) == "127.0.0.1"
        headers = (("X-Forwarded-For", "6.6.6.6"), ("X-Forwarded-For", "198.51.100.1"))
        assert TrustedProxies([PROXY]).client_address(scope(PROXY, *headers)) == "198.51.100.1", "one chain"
        for network in ["", "proxy.example.com", "10.0.0.0/33", "10.0.0.7/8", "::/0"]:
            with case(network), pytest.raises(lowq.ConfigError, match="--trusted-proxy"):
                TrustedProxies([network])

    @pytest.mark.usefixtures("long_pauses")
    def test_guesses_are_counted_by_the_real_address(self, browse: Open) -> None:
        users: Any = {"ann": ("s3cret", "admin")}
        options = {"auth": lowq_web.BasicAuth(users), "trusted_proxies": [PROXY]}
        client = through(browse("https://dash.example.com", **options))
        guesser, ann = {"x-forwarded-for": "198.51.100.1"}, {"x-forwarded-for": "198.51.100.2"}
        assert client.get("/", auth=("ann", "wrong"), headers=guesser).status_code == 401
        assert client.get("/", auth=("ann", "wrong"), headers=guesser).status_code == 429
        assert client.get("/", auth=("ann", "s3cret"), headers=ann).status_code == 200


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
                app.register("Orders", 1)
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
        app.register("Orders", 1)
        for headers in ({"x-forwarded-user": "ann"}, {}, {"x-forwarded-for": PROXY}):
            with case(headers):
                caplog.clear()
                client = through(browse("https://dash.example.com", **SSO), "198.51.100.7")
                assert client.get("/", headers=headers).status_code == 403
                refused = client.post("/queues/Orders/pause", headers={**OWN, **headers})
                assert (refused.status_code, "--trusted-proxy" in refused.text) == (403, True)
                assert not app.queue("Orders").stats().paused
                (line,) = [record for record in caplog.records if record.name == "lowq_web.proxies"]  # one for both
                assert (line.levelno, "198.51.100.7" in line.getMessage()) == (logging.WARNING, True)
                assert ("X-Forwarded-User" in line.getMessage()) is ("x-forwarded-user" in headers)
                assert client.get("/healthz").status_code == 200

    def test_a_stranger_is_logged_once_a_minute_and_so_many_are_remembered(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(proxies, "_REMEMBERED", 2)
        now = [0.0]
        header = UserHeader("X-Forwarded-User", TrustedProxies([PROXY]), clock=lambda: now[0])
        # Of three the first is forgotten when the last comes.
        for number, later, logged in ((0, 0, 1), (1, 0, 2), (2, 0, 3), (2, 59, 3), (0, 0, 4), (0, 60, 5)):
            with case(number, later):
                now[0] += later
                with pytest.raises(HTTPException):
                    header.named(scope(f"192.0.2.{number}", ("X-Forwarded-User", "ann")))
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
    monkeypatch.setenv("LOWQ_WEB_PASSWORD", "s3cret")
    with pytest.raises(lowq.ConfigError, match="LOWQ_WEB_"):
        lowq_web.create_app(app, **SSO)
