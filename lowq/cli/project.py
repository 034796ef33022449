"""What the project in the current folder says: ``[tool.lowq]`` in its pyproject.toml."""

import tomllib
from pathlib import Path

from lowq.cli.failure import USAGE, Failure

#: What it may say.
_KEYS = ("app",)


def app_of_project(here: Path | None = None) -> tuple[str, Path] | None:
    """The application that commands take without `-r`, as that has it, and the file that says so: the nearest
    pyproject.toml, in that folder (by default the current one) or above. None: it says nothing.

    Raises:
        Failure: it can't be read, or makes no sense.
    """
    here = here or Path.cwd()
    for folder in (here, *here.parents):
        path = folder / "pyproject.toml"
        if path.is_file():
            app = _read(path)
            return None if app is None else (app, path)
    return None


def _read(path: Path) -> str | None:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise Failure(f"{path}: it can't be read: {error}; repair it, or name the application: -r APP", USAGE) from None
    tool = document.get("tool")
    settings = tool.get("lowq") if isinstance(tool, dict) else None
    if settings is None:
        return None
    if not isinstance(settings, dict) or (unknown := [name for name in settings if name not in _KEYS]):
        named = f"{unknown[0]!r} is no setting" if isinstance(settings, dict) else "it is no table"
        raise Failure(f"{path}: [tool.lowq]: {named}; it may have: {', '.join(_KEYS)}", USAGE)
    app = settings.get("app")
    if app is not None and (not isinstance(app, str) or not app.strip()):
        raise Failure(f'{path}: [tool.lowq] app = {app!r}: write app = "shop.workers", or app = "app.py"', USAGE)
    return app
