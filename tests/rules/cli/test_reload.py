"""What ``--reload`` watches."""

from pathlib import Path

from lowq.cli.run import is_source, outermost
from tests.rows import case


def test_python_files_that_somebody_may_edit_are_source() -> None:
    rows: list[tuple[str, bool]] = [
        ("app.py", True),
        ("shop/workers/orders.py", True),
        ("app.pyc", False),
        (".app.py", False),  # what editors write
        (".venv/lib/python3.11/site-packages/redis/client.py", False),
        ("shop/__pycache__/app.py", False),
        ("web/node_modules/gyp/gyp.py", False),
        ("../elsewhere/app.py", False),
    ]
    for path, is_one in rows:
        with case(path, is_one):
            folder = Path("/home/.hidden/project")  # what lies above doesn't matter
            assert is_source(Path(f"/home/.hidden/project/{path}").resolve(), folder) is is_one


def test_a_folder_inside_of_another_is_not_watched_twice(tmp_path: Path) -> None:
    shop, other = tmp_path / "shop", tmp_path / "other"
    workers = shop / "workers"
    for folder in (workers, other):
        folder.mkdir(parents=True)
    assert outermost([workers, shop, other, shop / "workers" / ".."]) == [shop, other]
