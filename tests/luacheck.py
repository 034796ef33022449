"""luacheck over the Lua scripts as Redis gets them: `python -m tests.luacheck`.

A script alone is not whole: it calls functions of the library. So every script is assembled first, and the
output names the script, the line of the assembled text, and that line itself. Exits as luacheck does: 0
clean, 1 warnings, 2 and more errors; 2 also with nothing to check, or to check with.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from lowq.store.calls import load_scripts

CONFIG = Path(__file__).resolve().parent.parent / ".luacheckrc"

# push.lua:12:7-9: (W211) unused variable 'id'
_FINDING = re.compile(r"^(?P<name>[\w-]+)\.lua:(?P<line>\d+):(?P<column>[\d-]+): (?P<message>.*)$")


def main() -> int:
    luacheck = shutil.which("luacheck")
    if luacheck is None:
        print("luacheck is missing. On Debian or Ubuntu: sudo apt-get install lua-check", file=sys.stderr)
        return 2
    scripts = {name: script.source for name, script in load_scripts().items()}
    if not scripts:
        print("luacheck: there are no scripts to check", file=sys.stderr)
        return 2
    status, findings = check(luacheck, scripts)
    for finding in findings:
        print(finding)
    summary = "no findings" if status == 0 else f"{len(findings)} findings"
    print(f"luacheck: {summary} in {len(scripts)} assembled scripts")
    return status


def check(luacheck: str, scripts: Mapping[str, str]) -> tuple[int, list[str]]:
    """luacheck's exit status and its findings, for assembled scripts by name."""
    with tempfile.TemporaryDirectory(prefix="lowq-luacheck-") as directory:
        for name, source in scripts.items():
            (Path(directory) / f"{name}.lua").write_text(source)
        result = subprocess.run(
            [luacheck, "--config", CONFIG, "--formatter", "plain", "--codes", "--ranges", "--no-cache", "."],
            cwd=directory,
            capture_output=True,
            text=True,
            check=False,
        )
    lines = (result.stdout + result.stderr).splitlines()
    return result.returncode, [_with_its_line(line.removeprefix("./"), scripts) for line in lines if line]


def _with_its_line(finding: str, scripts: Mapping[str, str]) -> str:
    match = _FINDING.match(finding)
    if match is None or match["name"] not in scripts:
        return finding
    source = scripts[match["name"]].splitlines()[int(match["line"]) - 1]
    return f"{match['name']}, assembled line {match['line']}: {match['message']}\n    {source.strip()}"


if __name__ == "__main__":
    sys.exit(main())
