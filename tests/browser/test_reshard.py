"""A queue is given another number of shards with the button, while a node works it."""

import threading
from typing import Any

from playwright.sync_api import expect

import lowq
from tests.browser.conftest import Watched
from tests.browser.stage import Stage
from tests.waiting import until


def test_the_number_of_shards_is_changed_while_a_node_works(stage: Stage, address: str, watched: Watched) -> None:
    performed: set[str] = set()
    over = threading.Event()

    def perform(_self: Any, payloads_by_id: dict[str, list[Any]]) -> None:
        over.wait(0.01)
        performed.update(payloads_by_id)

    stage.app.worker(shards_count=4)(type("Orders", (lowq.Worker,), {"perform": perform}))
    queue = stage.app.queue("Orders")
    queue.push({"id": f"later-{n}", "payload": n, "delay": 3600} for n in range(200))
    queue.bury([f"later-{n}" for n in range(20)], "out of stock")
    stage.start_node()
    pushed: list[str] = []

    def push() -> None:
        while not over.wait(0.02):
            pushed.append(f"now-{len(pushed)}")
            queue.push({"id": pushed[-1], "payload": 1})

    thread = threading.Thread(target=push)
    thread.start()
    try:
        until(lambda: len(performed) > 20, "work")
        page = watched.page(f"{address}/queues/Orders")
        page.get_by_role("link", name="Change the number of shards").click()
        field = page.get_by_label("Shards", exact=True)
        watched.expected = {400}
        for typed, reason in (("0", "A whole number from 1"), ("many", "A whole number"), ("4", "It has 4 already.")):
            field.fill(typed)
            page.get_by_role("button", name="Change…").click()
            expect(page.get_by_role("alert").filter(has_text=reason)).to_be_visible()
            expect(field).to_have_value(typed)
        field.fill("12")
        page.get_by_role("button", name="Change…").click()
        expect(page.get_by_role("heading", name="Change to 12 shards?")).to_be_visible()
        page.get_by_role("button", name="Change to 12 shards").click()
        expect(page.get_by_role("heading", name="Reshard Orders to 12 shards")).to_be_visible()
        expect(page.locator(".reason")).to_contain_text("done")
        expect(page.locator(".reason")).to_contain_text("4 of 4 shards moved")
        page.goto(f"{address}/queues/Orders")
        expect(page.get_by_role("link", name="12 shards")).to_be_visible()
        seen = len(performed)
        until(lambda: len(performed) > seen + 20, "work in the new shards")
    finally:
        over.set()
        thread.join()
    until(lambda: performed >= set(pushed), "all that was pushed")
    stats = queue.stats()
    assert (stats.shards_count, stats.length, stats.morgue_length) == (12, 180, 20)
