"""`make docs`: the documentation as a site, from the pages in docs/ and the docstrings of what users import.

1. the pages are copied to build/docs; the README is the first page, and links out of docs/ lead to the repository;
2. the page `reference.md` is made: every name of `lowq.__all__`, `lowq.testing`, `lowq.inspection` and `lowq.admin`;
3. Zensical builds build/site/VERSION; a link or an anchor that leads nowhere fails the build;
4. `llms.txt` lists all pages, one line each; `versions.json` names the versions for the menu, and the address without a
   version leads to the newest.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from packaging.version import Version

import lowq

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build"
PAGES = BUILD / "docs"
SITE = BUILD / "site"
REPOSITORY = "https://github.com/lowq/lowq"
#: Packages whose public names users import.
MODULES = ("lowq", "lowq.testing", "lowq.inspection", "lowq.admin")

CONFIG = """
[project]
site_name = "lowq"
site_description = "Background jobs on Redis, in order per entity"
site_url = "https://lowq.github.io/lowq/{version}/"
docs_dir = "docs"
site_dir = "site/{version}"
strict = true
nav = {nav}

[project.validation]
invalid_links = true
invalid_link_anchors = true
unresolved_references = false # a bracket in a docstring is no link

[[project.extra.social]]
icon = "fontawesome/brands/github"
link = "{repository}"

[project.extra.version]
provider = "mike"

[project.theme]
features = [
    "navigation.sections", "navigation.top", "navigation.path", "content.code.copy", "search.highlight", "toc.follow",
]
font = false # nothing is loaded from elsewhere

[[project.theme.palette]]
media = "(prefers-color-scheme: light)"
scheme = "default"
toggle.icon = "lucide/sun"
toggle.name = "Dark"

[[project.theme.palette]]
media = "(prefers-color-scheme: dark)"
scheme = "slate"
toggle.icon = "lucide/moon"
toggle.name = "Light"

[project.plugins.search]

[project.plugins.mkdocstrings.handlers.python]
paths = ["{root}"]

[project.plugins.mkdocstrings.handlers.python.options]
docstring_style = "google"
heading_level = 3
members_order = "source"
show_root_heading = true
show_root_full_path = false
show_source = false
show_if_no_docstring = false
filters = ["!^_"]
"""


class Page(NamedTuple):
    title: str
    path: str
    text: str


def sections() -> dict[str, list[Page]]:
    """The pages by section, as docs/README.md has them."""
    found: dict[str, list[Page]] = {}
    for part in re.split(r"^## ", (ROOT / "docs" / "README.md").read_text(), flags=re.MULTILINE)[1:]:
        title, _, body = part.partition("\n")
        rows = re.findall(r"^\| \[([^]]+)\]\(([\w-]+\.md)\) \| (.*) \|$", body, re.MULTILINE)
        found[title] = [Page(name, path, re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)) for name, path, text in rows]
    return found


def copy_pages() -> None:
    shutil.rmtree(PAGES, ignore_errors=True)
    shutil.copytree(ROOT / "docs", PAGES)
    for path in PAGES.glob("*.md"):
        path.write_text(_with_links(path.read_text()))
    index = (ROOT / "README.md").read_text()
    index = re.sub(r'(\]\(|src="|srcset=")docs/', r"\1", index)
    index = re.sub(r"\]\((?=[A-Z]+\.md|LICENSE|examples)", "](../", index)
    (PAGES / "index.md").write_text(_with_links(index))
    (PAGES / "README.md").rename(PAGES / "contents.md")


def _with_links(text: str) -> str:
    """Links out of docs/ lead to the repository."""
    text = re.sub(r"\]\(\.\./README\.md", "](index.md", text)
    text = re.sub(r"\]\((?:\./)?README\.md", "](contents.md", text)
    return re.sub(r"\]\(\.\./", f"]({REPOSITORY}/blob/main/", text)


def write_reference() -> None:
    parts = ["# Python\n\nThe names that applications import, by module.\n"]
    for name in MODULES:
        module = import_module(name)
        parts.append(f"\n## {name}\n")
        parts += [f"\n::: {name}.{each}\n" for each in sorted(module.__all__) if not each.startswith("__")]
    (PAGES / "reference.md").write_text("".join(parts))


def write_llms(found: dict[str, list[Page]], folder: Path) -> None:
    """The list of pages for language models: https://llmstxt.org."""
    lines = ["# lowq", "", "> Background jobs on Redis for Python, in order per entity.", ""]
    for title, pages in found.items():
        lines += [f"## {title}", "", *(f"- [{page.title}]({Path(page.path).stem}/): {page.text}" for page in pages), ""]
    (folder / "llms.txt").write_text("\n".join(lines))


def build(version: str) -> Path:
    found = sections()
    found["Reference"].append(Page("Python", "reference.md", "every name that applications import"))
    copy_pages()
    write_reference()
    nav = [{"lowq": "index.md"}, {"Contents": "contents.md"}]
    nav_text = (
        json.dumps(nav)[1:-1]
        + ", "
        + ", ".join(json.dumps({title: [{page.title: page.path} for page in pages]}) for title, pages in found.items())
    )
    config = BUILD / "zensical.toml"
    nav_toml = re.sub(r'("[^"]*"): ', r"\1 = ", f"[{nav_text}]")
    config.write_text(CONFIG.format(version=version, repository=REPOSITORY, root=ROOT, nav=nav_toml))
    target = SITE / version
    shutil.rmtree(target, ignore_errors=True)
    zensical = Path(sys.executable).with_name("zensical")
    subprocess.run([zensical, "build", "--clean", "-f", config], cwd=BUILD, check=True)
    write_llms(found, target)
    write_versions()
    return target


def write_versions() -> None:
    """The versions that were built into SITE, the newest first, and the page that leads to it."""
    names = [path.name for path in SITE.iterdir() if path.is_dir()]
    names.sort(key=Version, reverse=True)
    (SITE / "index.html").write_text(f'<!doctype html><meta http-equiv="refresh" content="0; url={names[0]}/">\n')
    (SITE / "versions.json").write_text(json.dumps([{"version": name, "title": name, "aliases": []} for name in names]))


def main() -> None:
    parser = argparse.ArgumentParser(prog="make docs", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--version", default=lowq.__version__, help="the name of the folder (default: %(default)s)")
    print(build(parser.parse_args().version))


if __name__ == "__main__":
    main()
