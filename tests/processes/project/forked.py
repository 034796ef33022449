"""Runs scripts as processes of their own without starting a Python for each."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

#: Imports what most scripts need, and forks for each of them. None looks at what was imported when it collects garbage.
_PARENT = """
import gc, json, os, sys
import fakeredis, lowq, lowq.testing, lowq_web
gc.collect()
gc.freeze()
failed = []
for name, folder, code in json.load(sys.stdin):
    child = os.fork()
    if not child:
        os.chdir(folder)
        sys.path.insert(0, folder)
        exec(compile(code, name, "exec"), {"__name__": "__main__"})
        sys.exit()
    if os.waitpid(child, 0)[1]:
        failed.append(name)
assert not failed, failed
"""


def run_scripts(scripts: Mapping[str, tuple[Path, str]]) -> None:
    """Each of these scripts, by name, in its folder and with an empty embedded store. No warning is let pass."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("LOWQ_", "DJANGO_"))}
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", _PARENT],
        input=json.dumps([[name, str(folder), code] for name, (folder, code) in scripts.items()]),
        env={**clean, "LOWQ_REDIS_URL": "memory://", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "web")])},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
