"""All pages, light and dark, wide and narrow: judged by axe-core, and what it does not judge."""

from collections.abc import Iterator
from contextlib import nullcontext
from importlib import resources
from urllib.parse import quote

import pytest
from playwright.sync_api import Page, expect

from lowq.operate.reshard import reshard
from tests.browser.conftest import Watched
from tests.browser.stage import TRACEBACK, Stage
from tests.browser.test_journeys import history, working

PHONE, WIDE = {"width": 390, "height": 844}, {"width": 1280, "height": 900}
#: What is found, as text. Nothing is left out: neither a rule nor a part of a page.
AXE = """async () => {
  const found = await axe.run(document, {
    runOnly: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22a", "wcag22aa", "best-practice"],
    rules: {"target-size": {enabled: true}},
  });
  const named = (rule) => rule.nodes.map((node) => `${rule.id}: ${node.html.slice(0, 160)}`);
  return [found.passes.length, found.violations.flatMap(named)];
}"""
#: What is pressed and is smaller than 24 px, outside of running text.
SMALL = """() => [...document.querySelectorAll("button, input:not([type=hidden]), select, nav a, th a, a.sub, .button")]
  .filter((element) => element.checkVisibility())
  .map((element) => [element, element.getBoundingClientRect()])
  .filter(([, box]) => box.width < 23.9 || box.height < 23.9)
  .map(([element, box]) => `${element.outerHTML.slice(0, 120)}: ${box.width.toFixed(1)} x ${box.height.toFixed(1)}`)"""
#: Links that look like the text that they stand in, but for their colour.
COLOUR_ALONE = """() => [...document.querySelectorAll("main a, footer a")]
  .filter((link) => link.checkVisibility() && link.textContent.trim() && !link.closest("nav, thead, .heatrow"))
  .filter((link) => !link.matches(".button") && !getComputedStyle(link).textDecorationLine.includes("underline"))
  .map((link) => link.outerHTML.slice(0, 160))"""


def add_axe(page: Page) -> None:
    page.evaluate(resources.files("axe_playwright_python").joinpath("axe.min.js").read_text("utf-8"))


@pytest.fixture
def busy(stage: Stage) -> Iterator[Stage]:
    """Queues with something of everything."""
    queue = stage.app.queue("OrderSync", 4)
    queue.push({"id": f"order-{n}", "payload": {"n": n}, "delay": 3600 + n} for n in range(60))
    queue.push({"id": "7", "payload": {"n": 1}, "delay": 3600})  # so short a link is hard to hit
    queue.push({"id": "order-x", "payload": {"n": 1}})
    stage.fail("OrderSync", "order-x", TRACEBACK)
    queue.bury([f"order-{n}" for n in range(12)], TRACEBACK)
    queue.push({"id": "order-1", "payload": "x" * 6000})
    for name in ("ImportCatalog", "a-queue-with-a-long-name", "Bills"):
        stage.app.queue(name, 3).push({"id": "order-1"})
    stage.app.queue("ImportCatalog").pause(by="ann")
    stage.app.note("ann", "kick", "OrderSync", 12, {"state": "morgue", "outcome": "done"})
    history(stage, "OrderSync", 90.0)
    moving = stage.app.queue("Moving", 3)
    moving.push({"id": n, "delay": 3600} for n in range(60))
    progress = reshard(stage.app, "Moving", 6, by="ann")
    while next(progress).shards_moved < 1:
        pass
    with working(stage):
        yield stage


QUEUE = "/queues/OrderSync"
#: Every kind of page: its path; and the button that leads on from there, if one does, with what is ticked before.
PAGES: list[tuple[str, str, str]] = [
    *((path, "", "") for path in (
        "/", "/?span=month&sort=lag&dir=desc", "/?queue=zzz", QUEUE, f"{QUEUE}?state=morgue&error=timeout",
        f"{QUEUE}?match=*7&order_by=id", f"{QUEUE}?min=banana", "/queues/ImportCatalog", "/queues/Orders?state=taken",
        f"{QUEUE}/job?id=order-x", f"{QUEUE}/job?id=order-1", f"{QUEUE}/job?id=gone",
        f"{QUEUE}/job?id={quote('ä ' * 40)}", "/?trouble=late", "/search?id=nothing", "/search?id=order-1",
        "/nodes", "/schedules", "/limits", "/audit", "/nowhere",
        "/jobs?state=morgue&payload=version:1", "/jobs?state=taken", f"{QUEUE}/shards#shard-3", f"{QUEUE}/reshard",
        "/queues/Moving", "/queues/Moving/reshard", "/queues/Moving/shards",
    )),
    ("/", "Keys", ""),
    (f"{QUEUE}?state=morgue", "Delete all", ""),
    (QUEUE, "Bury selected", "Select order-20"),
    ("/nodes", "Stop", ""),
    (f"{QUEUE}/job?id=order-9", "Retry now", ""),
]  # fmt: skip


