"""``lowq completion``: what a shell completes behind ``lowq``."""

import click
from click.shell_completion import get_completion_class

from lowq.cli.failure import USAGE, Failure

SHELLS = ("bash", "zsh", "fish")


@click.command
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print what makes a shell complete verbs and options.

    bash, in ~/.bashrc: eval "$(lowq completion bash)". zsh, in ~/.zshrc: eval "$(lowq completion zsh)". fish: lowq
    completion fish > ~/.config/fish/completions/lowq.fish
    """
    kind, root = get_completion_class(shell), context.find_root()
    if kind is None:
        raise Failure(f"this version of click completes nothing for {shell}", USAGE)
    click.echo(kind(root.command, {}, "lowq", "_LOWQ_COMPLETE").source())
