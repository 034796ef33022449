"""``manage.py lowq VERB``: lowq's command line, with the application of the project."""

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from django.core.checks import run_checks
from django.core.management.base import BaseCommand, CommandError, SystemCheckError

import lowq
from lowq.cli import main

#: The application for ``-r``, here and in the processes that a supervisor starts.
APP = "lowq.contrib.django.node"
#: Options that ``manage.py`` has acted upon before.
_OF_DJANGO = ("--settings", "--pythonpath")
_HELP = ("-h", "--help", "help", "--version")


class Command(BaseCommand):
    """Hands its arguments to lowq's own command line."""

    help = "Runs nodes, shows and changes queues: lowq's command line, with the workers of this project."
    requires_system_checks: Sequence[str] = ()

    def run_from_argv(self, argv: list[str]) -> None:
        """Becomes ``lowq VERB``: the process, its arguments and its exit code are lowq's."""
        arguments = _without_django_options(argv[2:])
        script = str(Path(argv[0]).resolve().parent)
        paths = [script, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))  # for processes that are started as lowq run
        try:
            sys.argv = ["lowq", *_with_app(arguments)]
        except CommandError as error:
            self.stderr.write(str(error))
            sys.exit(error.returncode)
        main(prog_name=f"{Path(argv[0]).name} lowq")

    def print_help(self, prog_name: str, subcommand: str) -> None:
        """For ``manage.py help lowq``."""
        main(["--help"], prog_name=f"{prog_name} {subcommand}", standalone_mode=False)

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """For ``call_command("lowq", "stats", "Orders")``."""
        parser.add_argument("arguments", nargs=argparse.REMAINDER)

    def handle(self, *_args: Any, arguments: list[str], **options: Any) -> None:
        """Runs a verb in the calling process."""
        given = _with_app(arguments)
        try:
            with redirect_stdout(options.get("stdout") or sys.stdout):
                code = main(given, prog_name="lowq", standalone_mode=False)
        except Exception as error:
            raise CommandError(str(error)) from error
        if code:
            raise CommandError(f"lowq {' '.join(arguments)}: it did not succeed", returncode=code)


def _without_django_options(arguments: Sequence[str]) -> list[str]:
    left: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument == "--":
            return [*left, argument, *rest]
        if argument in _OF_DJANGO:
            next(rest, None)
        elif argument.partition("=")[0] not in _OF_DJANGO:
            left.append(argument)
    return left


def _with_app(arguments: Sequence[str]) -> list[str]:
    """The arguments, with the project's application for a verb that works on one.

    Raises:
        CommandError: the settings are wrong, or a node would have no worker.
    """
    if not arguments or arguments[0] in _HELP or "--help" in arguments or "-h" in arguments:
        return list(arguments)
    verb = main.commands["run"] if arguments[0].startswith("-") else main.commands.get(arguments[0])
    if verb is None or not any(param.name == "require" for param in verb.params):
        return list(arguments)
    errors = [problem for problem in run_checks(tags=["lowq"]) if problem.is_serious() and not problem.is_silenced()]
    if errors:
        raise SystemCheckError("\n".join(map(str, errors)))
    if verb.name == "run" and not lowq.app.workers:
        raise CommandError(
            "this project has no worker: decorate one with @lowq.worker in the workers.py of an installed app, or name "
            "the queues of tasks in settings.TASKS"
        )
    return [f"--require={APP}", *arguments]
