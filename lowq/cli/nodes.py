"""The verbs that send commands to nodes: quiet, stop, reload."""

from typing import Literal

import click

from lowq.application import Lowq
from lowq.cli.audited import audited
from lowq.cli.group import with_app
from lowq.cli.output import say


def _send(app: Lowq, node: str, command: Literal["quiet", "stop", "reload"]) -> None:
    with audited(app, command, node):
        app.send_command(node, command)


@click.command
@with_app
@click.argument("node")
def quiet(app: Lowq, node: str) -> None:
    """Have a node take nothing more.

    It finishes what runs, gives its shards to other nodes and stays; `lowq nodes` names the nodes.
    """
    _send(app, node, "quiet")
    say(f"sent quiet to {node}; `lowq nodes` shows when it is")


@click.command
@with_app
@click.argument("node")
def stop(app: Lowq, node: str) -> None:
    """Stop a node, in order, as TERM does."""
    _send(app, node, "stop")
    say(f"sent stop to {node}")


@click.command
@with_app
@click.argument("node")
def reload(app: Lowq, node: str) -> None:
    """Have a node go on with new code, as HUP does.

    It loads what is on its disk now. If that can't be run, it goes on with what it has, and its log says why. Otherwise
    it finishes what runs and goes on in the same process, with its shards. A supervisor is sent HUP instead.
    """
    _send(app, node, "reload")
    say(f"sent reload to {node}; its log says what becomes of it")
