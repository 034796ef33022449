"""The dashboard in the admin: who sees what and may do what, under WSGI and ASGI; links from objects to their jobs."""

import io
import re
import threading
from html import unescape
from typing import Any
from unittest import mock
from urllib.parse import urlencode, urlsplit

from django.contrib.auth import get_user_model
from django.contrib.auth.models import Permission
from django.core.management import call_command
from django.test import AsyncClient, Client, RequestFactory, override_settings

import lowq
from lowq.contrib.django import dashboard
from lowq.contrib.django.admin import LowqJobLink
from lowq.contrib.django.test import TestCase
from lowq.errors import ConfigError
from tests.rules.contrib.django_site.models import Order
from tests.rules.contrib.django_site.workers import OrderSync

ROOT = "/admin/lowq/dashboard/"
#: The pages of a project without the admin.
urlpatterns: list[Any] = []


def user(name: str, *permissions: str, **fields: Any) -> Any:
    """A member of the staff, unless ``fields`` say otherwise, with these permissions of lowq."""
    made: Any = get_user_model().objects.create_user(name, is_staff=fields.pop("is_staff", True), **fields)
    made.user_permissions.set(Permission.objects.filter(content_type__app_label="lowq", codename__in=permissions))
    return made


class DashboardTests(TestCase):
    def setUp(self) -> None:
        OrderSync.push(42, "paid")

    def client_of(self, who: Any) -> Client:
        client = Client(enforce_csrf_checks=True)
        if who is not None:
            client.force_login(who)
        return client

    def test_staff_may_look_and_act_as_their_permissions_say(self) -> None:
        rows: list[tuple[Any, int, int]] = [
            (None, 302, 302),
            (user("eve", "view", "act", is_staff=False), 302, 302),
            (user("bob"), 403, 403),
            (user("cid", "view"), 200, 403),
            (user("dan", "act"), 200, 200),
            (user("ann", is_superuser=True), 200, 200),
            (user("gil", "view", "act", is_active=False), 302, 302),
        ]
        pause = f"{ROOT}api/v1/queues/OrderSync/pause"
        for who, looks, acts in rows:
            with self.subTest(who):
                client = self.client_of(who)
                for page in ("", "queues/OrderSync", "queues/OrderSync/job?id=42", "live", "static/app.js", "metrics"):
                    self.assertEqual(client.get(ROOT + page).status_code, looks, page)
                answer = client.post(pause, "{}", content_type="application/json")
                self.assertEqual(answer.status_code, acts, answer.content)
                self.assertIs(OrderSync.queue.stats().paused, acts == 200)
                OrderSync.queue.resume()
                if looks != 302:
                    listed = ROOT in client.get("/admin/").content.decode()
                    self.assertIs(listed, looks == 200)
        record = lowq.app.audit()[0]
        self.assertEqual((record.who, record.address, record.action), ("ann", "127.0.0.1", "pause"))

    def test_who_is_not_logged_in_comes_back_to_the_page_after_the_login(self) -> None:
        answer = self.client.get(f"{ROOT}queues/OrderSync?state=dead")
        self.assertRedirects(
            answer, "/admin/login/?next=/admin/lowq/dashboard/queues/OrderSync%3Fstate%3Ddead", target_status_code=200
        )

    def test_forms_of_its_pages_are_taken_and_those_of_other_sites_refused(self) -> None:
        client = self.client_of(user("ann", "act"))
        page = client.get(f"{ROOT}queues/OrderSync").content.decode()
        form = re.search(r'<form[^>]* action="([^"]*/pause)".*?name="lowq_token" value="([^"]+)"', page, re.DOTALL)
        assert form is not None, page
        target, token = unescape(form[1]), form[2]
        self.assertTrue(target.startswith(ROOT))

        def post(token: str, **headers: str) -> Any:
            form = urlencode({"lowq_token": token})
            return client.post(target, form, content_type="application/x-www-form-urlencoded", headers=headers)

        self.assertEqual(post("x" * 32).status_code, 403)
        self.assertEqual(post(token, origin="https://x.org").status_code, 403)
        self.assertFalse(OrderSync.queue.stats().paused)
        answer = post(token)
        self.assertEqual(answer.status_code, 303)
        self.assertTrue(OrderSync.queue.stats().paused)
        self.assertTrue(urlsplit(answer["location"]).path.startswith(ROOT))
        cookie = answer.client.cookies["lowq_token"]
        self.assertEqual((cookie["path"], cookie["samesite"]), (ROOT.rstrip("/"), "Strict"))

    def test_first_requests_that_come_together_start_one_event_loop(self) -> None:
        def loops() -> int:
            return sum(thread.name == "lowq-dashboard" for thread in threading.enumerate())

        def ask() -> None:
            together.wait()
            answers.append(dashboard.answer(RequestFactory().get(ROOT), "", "ann", "read").status_code)

        dashboard._server.cache_clear()
        before, together, answers = loops(), threading.Barrier(4), list[int]()
        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual((answers, loops() - before), ([200] * 4, 1))

    def test_where_threads_are_greenlets_it_runs_no_event_loop_and_says_what_to_do(self) -> None:
        dashboard._server.cache_clear()
        with mock.patch.object(threading, "get_native_id", return_value=7):
            answer = self.client_of(user("ann", "view")).get(ROOT)
        self.assertContains(answer, "start `manage.py lowq web`", status_code=501)

    def test_a_live_page_asks_again_and_no_answer_is_a_stream(self) -> None:
        answer = self.client_of(user("ann", "view")).get(f"{ROOT}live?queue=OrderSync")
        self.assertFalse(answer.streaming)
        self.assertEqual(answer["content-type"], "text/event-stream; charset=utf-8")
        text = answer.content.decode()
        self.assertIn('"OrderSync"', text)
        self.assertRegex(text, r"\Aevent: figures\ndata: .*\n\nretry: \d+\n\n\Z")

    def test_pages_may_not_be_stored_and_their_files_may(self) -> None:
        client = self.client_of(user("ann", "view"))
        page = client.get(ROOT)
        self.assertEqual(page["cache-control"], "no-store")
        self.assertIn("frame-ancestors 'none'", page["content-security-policy"])
        file = re.search(r'src="([^"]*/static/app.js[^"]*)"', page.content.decode())
        assert file is not None
        answer = client.get(file[1])
        self.assertIn("immutable", answer["cache-control"])
        again = client.get(file[1], headers={"if-none-match": answer["etag"]})
        self.assertEqual((again.status_code, again.content), (304, b""))

    def test_what_is_sent_has_the_limit_of_the_dashboard_and_not_of_djangos_forms(self) -> None:
        client = self.client_of(user("ann", "act"))
        for size, status in ((3 * 2**20, 200), (4 * 2**20, 413)):
            document = "{}" + " " * size
            answer = client.post(f"{ROOT}api/v1/queues/OrderSync/pause", document, content_type="application/json")
            self.assertEqual(answer.status_code, status)

    def test_behind_a_proxy_it_is_where_django_says(self) -> None:
        client = self.client_of(user("ann", "act"))
        proxy = {"x-forwarded-host": "shop.example.com", "x-forwarded-proto": "https"}
        with override_settings(
            USE_X_FORWARDED_HOST=True, SECURE_PROXY_SSL_HEADER=("HTTP_X_FORWARDED_PROTO", "https"),
            ALLOWED_HOSTS=["shop.example.com"],
        ):  # fmt: skip
            answer = client.get(ROOT, headers=proxy)
            self.assertTrue(answer.cookies["lowq_token"]["secure"])
            token = answer.cookies["lowq_token"].value
            for origin, status in (("https://shop.example.com", 303), ("https://testserver", 403)):
                answer = client.post(
                    f"{ROOT}queues/OrderSync/pause", {"lowq_token": token}, headers={**proxy, "origin": origin}
                )
                self.assertEqual(answer.status_code, status)
            self.assertEqual(client.get(ROOT, headers={"host": "evil.example"}).status_code, 400)

    async def test_under_asgi_it_is_the_same(self) -> None:
        client = AsyncClient()
        self.assertEqual((await client.get(ROOT)).status_code, 302)
        await client.aforce_login(
            await get_user_model().objects.acreate(username="ann", is_staff=True, is_superuser=True)
        )
        for page in ("", "queues/OrderSync/job?id=42", "live"):
            self.assertEqual((await client.get(ROOT + page)).status_code, 200)
        answer = await client.post(f"{ROOT}api/v1/queues/OrderSync/pause", {}, content_type="application/json")
        self.assertEqual(answer.status_code, 200)
        self.assertTrue(OrderSync.queue.stats().paused)

    def test_it_has_permissions_and_no_table(self) -> None:
        call_command("makemigrations", "lowq", "--check", stdout=io.StringIO())
        for options in ([], ["--all"]):
            out = io.StringIO()
            call_command("dumpdata", "lowq", *options, stdout=out)
            self.assertEqual(out.getvalue().strip(), "[]")


