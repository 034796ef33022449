"""The pictures of the documentation: `make screenshots` writes them to docs/screenshots."""

import argparse
import contextlib
import logging
import time
from pathlib import Path

from playwright.sync_api import expect, sync_playwright

from tests.browser.chromium import launch
from tests.browser.stage import Shop, Stage
from tests.redis_server import RedisServer

#: name -> (path, width, height or None for the whole page).
PAGES: dict[str, tuple[str, int, int | None]] = {
    "dashboard": ("/", 1280, 1000),
    "queue": ("/queues/OrderSync?state=morgue", 1280, 800),
    "id": ("/queues/OrderSync/job?id=4711", 1280, 860),
    "nodes": ("/nodes", 1280, 640),
    "shards": ("/queues/OrderSync/shards", 1280, 700),
    "phone": ("/", 390, 844),
}


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
                    page.wait_for_selector(".u-over")
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
