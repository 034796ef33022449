"""What the published run measured, put where people read it.

    python -m benchmarks.publish            plots and tables of docs/ and the README, from results.json
    python -m benchmarks.publish --check    says whether they are as that would make them

A table stands between two comments, ``<!-- NAME: begin -->`` and ``<!-- NAME: end -->``; what is between them is made
here and nowhere else.
"""

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks import tables
from benchmarks.plots import all_plots
from benchmarks.results import PUBLISHED, Results, load

ROOT = Path(__file__).resolve().parent.parent
PLOTS = ROOT / "docs" / "plots"
PAGES = (ROOT / "docs" / "performance.md", ROOT / "README.md")

_TABLES: dict[str, Callable[[Results], str]] = {
    "machine": tables.machine,
    "peers": tables.beside_the_peers,
    "sidekiq": tables.against_sidekiq,
    "reach": tables.reach,
    "load": tables.load,
    "fairness": tables.fairness,
    "merging": tables.merging,
    "payload-size": tables.payload_size,
    "queue-length": tables.queue_length,
    "options": tables.options,
    "growth": tables.growth,
    "waiting": tables.waiting,
    "cluster": tables.cluster,
}
_PLACE = re.compile(r"(<!-- ([a-z-]+): begin -->\n).*?(<!-- \2: end -->)", re.DOTALL)


def made(results: Results) -> dict[Path, str]:
    """Every file that shows figures -> what it is to be."""
    files = {PLOTS / name: plot for name, plot in all_plots(results).items()}
    for page in PAGES:
        files[page] = _PLACE.sub(
            lambda place: f"{place[1]}{_TABLES[place[2]](results)}\n{place[3]}", page.read_text(encoding="utf-8")
        )
    return files


def stale(files: dict[Path, str]) -> list[Path]:
    """Those that differ."""
    return [path for path, text in files.items() if not path.exists() or path.read_text(encoding="utf-8") != text]


def write(files: dict[Path, str]) -> None:
    """Writes what differs, and names it."""
    for path in stale(files):
        print(path.relative_to(ROOT))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(files[path], encoding="utf-8")


def main() -> None:
    """Writes what differs, or names it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when something differs")
    options = parser.parse_args()
    files = made(load(PUBLISHED))
    if not options.check:
        write(files)
    elif stale(files):
        sys.exit("not what results.json says: " + ", ".join(str(path.relative_to(ROOT)) for path in stale(files)))


if __name__ == "__main__":
    main()
