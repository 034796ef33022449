"""``lowq web-user NAME``: a line for the file of the dashboard's users."""

import sys

import click

from lowq.cli.failure import USAGE, Failure
from lowq.cli.output import echo_lines
from lowq.errors import ConfigError
from lowq.operate.logins import line_of


@click.command("web-user")
@click.argument("name")
@click.option("--role", type=click.Choice(["read", "admin"]), default="read", show_default=True, help="admin may act.")
def web_user(name: str, role: str) -> None:
    """Make the line of a user of the dashboard, with a password.

    It asks for the password, or reads it from the standard input. LOWQ_WEB_USERS names the file that lines like this
    are in: lowq web-user ann --role admin >> users
    """
    if sys.stdin.isatty():
        password: str = click.prompt("Password", hide_input=True, confirmation_prompt=True, err=True)
    else:
        password = sys.stdin.readline().rstrip("\r\n")
    try:
        line = line_of(name, password, role)
    except ConfigError as error:
        raise Failure(str(error), USAGE) from None
    echo_lines([line])
