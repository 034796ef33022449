"""Who may see what, and who may act."""

import re
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse
from starlette.routing import Mount
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

import lowq
import lowq_web
from lowq.settings import Config
from lowq_web.hosts import host_refusal, is_loopback
from lowq_web.security import TOKEN, cross_site
from tests.rows import case
from tests.rules.web.conftest import ANN, OWN, USERS, Open
from tests.rules.web.served import get, served
from tests.waiting import PATIENCE

GETS = ("/", "/nodes", "/audit", "/tasks", "/search?id=1", "/metrics", "/live", "/api/v1/stats", "/static/app.css")
POSTS = (
    "/queues/Orders/pause", "/queues/Orders/act", "/nodes/command", "/tasks/x/cancel", "/api/v1/queues/Orders/pause",
    "/api/v1/queues/Orders/actions", "/api/v1/nodes/command", "/api/v1/tasks/x/cancel", "/queues/Orders/reshard",
    "/api/v1/queues/Orders/reshard", "/schedules/act", "/api/v1/schedules/run-now", "/no/such/page",
)  # fmt: skip


def scope(**more: Any) -> dict[str, Any]:
    headers = {"host": "127.0.0.1:8080", **more.pop("headers", {})}
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http", "server": ("127.0.0.1", 8080), "client": ("127.0.0.1", 5), "headers": raw, **more}


