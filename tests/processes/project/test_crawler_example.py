"""The example that crawls sites, one page of each at a time."""

import os
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "crawler.py"


def test_each_page_is_fetched_once_and_no_site_gets_two_requests_at_once(redis_url: str) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)], env={**os.environ, "LOWQ_REDIS_URL": redis_url}, capture_output=True, text=True,
        timeout=90, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "150 requests for 150 pages of 6 sites" in done.stdout
    assert "most requests that a site had at once: 1" in done.stdout
