"""Pages as people read them: tables by the words above their columns, facts by their names, numbers as on hover.

Tests that ask what a page shows go through here, so that it may look otherwise tomorrow.
"""

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser

from starlette.testclient import TestClient

_VOID = {"meta", "link", "input", "br", "hr", "img", "source", "wbr"}
_SECONDS = {"d": 86400.0, "h": 3600.0, "min": 60.0, "s": 1.0}

#: Seconds that may pass between a known moment and the page that shows how long ago it was.
SLOW = 60.0

Row = dict[str, "Element"]


@dataclass(slots=True)
class Element:
    """An element of a page, with what is in it."""

    tag: str
    attributes: dict[str, str] = field(default_factory=dict)
    children: list["Element | str"] = field(default_factory=list)

    @property
    def classes(self) -> list[str]:
        return self.attributes.get("class", "").split()

    @property
    def text(self) -> str:
        """What is to be read in it, in one line."""
        return " ".join("".join(self._texts()).split())

    @property
    def lines(self) -> str:
        """What is written in it, line by line: of a `pre`."""
        return "".join(child if isinstance(child, str) else child.lines for child in self.children)

    def _texts(self) -> Iterator[str]:
        for child in self.children:
            if isinstance(child, str):
                yield child
            elif child.tag not in ("title", "script", "style"):
                gap = "" if child.tag in ("b", "i", "span", "a", "code", "time", "wbr") else " "
                yield gap
                yield from child._texts()
                yield gap

    def every(self, *tags: str) -> Iterator["Element"]:
        """Those in it with one of these tags, or all, as they come."""
        for child in self.children:
            if isinstance(child, Element):
                if not tags or child.tag in tags:
                    yield child
                yield from child.every(*tags)

    def find(self, *tags: str, has: str = "") -> "Element":
        """The first with one of these tags whose text has these words."""
        for element in self.every(*tags):
            if has in element.text:
                return element
        raise AssertionError(f"no {' or '.join(tags)} with {has!r} in: {self.text[:500]}")

    def of_role(self, role: str) -> str:
        """What is to be read in those of a role, such as "status" and "alert"."""
        return " ".join(element.text for element in self.every() if element.attributes.get("role") == role)

    @property
    def numbers(self) -> list[int]:
        """The numbers in its text, as they come: for sentences whose words are free."""
        return [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", self.text)]

    @property
    def link(self) -> str:
        """Where the first link in it, or itself, leads."""
        return next(element.attributes["href"] for element in (self, *self.every("a")) if "href" in element.attributes)

    @property
    def number(self) -> int:
        """The exact number: on hover, where that says one, otherwise as it is written."""
        for element in (self, *self.every()):
            exact = re.match(r"\d{1,3}(,\d{3})*$", element.attributes.get("title", ""))
            if exact:
                return int(exact[0].replace(",", ""))
        return int(self.text.replace(",", ""))

    def lasts(self, least: float, most: float | None = None) -> bool:
        """Whether the length of time that is written there, such as "4 min 10 s", is between these seconds, as far as
        its smaller unit shows. Without ``most``: it has been that long, give or take what a slow test takes.
        """
        parts = re.findall(r"([\d,.]+) (d|h|min|s)\b", self.text)
        assert parts, f"{self.text!r} is no length of time"
        seconds = sum(float(number.replace(",", "")) * _SECONDS[unit] for number, unit in parts)
        coarse = 0.1 if "." in parts[-1][0] else _SECONDS[parts[-1][1]]
        return least - coarse <= seconds <= (least + SLOW if most is None else most) + coarse

    @property
    def moment(self) -> str:
        """The exact time, as its first `time` says it to machines."""
        return next(self.every("time")).attributes["datetime"]

    @property
    def facts(self) -> dict[str, "Element"]:
        """What `dl` in it show: name -> value."""
        names = [element.text for element in self.every("dt")]
        return dict(zip(names, self.every("dd"), strict=True))

    def table(self, *headers: str) -> list[Row]:
        """The rows of the table in it that has these columns: by the word above, their cells."""
        for table in self.every("table"):
            words = [cell.text for cell in next(table.every("thead")).every("th")]
            if set(headers) <= set(words):
                # What is streamed comes as one body after another: the last one counts.
                rows = [list(row.every("th", "td")) for row in list(table.every("tbody"))[-1].every("tr")]
                return [dict(zip(words, row, strict=True)) for row in rows if len(row) == len(words)]
        raise AssertionError(f"no table with the columns {headers} in: {self.text[:500]}")


class _Builder(HTMLParser):
    def __init__(self, root: Element) -> None:
        super().__init__(convert_charrefs=True)
        self._open = [root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {name: value or "" for name, value in attrs})
        self._open[-1].children.append(element)
        if tag not in _VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open[-1].children.append(Element(tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        for depth in range(len(self._open) - 1, 0, -1):
            if self._open[depth].tag == tag:
                del self._open[depth:]
                return

    def handle_data(self, data: str) -> None:
        self._open[-1].children.append(data)


def parse(page: str) -> Element:
    """A page as a tree."""
    root = Element("")
    builder = _Builder(root)
    builder.feed(page)
    builder.close()
    return root


class Reader:
    """Somebody who reads pages."""

    def __init__(self, client: TestClient, since: float | None = None) -> None:
        self._client = client
        self._since = time.monotonic() if since is None else since

    @property
    def age(self) -> float:
        """Seconds since what is read was made, or began to be made: since that monotonic time."""
        return time.monotonic() - self._since

    def page(self, address: str, status: int = 200) -> Element:
        answer = self._client.get(address)
        assert answer.status_code == status, f"{address}: {answer.status_code} {answer.text[:300]}"
        return parse(answer.text)

    def rows(self, address: str, *headers: str) -> list[Row]:
        """The rows of a table, from this page on to the last."""
        found: list[Row] = []
        seen = set()
        while True:
            page = self.page(address)
            found += page.table(*headers)
            following = [link for link in page.every("a") if link.attributes.get("rel") == "next"]
            if not following:
                return found
            address = following[0].link
            assert address not in seen, f"{address} leads to itself"
            seen.add(address)

    def ids(self, address: str) -> list[str]:
        """The ids of a listing of jobs, from this page on to the last."""
        return [id_in(row["Id"]) for row in self.rows(address, "Id", "Payloads")]


def id_in(cell: Element) -> str:
    """The id that a cell leads to."""
    link = next(element for element in cell.every("a"))
    return link.text