class JobLinkTests(TestCase):
    def test_an_object_links_to_its_job(self) -> None:
        self.client.force_login(user("ann", is_superuser=True))
        order = Order.objects.create(status="a b&<ü>")
        OrderSync.push(order.pk, "x")
        lowq.app.queue("default").push(f"{order.status}/{order.pk}", "x")
        for page in (f"/admin/django_site/order/{order.pk}/change/", "/admin/django_site/order/"):
            with self.subTest(page):
                text = self.client.get(page).content.decode()
                links = [unescape(link) for link in re.findall(rf'<a href="({ROOT}queues/[^"]+)"', text)]
                self.assertEqual(len(links), 2 if "change" in page else 1)
                for link in links:
                    self.assertEqual(self.client.get(link).status_code, 200, link)
        self.assertEqual(self.client.get("/admin/django_site/order/add/").status_code, 200)

    def test_any_id_of_any_queue_has_a_link_that_leads_to_it(self) -> None:
        self.client.force_login(user("ann", is_superuser=True))
        for queue in ("a/b", "a%2Fb", "..", "ü ö", "?x=1#y"):
            for job_id in ("42", "a/b?c=d&e#f", "%2F", "<i>\n", "é"):
                with self.subTest(queue=queue, job_id=job_id):
                    try:
                        lowq.app.queue(queue, 2).push(job_id, "x")
                    except ConfigError:
                        continue  # no name of a queue
                    html = LowqJobLink(queue, job_id=str)(job_id)
                    link = re.fullmatch(r'<a href="([^"]+)">[^<]*</a>', html, re.DOTALL)
                    assert link is not None, html
                    answer = self.client.get(unescape(link[1]))
                    self.assertEqual(answer.status_code, 200, (answer.content, link[1]))

    def test_without_the_dashboard_it_is_a_text_and_what_is_no_queue_is_refused(self) -> None:
        order = Order(pk=7)
        self.assertIn(">OrderSync 7</a>", LowqJobLink(OrderSync)(order))
        self.assertEqual(LowqJobLink(OrderSync)(Order()), "-")
        with override_settings(ROOT_URLCONF=__name__):
            self.assertEqual(LowqJobLink(OrderSync)(order), "7")
        with self.assertRaisesMessage(ConfigError, "write a worker, a task or the name of a queue"):
            LowqJobLink(5)
