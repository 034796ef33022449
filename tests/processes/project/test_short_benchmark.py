"""A short run of the benchmark: the figure that takes the least time."""

import json
import subprocess
import sys
from pathlib import Path

from tests.waiting import PATIENCE

ROOT = Path(__file__).parents[3]
#: What is kept of the run goes to a folder of the test.
PROGRAM = """
import sys
from pathlib import Path
from benchmarks import __main__ as bench

bench.LAST = Path(sys.argv.pop(1))
bench.main()
"""


def test_a_short_run_measures_and_shows_its_table(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "bench.json"), "--quick", "--only", "start"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=2 * PATIENCE, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "bench.json").read_text())
    assert results["failed"] == {}, done.stdout
    assert [value > 0 for value in results["figures"]["start_up"]] == [True]
    assert "| node start to first job |" in done.stdout
