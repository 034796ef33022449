"""``lowq run APP`` and ``-r APP``: from a file's or module's name to the application in it.

::

    app.py, folder/app.py      a file, loaded under its stem; inside of a package under its full name
    pkg.module                 whatever is importable; the current folder is
    pkg.module:app, app.py:app this Lowq object of it

Without -r it is what ``[tool.lowq]`` in pyproject.toml says. Without ``:app`` it is the default application if that has
workers, otherwise the only one in the module that has.
"""

import importlib
import importlib.machinery
import importlib.util
import pkgutil
import sys
import tomllib
import traceback
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType

import lowq
from lowq.application import Lowq
from lowq.cli.output import Failure, WrongUsage
from lowq.errors import LowqError

#: Keys of ``[tool.lowq]``.
_KEYS = ("app",)
_OURS = str(Path(lowq.__file__).parent)


def load_given(spec: str | None, *, workers: bool) -> Lowq | None:
    """The application that was named, or else that of the project (`app_of_project`); None: neither says any.

    Raises:
        Failure: as of `load_app`, and of `app_of_project`.
    """
    if spec is not None:
        return load_app(spec, workers=workers)
    found = app_of_project()
    if found is None:
        return None
    app, path = found
    try:
        return load_app(app, workers=workers, folder=path.parent)
    except Failure as failure:
        raise Failure(
            f"{failure.message} ({path} says app = {app!r})", failure.exit_code, trace=failure.trace
        ) from None


def load_app(spec: str, *, workers: bool, folder: Path | None = None) -> Lowq:
    """The application that ``-r`` names. ``workers``: it must have some. ``folder``: where it is looked for; None: the
    current one.

    Raises:
        Failure: there is nothing of that name, it can't be imported, or it has no worker.
    """
    if folder is not None and (folder / spec.partition(":")[0]).is_file():
        spec = str(folder / spec)
    target, attribute = _split(spec)
    here = str(Path.cwd() if folder is None else folder)
    if here not in sys.path:
        sys.path.insert(0, here)
    module = _load_file(Path(target)) if _is_file(target) else _load_module(target)
    return _find_app(module, target, attribute, workers=workers)


def _split(spec: str) -> tuple[str, str]:
    if Path(spec).is_file():
        return spec, ""
    target, _, attribute = spec.partition(":")
    if not target:
        raise WrongUsage(f"{spec}: write app.py, pkg.module or pkg.module:app")
    return target, attribute


# --- the project ---


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
        raise WrongUsage(f"{path}: it can't be read: {error}; repair it, or name the application: -r APP") from None
    tool = document.get("tool")
    settings = tool.get("lowq") if isinstance(tool, dict) else None
    if settings is None:
        return None
    if not isinstance(settings, dict) or (unknown := [name for name in settings if name not in _KEYS]):
        named = f"{unknown[0]!r} is no setting" if isinstance(settings, dict) else "it is no table"
        raise WrongUsage(f"{path}: [tool.lowq]: {named}; it may have: {', '.join(_KEYS)}")
    app = settings.get("app")
    if app is not None and (not isinstance(app, str) or not app.strip()):
        raise WrongUsage(f'{path}: [tool.lowq] app = {app!r}: write app = "shop.workers", or app = "app.py"')
    return app


# --- files ---


def source_folder(spec: str | None) -> Path:
    """The folder that the code of ``-r``, or of the project, is in, as far as that is known without importing it."""
    if spec is None:
        found = app_of_project()
        return Path.cwd() if found is None else found[1].parent
    target, _ = _split(spec)
    return _folder_and_name(Path(target).resolve())[0] if _is_file(target) else Path.cwd()


def _is_file(target: str) -> bool:
    return Path(target).is_file() or target.endswith(".py") or "/" in target


def _folder_and_name(path: Path) -> tuple[Path, str]:
    """The folder that has to be importable for the file, and the module's full name there."""
    folder, names = path.parent, [path.stem]
    while (folder / "__init__.py").is_file() and folder.name.isidentifier():
        names.insert(0, folder.name)
        folder = folder.parent
    if names[-1] == "__init__" and len(names) > 1:
        names.pop()
    return folder, ".".join(names)


def _load_file(path: Path) -> ModuleType:
    if path.is_dir():
        raise WrongUsage(f"{path}: that is a folder; name a file in it, or a package as pkg.module")
    if not path.is_file():
        raise WrongUsage(f"{path}: there is no such file; {_near_files(path)}")
    path = path.resolve()
    folder, name = _folder_and_name(path)
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return _guarded(str(path), lambda: _import_file(name, path))


def _import_file(name: str, path: Path) -> ModuleType:
    """Imports it as everybody else would, so that it is there once; by its path when the name means another."""
    if "." in name:
        module = importlib.import_module(name)
        if module.__file__ is None or Path(module.__file__).resolve() != path:
            raise WrongUsage(f"{path}: its name, {name}, is that of another module here: {module.__file__}")
        return module
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is not None and spec.origin is not None and Path(spec.origin).resolve() == path:
        return importlib.import_module(name)
    if name in sys.modules or name in sys.stdlib_module_names:
        name = f"{name}_"  # such as queue.py: taking the name away would break whoever imports the other
    loader = importlib.machinery.SourceFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _near_files(path: Path) -> str:
    if not path.parent.is_dir():
        return f"there is no folder {path.parent} either"
    names = sorted(item.name for item in path.parent.glob("*.py"))
    return _hint([str(path.parent / name) for name in get_close_matches(path.name, names, 3)], path.parent)


