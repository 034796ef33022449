"""``lowq init``: the first files of a new project; ``lowq completion``: what a shell completes behind ``lowq``."""

import re
import shlex
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from lowq.cli.output import Failure, WrongUsage, echo_lines, say

_TEMPLATES = Path(__file__).parent / "project"
#: The files for containers, systemd and Kubernetes: the folder deploy/ of the repository, of which a wheel has a copy.
_DEPLOY = _TEMPLATES / "deploy"
if not _DEPLOY.is_dir():
    _DEPLOY = Path(__file__).parents[2] / "deploy"
#: What is written, by name; templates end in -tpl, as they are no files of lowq's own.
_COMMON = {name: _DEPLOY / name for name in ("Dockerfile", ".dockerignore", "compose.yaml")}
_FILES = _COMMON | {name: _TEMPLATES / f"{name}-tpl" for name in ("workers.py", "test_workers.py", "pyproject.toml")}
_FASTAPI_FILES = _COMMON | {
    name: _TEMPLATES / "fastapi" / f"{name}-tpl"
    for name in ("workers.py", "api.py", "database.py", "test_api.py", "compose.override.yaml", "pyproject.toml")
}


@click.command
@click.argument("folder", required=False, default=".", type=click.Path(file_okay=False, path_type=Path))
@click.option("--fastapi", is_flag=True, help="With a FastAPI application and an async database session.")
@click.option("--deploy", is_flag=True, help="With a folder deploy/: systemd, Kubernetes, alerts, a Grafana dashboard.")
def init(folder: Path, *, fastapi: bool, deploy: bool) -> None:
    """Write the first files of a project: a worker, its test, a Dockerfile, a compose file.

    Into FOLDER, by default the current one, after which the project is named. What is there stays as it is: with a file
    of one of these names nothing is written, except that a pyproject.toml is left to you.
    """
    files = dict(_FASTAPI_FILES if fastapi else _FILES)
    if deploy:
        found = sorted(path for path in _DEPLOY.rglob("*") if path.is_file() and path.name not in _COMMON)
        files |= {(Path("deploy") / path.relative_to(_DEPLOY)).as_posix(): path for path in found}
    there = [name for name in files if name != "pyproject.toml" and (folder / name).exists()]
    if there:
        raise WrongUsage(f"{folder / there[0]} is there already, so nothing was written; name another folder")
    has_project = (folder / "pyproject.toml").exists()
    if has_project:
        del files["pyproject.toml"]
    # A project that depends on lowq can't have its name.
    project = re.sub(r"[^a-z0-9]+|^lowq$", "-", folder.resolve().name.lower()).strip("-") or "orders"
    try:
        for name, source in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            with (folder / name).open("x", encoding="utf-8") as file:
                file.write(source.read_text(encoding="utf-8").replace("PROJECT", project))
    except OSError as error:
        raise Failure(f"{folder}: it can't be written: {error}") from None
    echo_lines([f"wrote {folder / name}" for name in files])
    if has_project:
        say(f'add to {folder / "pyproject.toml"}:\n\n[tool.lowq]\napp = "workers"\n')
    go_there = "" if folder == Path() else f"cd {shlex.quote(str(folder))} && "
    install = "pip install -e '.[dev]' && " if fastapi else "pip install pytest && "
    steps = (
        [
            "  uvicorn api:app        # with a Redis on this machine; the dashboard is at /ops/lowq/",
            "  lowq run               # in another terminal: a node",
            "  docker compose up      # Valkey, PostgreSQL, the application, a node; it says which passwords to set",
        ]
        if fastapi
        else [
            "  lowq run --embedded    # a node, with a store inside of it",
            "  docker compose up      # Valkey, a node, the dashboard; it says which password to set",
        ]
    )
    tests = f"  {go_there}{install}python -m pytest       # needs no Redis"
    echo_lines(["", "what now:", tests, *steps])


@click.command
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print what makes a shell complete verbs and options.

    bash, in ~/.bashrc: eval "$(lowq completion bash)". zsh, in ~/.zshrc: eval "$(lowq completion zsh)". fish: lowq
    completion fish > ~/.config/fish/completions/lowq.fish
    """
    kind, root = get_completion_class(shell), context.find_root()
    if kind is None:
        raise WrongUsage(f"this version of click completes nothing for {shell}")
    click.echo(kind(root.command, {}, "lowq", "_LOWQ_COMPLETE").source())
