"""Charts of what was recorded, where nothing live is added to them: without JavaScript."""

import math
import time

from playwright.sync_api import expect

from tests.browser.conftest import Watched
from tests.browser.stage import Stage
from tests.web.hand import Hand


def test_what_was_recorded_is_drawn_again_after_a_reload(stage: Stage, address: str, watched: Watched) -> None:
    hand, first = Hand(stage.app, "Orders", 4), (math.floor(time.time() / 10) - 50) * 10
    for n in range(5):
        hand.record(first + 10 * n + 9.9, 9.8, processed=100 * n, failed=n, lag=2.0 * n)
    page = watched.page(address, java_script_enabled=False)
    drawn = page.locator("polyline.processed")
    expect(drawn).to_have_count(1)
    heights = [pair.partition(",")[2] for pair in (drawn.get_attribute("points") or "").split()]
    assert len(set(heights)) == 5
    page.reload()
    again = [pair.partition(",")[2] for pair in (drawn.get_attribute("points") or "").split()]
    assert again == heights