class TestWithoutAuthentication:
    """A proxy, and a site that points its name here, are told by the name that they ask for."""

    def test_this_machine_may_see_it(self) -> None:
        for local in (
            scope(), scope(headers={"host": "[::1]:8080"}, server=("::1", 8080), client=("::1", 5)),
            scope(server=("::ffff:127.0.0.1", 8080)), scope(server=("/run/lowq.sock", None), client=None),
            scope(headers={"host": "localhost.:8080"}),
            scope(headers={"referer": "https://wiki.example.com/", "sec-fetch-site": "cross-site"}),  # a link
        ):  # fmt: skip
            assert host_refusal(local, (), open_to_all=False) is None, local

    def test_others_may_not_and_the_answer_says_why(self) -> None:
        names = [
            "evil.example.com",
            "127.0.0.1%evil.example.com",
            "[",
            "x@127.0.0.1",
            "192.0.2.7",
            "localhost.evil",
            "",
        ]
        rows: list[tuple[dict[str, Any], str]] = [
            (scope(server=("192.0.2.7", 8080)), "192.0.2.7"), (scope(server=None), "does not say"),
            (scope(server=("dash.example.com", 80)), "dash.example.com"),
            (scope(client=("198.51.100.9", 5)), "198.51.100.9"),
            *((scope(headers={"host": name}), repr(name)) for name in names),
            # A proxy that names this machine instead, as nginx does unless told otherwise.
            (scope(http_version="1.0"), "proxy"), (scope(headers={"x-forwarded-for": "198.51.100.9"}), "proxy"),
            (scope(server=("/run/lowq.sock", None), client=None, headers={"via": "1.1 front"}), "proxy"),
        ]  # fmt: skip
        for other, why in rows:
            with case(other, why):
                assert why in (host_refusal(other, (), open_to_all=False) or "")

    def test_a_proxy_that_adds_nothing_opens_it_to_nobody(self, browse: Open, app: lowq.Lowq) -> None:
        """nginx with proxy_http_version 1.1, an empty Connection, and Host as the browser has sent it."""
        app.registrations.enter("Orders", 1)
        headers: list[dict[str, str]] = [{}, {"x-scheme": "https"}, {"x-azure-clientip": "6.6.6.6"}]
        for more in headers:
            with case(more):
                client = browse("http://dash.example.com")
                assert client.get("/", headers=more).status_code == 403
                assert client.post("/api/v1/queues/Orders/pause", headers=more, json={}).status_code == 403
        assert not app.queue("Orders").stats().paused

    def test_names_that_are_listed_are_answered(self, browse: Open, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LOWQ_WEB_HOSTS", "dash.example.com, *.ops.example.com")
        for name, status in (
            ("Dash.example.com.:80", 200), ("lowq.ops.example.com", 200), ("ops.example.com", 403), ("localhost", 200),
            ("example.com", 403), ("xdash.example.com", 403), ("lowq.internal", 403),
        ):  # fmt: skip
            with case(name):
                assert browse().get("/", headers={"host": name}).status_code == status
        proxied = {"host": "dash.example.com", "x-forwarded-for": "198.51.100.9"}
        assert browse().get("/", headers=proxied).status_code == 200
        assert browse("http://lowq.internal", hosts=["LOWQ.internal"]).get("/").status_code == 200
        assert browse("http://any.example.com", hosts=["*"]).get("/").status_code == 200
        for name in ("", "https://x", "x:80", "*x", "a/b", "*.", "*..", "[*]"):
            with case(name), pytest.raises(lowq.ConfigError, match="LOWQ_WEB_HOSTS"):
                browse(hosts=[name])

    def test_no_auth_answers_addresses_and_no_name_that_is_not_listed(self, browse: Open, app: lowq.Lowq) -> None:
        """A site that points its own name here would have a browser within the network act for it."""
        app.registrations.enter("Orders", 1)
        for address, options, status in (
            ("http://192.0.2.7:8080", {}, 200), ("http://[2001:db8::1]", {}, 200), ("http://localhost", {}, 200),
            ("http://evil.example.com", {}, 403), ("http://192.0.2.7.evil.example.com:8080", {}, 403),
            ("http://dash.example.com", {"hosts": ["dash.example.com"]}, 200),
        ):  # fmt: skip
            with case(address, options):
                client = browse(address, no_auth=True, **options)
                assert client.get("/").status_code == status
                acted = client.post("/queues/Orders/pause", headers={**OWN, "origin": address})
                assert acted.status_code == (303 if status == 200 else 403)
                app.queue("Orders").resume()
        refused = browse("http://evil.example.com", no_auth=True).get("/").text
        assert "LOWQ_WEB_HOSTS" in refused

    def test_a_public_address_answers_403_with_the_reason_however_it_was_started(self, browse: Open) -> None:
        client = browse("http://192.0.2.7:8080")
        for path in GETS:
            answer = client.get(path)
            assert answer.status_code == 403, path
            for words in ("192.0.2.7", "LOWQ_WEB_USER", "LOWQ_WEB_HOSTS", "--no-auth"):
                assert words in answer.text
        assert client.post("/queues/Orders/pause").status_code == 403
        assert client.get("/healthz").json() == {"status": "ok"}

    def test_names_of_this_machine_and_others(self) -> None:
        ours = ["localhost", "127.1.2.3", "[::1]", "x.localhost", "::ffff:127.0.0.1"]
        others = ["", "0.0.0.0", "::", "localhost.example.com", "127.0.0.1x", "2130706433"]
        assert [name for name in (*ours, *others) if is_loopback(name)] == ours


def test_with_authentication_everything_but_health_asks_for_it(browse: Open) -> None:
    client = browse("https://dash.example.com", auth=lowq_web.BasicAuth(USERS))
    for path in GETS:
        answer = client.get(path)
        assert (answer.status_code, answer.headers["www-authenticate"][:6]) == (401, "Basic "), path
    assert client.get("/healthz").status_code == 200


def test_every_variable_of_ours_is_known_as_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sources = "".join(path.read_text() for path in Path(lowq_web.__path__[0]).glob("*.py"))
    for name in (*re.findall(r"LOWQ_WEB_[A-Z_]*[A-Z]\b", sources), "LOWQ_WEB_NONE"):
        monkeypatch.setenv(name, "x")
    Config().freeze()
    (warning,) = caplog.records
    assert "LOWQ_WEB_NONE" in warning.getMessage()


class TestCallable:
    def test_the_host_application_says_who_asks(self, browse: Open) -> None:
        async def who(request: Request) -> Any:
            return lowq_web.User("carol", "read") if "good" in request.headers else "carol"

        client = browse("https://app.example.com", auth=who)
        refused = client.get("/")
        assert (refused.status_code, "www-authenticate" in refused.headers) == (401, False)
        assert "carol" in client.get("/", headers={"good": "1"}).text
        assert browse("https://app.example.com", auth=lambda _request: None).get("/").status_code == 401

    def test_it_may_answer_itself(self, browse: Open) -> None:
        def raises(request: Request) -> Any:
            raise HTTPException(303, "log in first", headers={"location": "/login"})

        for auth in (raises, lambda _request: RedirectResponse("/login", 303)):
            answer = browse("https://app.example.com", auth=auth).get("/")
            assert (answer.status_code, answer.headers["location"]) == (303, "/login")
            assert "content-security-policy" in answer.headers

    def test_one_that_takes_its_time_keeps_nobody_else(self, app: lowq.Lowq) -> None:
        asked, over = threading.Event(), threading.Event()

        def slow(request: Request) -> lowq_web.User:
            asked.set()
            assert over.wait(PATIENCE)
            return lowq_web.User("ann")

        with served(lowq_web.create_app(app, auth=slow)) as address, ThreadPoolExecutor() as pool:
            waiting = pool.submit(get, address, "/")
            assert asked.wait(PATIENCE)
            try:
                assert get(address, "/healthz", timeout=PATIENCE)[0] == 200
                assert not waiting.done()
            finally:
                over.set()
            assert waiting.result()[0] == 200

    def test_one_that_fails_is_not_shown(self, browse: Open, caplog: pytest.LogCaptureFixture) -> None:
        def broken(request: Request) -> Any:
            raise RuntimeError("password of the database: hunter2")

        answer = browse("https://app.example.com", auth=broken).get("/api/v1/stats")
        assert (answer.status_code, list(answer.json())) == (500, ["error"])
        assert "hunter2" not in answer.text
        assert "hunter2" in caplog.text
        assert "content-security-policy" in answer.headers


def test_readers_may_not_act_and_are_shown_no_button(browse: Open, app: lowq.Lowq) -> None:
    app.queue("Orders", 3).push({"id": 1, "delay": 60})
    client = browse(auth=lambda _request: lowq_web.User("bob", "read"))
    methods = [("POST", path) for path in POSTS] + [(method, "/") for method in ("PUT", "PATCH", "DELETE")]
    for (method, path), headers in product(methods, (OWN, {"content-type": "application/json"})):
        with case(method, path, headers):
            answer = client.request(method, path, headers=headers, content="{}")
            assert (answer.status_code, "bob may look, not act" in answer.text) == (403, True)
    assert not app.queue("Orders").stats().paused
    for path in ("/", "/queues/Orders", "/queues/Orders/job?id=1", "/nodes", "/queues/Orders/reshard", "/schedules"):
        page = client.get(path)
        assert (page.status_code, 'method="post"' in page.text) == (200, False), path


def as_role(role: Any, _request: Request) -> lowq_web.User:
    return lowq_web.User("ann", role)


def test_where_redis_is_is_said_to_those_who_may_act_alone(caplog: pytest.LogCaptureFixture) -> None:
    nobody = socket.socket()  # bound, so that nobody else has the port, and it does not listen
    nobody.bind(("127.0.0.1", 0))
    port = nobody.getsockname()[1]
    away = lowq.Lowq(redis_url=f"redis://127.0.0.1:{port}/0")
    for role, is_told in (("read", False), ("admin", True)):
        application = lowq_web.create_app(away, auth=partial(as_role, role))
        client = TestClient(application, base_url="https://dash.example.com")
        for path in ("/", "/queues/Orders", "/queues/Orders?match=*", "/jobs", "/api/v1/stats", "/metrics"):
            with case(role, path):
                answer = client.get(path)
                assert (answer.status_code, str(port) in answer.text) == (503, is_told)
                assert "Redis" in answer.text
    assert str(port) in caplog.text
    away.close()
    nobody.close()


class TestCrossSite:
    def test_posts_of_other_sites_are_refused(self, browse: Open, app: lowq.Lowq) -> None:
        all_headers: list[Any] = [
            {"sec-fetch-site": "cross-site", "origin": "http://127.0.0.1:8080"},
            {"sec-fetch-site": "same-site"},
            {"origin": "https://evil.example.com"},
            {"origin": "null"},
            {"origin": "http://127.0.0.1:9999"},
            {"origin": "http://["},
            {},  # no word of the browser, and no token
        ]
        app.queue("Orders", 3).push({"id": 1})
        client = browse(origins=["http://127.0.0.1:8080"])
        for headers, path in product(all_headers, POSTS):
            with case(headers, path):
                form = {**headers, "content-type": "application/x-www-form-urlencoded"}
                assert client.post(path, headers=form, content="do=delete+all&sure=1").status_code == 403
        twice = [("sec-fetch-site", "none"), ("sec-fetch-site", "x")]
        assert client.post("/queues/Orders/pause", headers=twice).status_code == 403
        assert cross_site(Headers({"origin": "null"}), "http"), "a host that is not named is no site"
        stats = app.queue("Orders").stats()
        assert (stats.paused, stats.length) == (False, 1)

    def test_behind_a_proxy_that_changes_the_host(
        self, browse: Open, app: lowq.Lowq, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Over plain HTTP a browser sends Origin only, and nginx names itself what it asks for."""
        app.queue("Orders", 3).push({"id": 1})

        def post(origin: str, **options: Any) -> Any:
            client = browse("http://backend", auth=lowq_web.BasicAuth(USERS), **options)
            headers = {"origin": origin, "host": "backend"}
            return client.post("/queues/Orders/pause", headers=headers, auth=ANN)

        refused = post("http://dash.example.com:8000")
        assert refused.status_code == 403
        assert "LOWQ_WEB_ORIGINS=http://dash.example.com:8000" in refused.text
        monkeypatch.setenv("LOWQ_WEB_ORIGINS", "https://other.example.com, HTTP://Dash.example.com:8000/")
        for origin, status in (
            ("http://dash.example.com:8000", 303), ("http://dash.example.com", 403), ("http://evil.example.com", 403),
        ):  # fmt: skip
            assert post(origin).status_code == status, origin
        assert app.queue("Orders").stats().paused
        assert "LOWQ_WEB_ORIGINS=" not in post("null").text
        assert post("http://dash.example.com", origins=["http://dash.example.com:80"]).status_code == 303

    def test_what_is_no_origin_is_refused(self, browse: Open) -> None:
        for origin in ["dash.example.com", "https://", "https://x/y", "ftp://x", "*"]:
            with case(origin), pytest.raises(lowq.ConfigError, match="LOWQ_WEB_ORIGINS"):
                browse(origins=[origin])

    def test_pages_elsewhere_may_link_here_and_not_have_us_work(self, browse: Open) -> None:
        elsewhere = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"}
        for mode, dest in (("no-cors", "image"), ("navigate", "iframe"), ("navigate", "object"), ("navigate", None)):
            headers = {**elsewhere, "sec-fetch-mode": mode, "sec-fetch-dest": dest}
            for path in ("/", "/queues/Orders?match=*", "/api/v1/stats", "/live", "/static/app.js"):
                with case(mode, dest, path):
                    given = {name: value for name, value in headers.items() if value is not None}
                    assert browse().get(path, headers=given).status_code == 403
        link = {**elsewhere, "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
        assert browse().get("/", headers=link).status_code == 200

    def test_no_route_takes_other_methods(self, browse: Open) -> None:
        client = browse()
        for method in ("DELETE", "PUT", "OPTIONS"):
            answer = client.request(method, "/api/v1/stats", headers={"origin": "https://evil.example.com"})
            assert answer.status_code in (403, 405)
            assert not [name for name in answer.headers if name.startswith("access-control-")]

    def test_posts_of_our_own_pages_are_not(self, browse: Open, app: lowq.Lowq) -> None:
        app.queue("Orders", 3).push({"id": 1})
        for headers, verb in ((OWN, "pause"), ({"origin": "http://127.0.0.1:8080"}, "resume")):
            assert browse().post(f"/queues/Orders/{verb}", headers=headers).status_code == 303
            assert app.queue("Orders").stats().paused is (verb == "pause")

    def test_an_old_browser_shows_the_token_of_its_page(self, browse: Open, app: lowq.Lowq) -> None:
        app.queue("Orders", 3).push({"id": 1})
        client = browse()
        found = re.search(rf'name="{TOKEN}" value="([^"]+)"', client.get("/queues/Orders").text)
        assert found
        assert client.post("/queues/Orders/pause", data={TOKEN: "g" * 32}).status_code == 403
        assert client.post("/queues/Orders/pause", data={TOKEN: found[1]}).status_code == 303
        client.cookies.clear()
        assert client.post("/queues/Orders/resume", data={TOKEN: found[1]}).status_code == 403

    def test_json_needs_no_token_as_no_page_may_send_it_elsewhere(self, browse: Open, app: lowq.Lowq) -> None:
        app.queue("Orders", 3).push({"id": 1})
        path, json_type = "/api/v1/queues/Orders/pause", {"content-type": "application/json"}
        assert browse().post(path, headers=json_type).json() == {"paused": True, "changed": True}
        evil = {**json_type, "origin": "https://evil.example.com"}
        assert browse().post(path, headers=evil).status_code == 403
        refused = browse().post(path)
        assert (refused.status_code, "application/json" in refused.json()["error"]) == (403, True), "and learns why"


class TestHeaders:
    def test_every_answer_forbids_frames_foreign_content_and_guesses(self, browse: Open) -> None:
        here, there = "http://127.0.0.1:8080", "http://192.0.2.7"
        rows = [(here, path) for path in ("/", "/healthz", "/api/v1/stats", "/static/app.js", "/no/such/page")]
        for address, path in (*rows, (there, "/")):
            with case(address, path):
                headers = browse(address).get(path).headers
                policy = set(re.split(r"\s*;\s*", headers["content-security-policy"]))
                assert policy >= {
                    "default-src 'none'", "script-src 'self'", "style-src 'self'", "frame-ancestors 'none'",
                    "base-uri 'none'", "form-action 'self'",
                }  # fmt: skip
                assert (headers["x-frame-options"], headers["x-content-type-options"]) == ("DENY", "nosniff")

    def test_the_cookie_is_a_token_of_ours_and_of_no_use_to_scripts_and_other_sites(self, browse: Open) -> None:
        planted = browse("https://127.0.0.1").get("/", headers={"cookie": f"{TOKEN}=x"}).headers["set-cookie"]
        assert len(re.findall(rf"{TOKEN}=([\w-]{{32}});", planted)) == 1
        assert all(word in planted for word in ("HttpOnly", "SameSite=Strict", "Secure"))
        ours = browse().get("/", headers={"cookie": f'a="b; c"; {TOKEN}={"t" * 32}; d=e'})
        assert "set-cookie" not in ours.headers

    def test_of_cookies_nothing_but_our_token_is_parsed(self, browse: Open, monkeypatch: pytest.MonkeyPatch) -> None:
        # The parser of the standard library takes minutes for some.
        monkeypatch.setattr("starlette.requests.cookie_parser", pytest.fail)
        monkeypatch.setattr("http.cookies._unquote", pytest.fail)
        client = browse("http://192.0.2.7")
        assert client.get("/", headers={"cookie": f'{TOKEN}="' + "\\" * 60_000 + '"'}).status_code == 403

    def test_pages_name_static_files_in_a_version_that_may_be_kept_for_ever(self, browse: Open) -> None:
        client = browse()
        page = client.get("/")
        assert page.headers["cache-control"] == "no-store"
        inline = re.search(r"<style|\sstyle=|\son\w+=|javascript:|<script(?![^>]* src=)", page.text)
        assert inline is None
        named = re.findall(r'(?:href|src)="(/static/[^"]+)"', page.text)
        assert {"/static/app.css", "/static/app.js", "/static/live.js"} <= {link.partition("?")[0] for link in named}
        for link in named:
            answer, path = client.get(link), link.partition("?")[0]
            assert answer.headers["cache-control"] == "private, max-age=31536000, immutable"
            stale = client.get(f"{path}?v=another")
            assert (stale.headers["cache-control"], stale.content) == ("no-cache", answer.content)
            again = client.get(path, headers={"if-none-match": stale.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
        for nothing in ("/static/nothing.js", "/static/..%2fapp.py"):
            assert client.get(nothing).status_code == 404

    def test_a_body_without_end_is_not_read_to_its_end(self, browse: Open) -> None:
        def endless() -> Iterator[bytes]:
            while True:
                yield b"x" * 100_000

        assert browse().post("/queues/Orders/act", headers=OWN, content=islice(endless(), 100)).status_code == 413

    def test_a_websocket_is_refused(self, browse: Open) -> None:
        with pytest.raises(WebSocketDisconnect), browse().websocket_connect("/live"):
            pass

    def test_nobody_is_sent_to_the_host_that_a_request_names(self, browse: Open) -> None:
        client = browse("http://evil.example.com", hosts=["*"])
        for path in ("/api/v1/stats/", "/nodes/", "/static/", "/api/v1/"):
            answer = client.get(path)
            assert (answer.status_code, "location" in answer.headers) == (404, False), path


def test_all_links_stay_below_the_mount(app: lowq.Lowq) -> None:
    app.queue("Orders", 3).push({"id": 1, "delay": 60})
    parent = Starlette(routes=[Mount("/ops/lowq", lowq_web.create_app(app))])
    client = TestClient(parent, base_url="http://127.0.0.1", follow_redirects=False, headers=OWN)
    for path in ("/", "/queues/Orders", "/queues/Orders/job?id=1", "/nodes"):
        answer = client.get(f"/ops/lowq{path}")
        assert answer.status_code == 200, path
        links = re.findall(r'(?:href|src|action)="([^"]+)"', answer.text)
        assert links
        assert all(link.startswith(("/ops/lowq/", "#")) for link in links), path
    assert client.get("/ops/lowq/healthz").status_code == 200
    assert client.get("/ops/lowq/api/v1/stats").json()["total"]["length"] == 1
    answer = client.post("/ops/lowq/queues/Orders/pause")
    assert answer.headers["location"].startswith("/ops/lowq/queues/Orders")
    client.cookies.clear()
    assert "Path=/ops/lowq;" in client.get("/ops/lowq/").headers["set-cookie"]
    assert client.get("/ops/lowq/api/v1/openapi.json").json()["servers"] == [{"url": "/ops/lowq/api/v1"}]
    elsewhere = TestClient(parent, base_url="https://app.example.com")
    assert elsewhere.get("/ops/lowq/").status_code == 403, "the guard is not left outside"
