"""Pages that ask, the form that says yes to them, and what comes of it in the background."""

import html
import re
from typing import Any

from starlette.testclient import TestClient

from tests.waiting import until


def form_on(page: str) -> list[tuple[str, str]]:
    """The form that a page asks with, as a browser sends it when its button is pressed."""
    form = page.partition("<main")[2].partition("<form")[2].partition("</form>")[0]
    fields = [(item[1], html.unescape(item[2])) for item in re.finditer(r'name="([^"]+)" value="([^"]*)"', form)]
    assert {"sure", "count", "at", "do"} <= {name for name, _ in fields}, page
    return fields


def confirm(client: TestClient, address: str, page: str, **more: str | None) -> Any:
    """What comes of saying yes; ``more``: fields that somebody has filled in or changed, or with None removed."""
    form: dict[str, Any] = {}
    for name, value in form_on(page):
        form.setdefault(name, []).append(value)
    form |= more
    return client.post(address, data={name: value for name, value in form.items() if value is not None})


def act(client: TestClient, address: str, **form: Any) -> Any:
    """What comes of an action, and of saying yes if a page asks first."""
    reason = {"reason": form["reason"]} if "reason" in form else {}
    answer = client.post(address, data=form)
    return confirm(client, address, answer.text, **reason) if answer.status_code == 200 else answer


def ended(client: TestClient, task: str) -> dict[str, Any]:
    """A task, when it has ended."""

    def found() -> dict[str, Any]:
        document: dict[str, Any] = client.get(f"/api/v1/tasks/{task}").json()
        return {} if document["state"] == "running" else document

    return until(found, "end of the task")
