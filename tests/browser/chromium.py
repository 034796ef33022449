"""Debian's Chromium, for the tests: nothing is ever downloaded."""

import os
import shutil
from typing import Any


def find() -> str | None:
    """Its path, if it is installed."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


def launch(playwright: Any) -> Any:
    """A browser without a window, that talks to nobody by itself."""
    path = find()
    assert path is not None, "chromium is missing: on Debian or Ubuntu install it with sudo apt-get install chromium"
    flags = [
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
    ]
    if os.geteuid() == 0:
        flags.append("--no-sandbox")
    return playwright.chromium.launch(executable_path=path, headless=True, args=flags)
