"""The pictures of the documentation: `make screenshots` writes them to docs/screenshots."""

import argparse
import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from playwright.sync_api import expect, sync_playwright

import lowq
from lowq.observe.histories import BOUNDS, RINGS
from lowq.observe.tallies import Counted, record_call
from tests.browser.chromium import launch
from tests.browser.stage import TRACEBACK, Stage
from tests.redis_server import RedisServer
from tests.waiting import PATIENCE

#: name -> (path, width, height or None for the whole page).
PAGES: dict[str, tuple[str, int, int | None]] = {
    "dashboard": ("/", 1280, 1000),
    "queue": ("/queues/OrderSync?state=morgue", 1280, 800),
    "id": ("/queues/OrderSync/job?id=4711", 1280, 860),
    "nodes": ("/nodes", 1280, 640),
    "shards": ("/queues/OrderSync/shards", 1280, 700),
    "phone": ("/", 390, 844),
}


class Shop:
    """A busy little shop: four queues with jobs in every state, two nodes, and work going on."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []
        app = stage.app
        rng = random.Random(7)

        def slowly(mean: float) -> Callable[[Any, dict[str, list[Any]]], None]:
            def perform(_self: Any, payloads_by_id: dict[str, list[Any]]) -> None:
                self._over.wait(min(rng.expovariate(1 / mean), mean * 6))
                if any(job_id.endswith("13") for job_id in payloads_by_id):
                    raise TimeoutError("warehouse did not answer within 5 s")

            return perform

        for name, shards, mean in (
            ("OrderSync", 24, 0.004),
            ("Invoices", 8, 0.05),
            ("SearchIndex", 40, 0.002),
            ("ImportCatalog", 12, 0.01),
        ):
            kind = type(name, (lowq.Worker,), {"perform": slowly(mean)})
            app.worker(shards_count=shards, batch_size=5)(kind)

    def fill(self) -> None:
        """Jobs in every state, and a history of an hour and a month."""
        app, now = self.stage.app, time.time()
        imports = app.queue("ImportCatalog", 12)
        imports.push(
            {"id": f"sku-{n}", "payload": {"version": 1, "price": n * 1.25, "stock": n % 40}, "score": 1}
            for n in range(3200)
        )
        orders = app.queue("OrderSync")
        orders.push(
            {
                "id": str(90_000 + n),
                "payload": {"version": n % 7, "status": "paid"},
                "score": n % 7,
                "delay": 600 + 13 * n,
            }
            for n in range(480)
        )
        orders.push({"id": "4711", "payload": {"version": 3, "status": "new", "card_number": "4242 4242"}, "score": 3})
        orders.push({"id": "4711", "payload": {"version": 4, "status": "paid", "total": 59.9}, "score": 4})
        self.stage.fail("OrderSync", "4711", TRACEBACK, retry_count=3, delay=1490.0)
        orders.push(
            {"id": f"{4000 + n}", "payload": {"version": 2, "status": "shipped"}, "score": 2, "delay": 60}
            for n in range(31)
        )
        orders.bury([f"{4000 + n}" for n in range(31)], TRACEBACK)
        self.history(now)
        app.note("ann", "kick", "OrderSync", 12, {"state": "morgue", "match": "39*", "outcome": "done"})
        app.note("bob", "pause", "ImportCatalog")
        imports.pause(by="bob")

    def history(self, now: float) -> None:
        """As nodes would have recorded it."""
        rng, nothing = random.Random(3), Counted(0, 0, 0.0, (0,) * (len(BOUNDS) + 1))
        for queue, mean in (("OrderSync", 90), ("Invoices", 14), ("SearchIndex", 160)):
            for step, count in ((7200, 340), (300, 280), (10, 358)):
                for back in range(count, 0, -1):
                    at = now - back * step
                    wave = 1 + 0.45 * _wave(at, step * 90) + 0.2 * _wave(at, step * 23)
                    done = max(mean * wave * rng.uniform(0.85, 1.15), 0) * step
                    failed = done * 0.01 * rng.random() * (4 if 30 < back % 140 < 40 else 1)
                    lag = max(rng.gauss(0.6, 0.3), 0) + (22 * rng.random() if 30 < back % 140 < 40 else 0)
                    after = Counted(int(done), int(failed), 0.0, nothing.lengths)
                    call = record_call(f"lowq:v1:history:{queue}", nothing, after, float(step), lag, at)
                    # Of the three rings at the end only that of this step.
                    *args, spans = call.args[: -2 * len(RINGS)]
                    assert spans == len(RINGS)
                    slots = next(slots for width, slots in RINGS.values() if width == step)
                    call.args = [*args, 1, step, slots]
                    self.stage.app.client.call(call)

    def open(self) -> None:
        """Work goes on until `close`."""

        def customers() -> None:
            rng, version = random.Random(11), 0
            while not self._over.wait(0.05):
                version += 1
                for queue, count in (("OrderSync", 9), ("Invoices", 1), ("SearchIndex", 14)):
                    self.stage.app.queue(queue).push(
                        {
                            "id": str(rng.randrange(3000)),
                            "payload": {"version": version, "status": "paid"},
                            "score": version,
                        }
                        for _ in range(count)
                    )

        self.stage.start_node(5)
        self.stage.start_node(4)
        thread = threading.Thread(target=customers, daemon=True)
        thread.start()
        self._threads.append(thread)

    def close(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(PATIENCE)


def _wave(at: float, period: float) -> float:
    phase = (at % period) / period
    return 4 * abs(phase - 0.5) - 1


def take(folder: Path, names: list[str], schemes: list[str], seconds: float) -> None:
    """Opens a little shop, and takes pictures of its dashboard."""
    folder.mkdir(parents=True, exist_ok=True)
    logging.disable(logging.CRITICAL)  # what fails there fails on purpose
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(RedisServer(appendonly="yes"))
        stage = Stage(server.url)
        stack.callback(stage.close)
        shop = Shop(stage)
        shop.fill()
        shop.open()
        stack.callback(shop.close)
        address = stack.enter_context(stage.serving(redact=["card_*"]))
        time.sleep(seconds)  # work goes on meanwhile, and that is what is to be seen
        browser = launch(stack.enter_context(sync_playwright()))
        stack.callback(browser.close)
        for scheme in schemes:
            for name in names:
                path, width, height = PAGES[name]
                page = browser.new_page(
                    viewport={"width": width, "height": height or 900}, color_scheme=scheme, device_scale_factor=1
                )  # type: ignore[arg-type, unused-ignore]  # "light" or "dark"
                page.goto(address + path)
                page.wait_for_load_state()
                if page.locator("[data-charts]").count():
                    page.wait_for_selector("[data-plot]")
                    page.wait_for_selector("body[data-live]")
                for rate in page.locator("[data-live='total.processed_rate']").all():
                    expect(rate).not_to_have_text("-", timeout=15_000)
                page.screenshot(path=folder / f"{name}-{scheme}.png", full_page=height is None)
                page.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path("docs/screenshots"))
    parser.add_argument("--only", nargs="*", default=list(PAGES), choices=list(PAGES))
    parser.add_argument("--schemes", nargs="*", default=["light", "dark"])
    parser.add_argument("--seconds", type=float, default=10.0)
    arguments = parser.parse_args()
    take(arguments.folder, arguments.only, arguments.schemes, arguments.seconds)


if __name__ == "__main__":
    main()
