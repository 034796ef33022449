"""``--reload``: watches source code, for development."""

import logging
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from lowq.errors import ConfigError
from lowq.logs import get_log

log = get_log("lowq.supervisor")

#: Folders with code that nobody edits; hidden ones are left out too.
_IGNORED = {"__pycache__", "node_modules", "site-packages"}


class SourceWatcher:
    """Calls ``changed`` with a few words whenever Python files in the folders, or below them, have changed.

    Raises:
        ConfigError: the extra `reload` is not installed.
    """

    def __init__(self, folders: Iterable[Path], changed: Callable[[str], object]) -> None:
        try:
            import watchfiles
        except ModuleNotFoundError:
            raise ConfigError("--reload needs watchfiles: pip install 'lowq[reload]'") from None
        logging.getLogger("watchfiles").setLevel(logging.WARNING)  # what it says of each change, we say
        self._watch = watchfiles.watch
        self._folders = outermost(folders)
        self._changed = changed
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lowq-reload", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def _run(self) -> None:
        shown = ", ".join(map(str, self._folders))
        try:
            said = False
            # The first round, perhaps without any change, comes when the watch stands.
            for changes in self._watch(
                *self._folders, watch_filter=self._is_source, stop_event=self._closed, yield_on_timeout=True,
                rust_timeout=500, ignore_permission_denied=True,
            ):  # fmt: skip
                if not said:
                    said = True
                    log.info("watching Python files in %s", shown, extra={"event": "watching"})
                if changes:
                    self._changed(_named({Path(path) for _, path in changes}))
        except Exception as error:
            log.exception("%s can't be watched any more: %s", shown, error, extra={"event": "watch_failed"})

    def close(self) -> None:
        """Ends the watch, and the thread."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()

    def _is_source(self, _change: Any, path: str) -> bool:
        return any(is_source(Path(path), folder) for folder in self._folders)


def is_source(path: Path, folder: Path) -> bool:
    """Whether that is a Python file below the folder that somebody may edit."""
    if path.suffix != ".py" or not path.is_relative_to(folder):
        return False
    parts = path.relative_to(folder).parts
    return not any(part.startswith(".") or part in _IGNORED for part in parts)


def outermost(folders: Iterable[Path]) -> list[Path]:
    """The folders, resolved, without those that lie in others of them."""
    resolved = dict.fromkeys(folder.resolve() for folder in folders)
    return [folder for folder in resolved if not any(other in folder.parents for other in resolved)]


def _named(paths: set[Path]) -> str:
    names = sorted(path.name for path in paths)
    return f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''} changed"