def _hint(near: list[str], folder: Path | str) -> str:
    return f"did you mean {' or '.join(near)}?" if near else f"nothing in {Path(folder).resolve()} has a similar name"


# --- modules ---


def _load_module(name: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise WrongUsage(f"{name}: write app.py, pkg.module or pkg.module:app")

    def load() -> ModuleType:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            # A name that is missing on the way to the module; not one that the module itself imports in vain.
            if error.name and f"{name}.".startswith(f"{error.name}."):
                raise WrongUsage(f"{name}: there is no module {error.name!r}; {_near_modules(error.name)}") from None
            raise

    return _guarded(name, load)


def _near_modules(name: str) -> str:
    parent, _, last = name.rpartition(".")
    if Path(f"{name.replace('.', '/')}.py").is_file():  # shadowed by something that is importable and no package
        return f"did you mean the file {name.replace('.', '/')}.py?"
    prefix = f"{parent}." if parent else ""
    package = sys.modules.get(parent)
    places = list(package.__path__) if package is not None and hasattr(package, "__path__") else [str(Path.cwd())]
    names = sorted(item.name for item in pkgutil.iter_modules(places))
    return _hint([prefix + item for item in get_close_matches(last, names, 3)], places[0])


# --- what goes wrong inside ---


def _guarded(what: str, load: Callable[[], ModuleType]) -> ModuleType:
    """Imports the user's code. What it raises is shown without lowq's own frames."""
    try:
        return load()
    except (Failure, KeyboardInterrupt):
        raise
    except SystemExit as error:
        raise Failure(
            f"{what}: it ended the process while it was imported (sys.exit({error.code!r})); "
            'put what is meant for a direct start behind `if __name__ == "__main__":`',
        ) from None
    except BaseException as error:
        message = f"{what}: it could not be imported ({in_short(error)}), see above"
        raise Failure(message, trace=users_traceback(error)) from None


def in_short(error: BaseException) -> str:
    """The type and the text of an error, in one short line."""
    line = " ".join(f"{type(error).__name__}: {error}".split())
    return line if len(line) <= 200 else line[:199] + "…"


def users_traceback(error: BaseException) -> str:
    """The traceback without our frames and those of the import machinery."""
    summary = traceback.TracebackException.from_exception(error)
    pending: list[tuple[traceback.TracebackException, BaseException | None]] = [(summary, error)]
    while pending:
        item, origin = pending.pop()
        item.stack[:] = _users_frames(item.stack, ours_at_end=not isinstance(origin, LowqError))
        if item.__cause__ is not None:
            pending.append((item.__cause__, origin.__cause__ if origin else None))
        if item.__context__ is not None:
            pending.append((item.__context__, origin.__context__ if origin else None))
    return "".join(summary.format())


def _users_frames(stack: traceback.StackSummary, *, ours_at_end: bool) -> list[traceback.FrameSummary]:
    frames = list(stack)
    while frames and _is_machinery(frames[0]):
        frames.pop(0)
    frames = [frame for frame in frames if not frame.filename.startswith("<frozen importlib")]
    # What we raise on purpose says what is wrong; anything else may be our own mistake and is shown whole.
    while not ours_at_end and frames and frames[-1].filename.startswith(_OURS):
        frames.pop()
    return frames


def _is_machinery(frame: traceback.FrameSummary) -> bool:
    name = frame.filename
    return name.startswith((_OURS, "<frozen importlib")) or name == importlib.__file__


# --- which application ---


def _find_app(module: ModuleType, target: str, attribute: str, *, workers: bool) -> Lowq:
    apps = {name: value for name, value in vars(module).items() if isinstance(value, Lowq)}
    if attribute:
        app = getattr(module, attribute, None)
        if not isinstance(app, Lowq):
            near = get_close_matches(attribute, apps, 1, 0.4) or list(apps)
            what = "there is no such name in it" if app is None else f"it is of type {type(app).__name__}, not Lowq"
            hint = f"did you mean {' or '.join(f'{target}:{name}' for name in near)}?" if near else f"try {target}"
            raise WrongUsage(f"{target}:{attribute}: {what}; {hint}")
        if workers and not app.workers:
            raise WrongUsage(f"{target}:{attribute} registers no worker; decorate one with @{attribute}.worker")
        return app
    if lowq.app.workers:
        return lowq.app
    distinct = {id(app): (name, app) for name, app in apps.items() if app.workers or not workers}
    if len(distinct) > 1:
        names = " or ".join(f"{target}:{name}" for name, _ in distinct.values())
        raise WrongUsage(f"{target} has {len(distinct)} applications; choose one: {names}")
    if distinct:
        return next(iter(distinct.values()))[1]
    if workers and getattr(module, "__file__", "") is None:
        path = target.replace(".", "/")
        raise WrongUsage(f"{target} is a folder: name a file in it, such as {path}/workers.py, or cd {path} first")
    if workers:
        hint = "decorate a class or function in it, or in what it imports, with @lowq.worker"
        raise WrongUsage(f"{target} registers no worker; {hint}")
    return lowq.app
