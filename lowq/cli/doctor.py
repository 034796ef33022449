"""The verb doctor: what is wrong, why, and what to do; and repairs."""

import dataclasses
import textwrap
from contextlib import nullcontext
from difflib import get_close_matches

import click

from lowq.application import Lowq
from lowq.cli.group import audited, json_option, queues_argument, with_app
from lowq.cli.output import Progress, WrongUsage, count, echo_json, echo_lines, fail_if, message_of, terminal_width
from lowq.errors import RedisRefused, RedisUnavailable
from lowq.logs import printable
from lowq.operate.findings import Finding, Severity, codes

_COLOURS: dict[Severity, str] = {"ok": "green", "warning": "yellow", "error": "red"}
#: Columns of the left side, and of the text where the terminal sets no bound.
_INDENT, _WIDTH = 9, 100


@click.command
@with_app
@queues_argument
@click.option("-q", "--queue", "more", multiple=True, metavar="QUEUE", help="The same as an argument; repeatable.")
@click.option("--repair", is_flag=True, help="Repair what can be repaired without losing anything.")
@click.option(
    "--ignore", multiple=True, metavar="CODE", help="A finding that is no reason for exit code 1. Repeatable."
)
@json_option
def doctor(
    app: Lowq, queues: tuple[str, ...], more: tuple[str, ...], repair: bool, ignore: tuple[str, ...], as_json: bool
) -> None:
    """Look for anything that should not be.

    Checks Redis, the registries, the leases and all jobs, of these queues or of all, while nodes go on working. Says of
    each finding how it may have come, what it means for jobs, and what to do.

    Exit code 1 when there is a warning or an error left, 0 when there is none but those to --ignore: `--ignore
    persistence` for a Redis that may forget. Each finding has its code in brackets, and --json has it.
    """
    _check_codes(ignore)
    try:
        with (
            audited(app, "repair", ", ".join((*queues, *more)) or "all queues") if repair else nullcontext(),
            Progress("ids and keys") as progress,
        ):
            findings = app.examine(
                *queues,
                *more,
                repair=repair,
                on_progress=lambda done, total: progress.show(done, done / total if total else None),
            )
    except (RedisUnavailable, RedisRefused) as error:
        if as_json:  # who reads it finds the reason there, too
            echo_json({"healthy": False, "findings": [], "error": message_of(error)})
        raise
    wrong = [finding for finding in findings if finding.wrong and finding.code not in ignore]
    if as_json:
        found = [_document(finding, ignored=finding.wrong and finding.code in ignore) for finding in findings]
        echo_json({"healthy": not wrong, "findings": found})
    else:
        for finding in findings:
            echo_lines(_block(finding, ignored=finding.code in ignore))
        echo_lines(["", _summary(findings, ignore, repair=repair)])
    fail_if(wrong)


def _check_codes(ignore: tuple[str, ...]) -> None:
    for code in ignore:
        if code not in codes():
            near = get_close_matches(code, codes(), 3)
            hint = f"did you mean {' or '.join(near)}?" if near else f"codes are {', '.join(sorted(codes()))}"
            raise WrongUsage(f"--ignore {code}: there is no such finding; {hint}")


def _document(finding: Finding, *, ignored: bool) -> dict[str, object]:
    return dataclasses.asdict(finding) | {"wrong": finding.wrong, "ignored": ignored}


def _block(finding: Finding, *, ignored: bool) -> list[str]:
    """One line for what is as it should be or to be ignored, a paragraph for what is not."""
    head = f"{finding.queue}: {finding.what}" if finding.queue else finding.what
    mark = click.style(f"{finding.severity:<{_INDENT}}", fg=_COLOURS[finding.severity])
    if finding.severity == "ok":
        return [mark + printable(head)]
    lines = [mark + printable(f"{head} [{finding.code}]{', ignored' if ignored else ''}")]
    if ignored:
        return lines
    listed = ", ".join(finding.ids)
    more = finding.count - len(finding.ids)
    parts = [
        ("ids", f"{listed}{f' and {more:,} more' if more > 0 else ''}" if listed else ""),
        ("shards", ", ".join(map(str, finding.shards)) if listed else ""),
        ("cause", finding.cause),
        ("effect", finding.effect),
        ("do", finding.advice if finding.wrong else ""),
        ("repaired", _repaired(finding)),
    ]
    width = min(terminal_width(), _INDENT + 10 + _WIDTH)
    for name, text in parts:
        if text:
            indent = " " * _INDENT + f"{name:<10}"
            lines += textwrap.wrap(
                printable(text), max(int(width), 40), initial_indent=indent, subsequent_indent=" " * len(indent),
                break_long_words=False, break_on_hyphens=False,
            )  # fmt: skip
    return lines


def _repaired(finding: Finding) -> str:
    if not finding.repaired:
        return ""
    return "all of it" if not finding.wrong else f"{finding.repaired:,} of {finding.count:,}; the rest was left alone"


def _summary(findings: list[Finding], ignore: tuple[str, ...], *, repair: bool) -> str:
    ignored = sum(finding.wrong and finding.code in ignore for finding in findings)
    wrong = [finding for finding in findings if finding.wrong and finding.code not in ignore]
    repaired = sum(finding.repaired > 0 for finding in findings)
    said = f"; repaired: {count(repaired, 'finding')}, in whole or in part" if repaired else ""
    if ignored:
        said += f"; {ignored} ignored"
    if not wrong:
        return f"nothing {'else ' if ignored else ''}is wrong{' any more' if repaired else ''}{said}"
    errors = sum(finding.severity == "error" for finding in wrong)
    parts = [count(number, noun) for number, noun in ((errors, "error"), (len(wrong) - errors, "warning")) if number]
    repairable = sum(finding.repairable for finding in wrong)
    hint = f"; --repair can repair {repairable} of them" if repairable and not repair else ""
    return " and ".join(parts) + hint + said
