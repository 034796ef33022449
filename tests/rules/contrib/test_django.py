"""`lowq.contrib.django`: the test cases of the project in `django_site`, run by Django's own runner in a process of its
own, as Django is set up once in a process and with all applications of it.
"""

import os
import subprocess
import sys
from pathlib import Path

from tests.waiting import PATIENCE

ROOT = Path(__file__).resolve().parents[3]
SITE = "tests.rules.contrib.django_site"


def test_the_rules_of_the_installed_app_and_of_the_tasks_backend(tmp_path: Path) -> None:
    runner = ["-W", "error", "-m", "django", "test", "--pattern", "cases_*.py", "--top-level-directory", str(ROOT)]
    ran = subprocess.run(
        [sys.executable, *runner, str(ROOT / SITE.replace(".", "/"))],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "web")]),
            "DJANGO_SETTINGS_MODULE": f"{SITE}.settings",
        },
        cwd=tmp_path,  # where the databases are
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "Ran 75 tests" in ran.stderr, ran.stderr


def test_where_django_is_missing_it_is_named() -> None:
    code = "import sys; sys.modules['django'] = None; import lowq.contrib.django"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert "lowq.contrib.django needs Django: pip install 'lowq[django]'" in ran.stderr
