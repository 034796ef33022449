"""A small SVG: text, lines, shapes. Light and dark are the viewer's choice; the same drawing gives the same bytes."""

from collections.abc import Sequence
from xml.sax.saxutils import escape

#: Colours by role: on a light page, on a dark one.
_COLOURS = {
    "ink": ("#1f2328", "#e6edf3"),
    "faint": ("#656d76", "#8b949e"),
    "grid": ("#d8dee4", "#30363d"),
    "plain": ("#afb8c1", "#57606a"),
    "first": ("#0969da", "#58a6ff"),
    "second": ("#bc4c00", "#f0883e"),
    "third": ("#8250df", "#bc8cff"),
}
#: What a character is wide, in parts of the font's size: enough to leave room for a text.
WIDTH = 0.56


class Drawing:
    """Shapes in the order in which they were added. Lengths are pixels."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width = width
        self.height = height
        self._title = title
        self._parts: list[str] = []

    def text(
        self, x: float, y: float, text: str, *, colour: str = "ink", size: int = 12, anchor: str = "start",
        bold: bool = False, turned: bool = False,
    ) -> None:  # fmt: skip
        """`anchor`: start, middle or end; `y` is the baseline. `turned`: reads upwards."""
        more = ' font-weight="600"' if bold else ""
        if turned:
            more += f' transform="rotate(-90 {_number(x)} {_number(y)})"'
        self._parts.append(
            f'<text x="{_number(x)}" y="{_number(y)}" class="{colour}" font-size="{size}" '
            f'text-anchor="{anchor}"{more}>{escape(text)}</text>'
        )

    def line(self, points: Sequence[tuple[float, float]], *, colour: str = "grid", width: float = 1) -> None:
        """Through all points."""
        path = " ".join(f"{_number(x)},{_number(y)}" for x, y in points)
        self._parts.append(f'<polyline points="{path}" class="{colour} line" stroke-width="{width:g}"/>')

    def area(self, points: Sequence[tuple[float, float]], *, colour: str) -> None:
        """A pale filled shape."""
        path = " ".join(f"{_number(x)},{_number(y)}" for x, y in points)
        self._parts.append(f'<polygon points="{path}" class="{colour}" opacity="0.18"/>')

    def bar(self, x: float, y: float, width: float, height: float, *, colour: str) -> None:
        self._parts.append(
            f'<rect x="{_number(x)}" y="{_number(y)}" width="{_number(width)}" height="{_number(height)}" '
            f'rx="2" class="{colour}"/>'
        )

    def dot(self, x: float, y: float, *, colour: str) -> None:
        self._parts.append(f'<circle cx="{_number(x)}" cy="{_number(y)}" r="3.5" class="{colour}"/>')

    def render(self) -> str:
        light = " ".join(
            f".{name}{{fill:{pair[0]}}}.{name}.line{{stroke:{pair[0]}}}" for name, pair in _COLOURS.items()
        )
        dark = " ".join(f".{name}{{fill:{pair[1]}}}.{name}.line{{stroke:{pair[1]}}}" for name, pair in _COLOURS.items())
        style = (
            "text{font-family:system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif} "
            f"{light} @media (prefers-color-scheme:dark){{{dark}}} .line{{fill:none;stroke-linejoin:round}}"
        )
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" role="img" aria-label="{escape(self._title)}">'
        )
        top = [head, f"<title>{escape(self._title)}</title>", f"<style>{style}</style>"]
        return "\n".join([*top, *self._parts, "</svg>\n"])


def _number(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".")
