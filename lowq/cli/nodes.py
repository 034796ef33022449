"""The verbs that send commands to nodes: quiet, stop."""

import click

from lowq.application import Lowq
from lowq.cli.group import with_app
from lowq.cli.output import say


@click.command
@with_app
@click.argument("node")
def quiet(app: Lowq, node: str) -> None:
    """Have a node take nothing more.

    It finishes what runs, gives its shards to other nodes and stays; `lowq nodes` names the nodes.
    """
    app.send_command(node, "quiet")
    say(f"sent quiet to {node}; `lowq nodes` shows when it is")


@click.command
@with_app
@click.argument("node")
def stop(app: Lowq, node: str) -> None:
    """Stop a node, in order, as TERM does."""
    app.send_command(node, "stop")
    say(f"sent stop to {node}")
