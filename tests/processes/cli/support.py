"""The command line in this process, against one Redis."""

import json
import re
from typing import Any

from click.testing import CliRunner, Result

from lowq import Lowq
from lowq.cli import main


class Cli:
    """``lowq ...`` against one Redis, and the same queues seen through the library."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.app = Lowq(redis_url=url)

    def __call__(self, *args: str, code: int = 0, stdin: str | bytes | None = None) -> Result:
        result = CliRunner().invoke(main, [*args, "--redis-url", self.url], input=stdin)
        assert result.exit_code == code, f"{args}: {result.exit_code}\n{result.output}\n{result.exception!r}"
        return result

    def json(self, *args: str, code: int = 0, stdin: str | None = None) -> Any:
        """What --json gives: one document on one line, and nothing else."""
        text = self(*args, "--json", code=code, stdin=stdin).stdout
        assert text.count("\n") == 1
        return json.loads(text)

    def push(self, *jobs: dict[str, Any]) -> None:
        self.app.queue("Orders", 3).push(jobs)


def lines_of(result: Result) -> list[str]:
    return re.sub(r"\x1b\[\d*m", "", result.stdout).splitlines()