def go(page: Page, address: str, path: str, button: str, ticked: str) -> None:
    page.goto(address + path)
    if ticked:
        page.get_by_label(ticked, exact=True).check()
    if button:
        with nullcontext() if button == "Keys" else page.expect_navigation():  # until the next page is loaded
            page.get_by_role("button", name=button, exact=True).first.click()


@pytest.mark.slow
@pytest.mark.timeout(1200)  # some thirty pages, each judged for a second by a machine that does nothing else
@pytest.mark.parametrize(("scheme", "size"), [("dark", PHONE), ("light", WIDE)], ids=["dark phone", "light and wide"])
def test_every_page(busy: Stage, address: str, watched: Watched, scheme: str, size: dict[str, int]) -> None:
    watched.expected = {400, 404}
    page = watched.page(address, viewport=size, color_scheme=scheme)
    found: dict[str, list[str]] = {}

    def judge(name: str) -> None:
        add_axe(page)
        passed, violations = page.evaluate(AXE)
        assert passed > 10, f"axe-core has judged little of {name}"
        rest = {"axe": violations, "small": page.evaluate(SMALL), "colour alone": page.evaluate(COLOUR_ALONE)}
        wide = page.evaluate("document.documentElement.scrollWidth")
        rest["wider than the screen"] = [str(wide)] if wide > size["width"] else []
        found.update({f"{name}: {kind}": what for kind, what in rest.items() if what})

    for path, button, ticked in PAGES:
        go(page, address, path, button, ticked)
        judge(f"{path} {button}")
    busy.app.queue("Bills").push({"id": "b", "delay": 3600})
    go(page, address, "/queues/Bills", "Run all now", "")
    page.get_by_role("button", name="Run").click()
    expect(page.locator(".reason")).to_contain_text("done")
    page.wait_for_load_state()
    judge("a task")
    go(page, address, "/tasks", "", "")
    judge("/tasks")
    assert found == {}


def test_an_empty_dashboard(address: str, watched: Watched) -> None:
    page = watched.page(address)
    for path in ("/", "/nodes", "/schedules", "/limits", "/audit", "/tasks", "/jobs"):
        page.goto(address + path)
        add_axe(page)
        assert page.evaluate(AXE)[1] == []


def test_axe_finds_what_is_wrong(address: str, watched: Watched) -> None:
    page = watched.page(address)
    add_axe(page)
    page.evaluate("document.querySelector('.search input').removeAttribute('aria-label')")
    page.evaluate("document.querySelector('.search input').removeAttribute('title')")
    page.evaluate("document.querySelector('.search input').removeAttribute('placeholder')")
    page.evaluate("document.querySelector('footer').insertAdjacentHTML('beforeend', '<h6>x</h6>')")
    rules = {text.partition(":")[0] for text in page.evaluate(AXE)[1]}
    assert {"label", "heading-order"} <= rules


#: Words that a line break has cut: its parts stand at different heights.
BROKEN = """() => {
  const found = [];
  const walker = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode;
    if (!node.parentElement.checkVisibility() || node.parentElement.closest("pre, code, svg, .error, .sr")) continue;
    for (const word of node.data.matchAll(/[A-Za-z0-9]+/g)) {
      const range = document.createRange();
      range.setStart(node, word.index);
      range.setEnd(node, word.index + word[0].length);
      const tops = new Set([...range.getClientRects()].map((box) => Math.round(box.top)));
      if (tops.size > 1) found.push(word[0]);
    }
  }
  return found;
}"""


def test_on_a_phone_no_name_breaks_within_a_word_and_no_page_is_too_wide(
    busy: Stage, address: str, watched: Watched
) -> None:
    page = watched.page(address, viewport=PHONE)
    queue = "/queues/OrderSync"
    for path in ("/", queue, f"{queue}/shards", f"{queue}/job?id=order-7", "/nodes"):
        page.goto(address + path)
        assert page.evaluate(BROKEN) == [], path
    busy.app.queue("OrderSync").push({"id": "x" * 400, "payload": "y" * 3000, "delay": 3000})
    busy.app.note("ann", "kick", "OrderSync", 5, {"match": "z" * 200})
    for path in (queue, f"{queue}?state=morgue", f"{queue}/job?id={'x' * 400}", f"{queue}/job?id=order-x", "/audit"):
        page.goto(address + path)
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], path
    for script in (True, False):
        page = watched.page(f"{address}{queue}?state=morgue", viewport=PHONE, java_script_enabled=script)
        tab = page.locator(".tabs [aria-current]").bounding_box()
        assert tab is not None
        assert tab["x"] >= 0
        assert tab["x"] + tab["width"] <= PHONE["width"], "the tab of the list is on the screen"
