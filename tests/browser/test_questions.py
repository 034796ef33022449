"""What an operator asks, and how many steps away the answer is: a step is a click, or a text and Enter."""

import time

import pytest
from playwright.sync_api import Locator, Page, expect

from lowq.broker.inflow import Inflow
from lowq.metrics.counters import BOUNDS, Counted, bucket_of, record_call
from lowq.metrics.error_groups import error_fingerprint
from lowq.metrics.slowest import EndedBatch
from lowq.store.keys import error_groups_key, history_key
from tests.browser.conftest import Watched
from tests.browser.stage import Stage
from tests.waiting import until
from tests.web.hand import Hand, heartbeat

#: What the batch that is stuck has beside order 42.
OTHERS = [f"order-{number}" for number in range(12)]
TIMED_OUT = "TimeoutError: no answer to '{}' within 5 s"


class Operator:
    """Counts the steps on a page."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.steps = 0

    def click(self, target: Locator) -> None:
        target.click()
        self.steps += 1

    def enter(self, target: Locator, text: str) -> None:
        target.fill(text)
        target.press("Enter")
        self.steps += 1


@pytest.fixture
def operator(stage: Stage, address: str, watched: Watched) -> Operator:
    """On the first page: a batch of Orders is stuck, Mails fail, and Imports have a backlog that shrinks."""
    app, now = stage.app, time.time()
    orders = Hand(app, "Orders")
    for job_id in ["42", *OTHERS]:
        orders.push(job_id, now - 2700)
    orders.take(["42", *OTHERS], now - 2650)
    orders.push("behind", now - 2600)
    batch = {"queue": "Orders", "shard": 0, "ids": ["42", *OTHERS], "count": 13, "seconds": 2640.0}
    heartbeat(app, "shop:7:aaaaaa", now, threads=2, queues=["Orders"], shards={"Orders": [0]}, performing=[None, batch])

    mails = app.queue("Mails", 1)
    mails.push({"id": f"mail-{number}", "payload": {"customer": number}} for number in range(9))
    mails.bury([f"mail-{number}" for number in range(8)], TIMED_OUT.format("smtp"))
    mails.bury("mail-8", "KeyError: 'to'")
    for text, count, ago in ((TIMED_OUT.format("smtp"), 270, 3600.0), ("KeyError: 'to'", 1, 5.0)):
        words = (error_fingerprint(text), count, "mail-7", text)
        app.client.run("record_errors", error_groups_key("lowq", "Mails"), repr(now - ago), 200, 86400, *words)

    imports = Hand(app, "Imports")
    for number in range(100):
        imports.push(f"sku-{number}", now - 60)
    imports.own(0, now)
    lengths = [0] * (len(BOUNDS) + 1)
    nothing = Counted(0, 0, 0.0, tuple(lengths))
    lengths[bucket_of(0.2)] = 10
    after = Counted(10, 0, 2.0, tuple(lengths))
    key, slow = history_key("lowq", "Imports"), EndedBatch("sku-slow", 1, 0, 12.5, 0.0)
    inflow = Inflow(30, -5)
    call = record_call(key, nothing, after, 50.0, 0.0, now // 10 * 10 - 21, inflow, [(1.0, slow)])
    app.client.run(call.script, call.key, *call.args)
    return Operator(watched.page(address))


def test_what_is_stuck_is_on_the_first_page(operator: Operator) -> None:
    panel = operator.page.locator("#stuck")
    for text in ("Orders", "shard 0", "42", "order-0", "shop:7:aaaaaa", "thread 1", "44 min"):
        expect(panel).to_contain_text(text)
    expect(panel.locator("td").last).to_have_text("1")
    assert operator.steps == 0
    operator.click(panel.get_by_role("link", name="shard 0"))
    expect(operator.page.locator("tr:target th")).to_have_text("0")
    assert operator.steps == 1


def test_why_order_42_does_not_run(operator: Operator) -> None:
    operator.enter(operator.page.get_by_role("searchbox"), "42")
    why = operator.page.locator(".why")
    expect(why).to_contain_text("it performs the batch of 42, order-0, order-1 and 10 more, for 44 min")
    expect(why).to_contain_text("shop:7:aaaaaa")
    assert operator.steps == 1


def test_what_fails_most_and_its_jobs(stage: Stage, operator: Operator) -> None:
    page = operator.page
    operator.click(page.get_by_role("link", name="Errors", exact=True))
    first = page.locator("tbody tr").first
    expect(first).to_contain_text(TIMED_OUT.format("smtp"))
    expect(first).to_contain_text("270")
    assert operator.steps == 1
    operator.click(first.get_by_role("link", name="dead"))
    expect(page.locator("table.jobs > tbody:last-of-type > tr")).to_have_count(8)
    assert operator.steps == 2
    page.locator("#jobs").get_by_role("button", name="Retry all now").click()
    page.get_by_role("button", name="Retry 8 jobs now").click()
    mails = stage.app.queue("Mails")
    until(lambda: mails.stats().morgue_length == 1, "the group to be queued again")


def test_when_the_backlog_is_gone_is_on_the_first_page(operator: Operator) -> None:
    row = operator.page.locator('tr[data-queue="Imports"]')
    expect(row.locator("[data-field=forecast]")).to_have_text("empty in about 20 min")
    assert operator.steps == 0


def test_how_long_it_takes(operator: Operator) -> None:
    page = operator.page
    operator.click(page.locator('tr[data-queue="Imports"]').get_by_role("link", name="Imports"))
    operator.click(page.get_by_role("link", name="times", exact=True))
    expect(page.locator("section.times").last).to_contain_text("250 ms")
    expect(page.get_by_role("link", name="sku-slow")).to_be_visible()
    assert operator.steps == 2


def test_which_jobs_of_a_customer_are_dead(operator: Operator) -> None:
    page = operator.page
    operator.click(page.locator(".tile", has_text="Dead").get_by_role("link"))
    operator.enter(page.get_by_label("Payload"), "customer:7")
    expect(page.locator("table.jobs > tbody:last-of-type > tr")).to_have_count(1)
    expect(page.locator("table.jobs > tbody:last-of-type")).to_contain_text("mail-7")
    assert operator.steps == 2
