"""``lowq init``: the first files of a new project; ``lowq completion``: what a shell completes behind ``lowq``."""

import shlex
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from lowq.cli.output import Failure, WrongUsage, echo_lines, say

#: The files; what is in them is in the folder `project`, as NAME-tpl.
_FILES = ("workers.py", "test_workers.py", "compose.yaml", "pyproject.toml")
_TEMPLATES = Path(__file__).parent / "project"


@click.command
@click.argument("folder", required=False, default=".", type=click.Path(file_okay=False, path_type=Path))
def init(folder: Path) -> None:
    """Write the first files of a project: a worker, its test, a compose file.

    Into FOLDER, by default the current one. What is there stays as it is: with a file of one of these names nothing is
    written, except that a pyproject.toml is left to you.
    """
    there = [name for name in _FILES if name != "pyproject.toml" and (folder / name).exists()]
    if there:
        raise WrongUsage(f"{folder / there[0]} is there already, so nothing was written; name another folder")
    has_project = (folder / "pyproject.toml").exists()
    names = [name for name in _FILES if not (has_project and name == "pyproject.toml")]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            with (folder / name).open("x", encoding="utf-8") as file:
                file.write((_TEMPLATES / f"{name}-tpl").read_text(encoding="utf-8"))
    except OSError as error:
        raise Failure(f"{folder}: it can't be written: {error}") from None
    echo_lines([f"wrote {folder / name}" for name in names])
    if has_project:
        say(f'add to {folder / "pyproject.toml"}:\n\n[tool.lowq]\napp = "workers"\n')
    go_there = "" if folder == Path() else f"cd {shlex.quote(str(folder))} && "
    echo_lines(
        [
            "",
            "what now:",
            f"  {go_there}python -m pytest       # without Redis, where pytest is installed",
            "  lowq run --embedded    # a node, with a store inside of it",
            "  docker compose up      # Redis, a node, the dashboard",
        ]
    )


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
