"""New code for a node: the same command is executed anew, by the same process, which goes on with its leases."""

import atexit
import json
import os
import signal
import sys
from dataclasses import dataclass, field

from lowq.cli.failure import Failure
from lowq.cli.supervised import program
from lowq.node.reload import NewCode
from lowq.supervisor.dashboard import DashboardProcess
from lowq.supervisor.new_code import why_not
from lowq.supervisor.supervisor import current_folder, has_terminal

#: What the old code leaves to the new one. It is for this process alone: whatever inherits it has another pid.
_VARIABLE = "LOWQ_RELOADED"


@dataclass(slots=True)
class Launch:
    """How this process was started, and what its code goes on with, or leaves to the next. To be made before the
    application is loaded, which may change folder, environment and arguments.
    """

    folder: str = field(default_factory=current_folder)
    command: list[str] = field(default_factory=lambda: [*program(), *sys.argv[1:]])
    has_terminal: bool = field(default_factory=has_terminal)
    environment: dict[str, str] = field(default_factory=dict)
    #: The nonce of the leases that the code before this one has kept; None: there was none.
    nonce: str | None = None
    #: Where its dashboard was, if there was one.
    web: str | None = None
    #: The dashboard of this code.
    dashboard: DashboardProcess | None = None
    #: The nonce of the leases that this code has kept for the next one.
    succeeds_as: str | None = None

    def __post_init__(self) -> None:
        carried = os.environ.pop(_VARIABLE, None)
        self.environment = dict(os.environ)
        if carried is not None and (values := json.loads(carried))["pid"] == os.getpid():
            self.nonce, self.web = values["nonce"], values["web"]

    def new_code(self, refusal: str) -> NewCode:
        """For the node that this process runs. ``refusal``: why it can't have any; empty: it can."""
        if not hasattr(signal, "SIGHUP"):
            refusal = "this system can't replace the code of a process: start another node, then stop this one"
        return NewCode(
            check=lambda: why_not([*self.command, "--check"], self.folder, self.environment),
            terminal_closed=lambda: self.has_terminal and not has_terminal(),
            on_kept=self._end_dashboard,
            refusal=refusal,
        )

    def _end_dashboard(self) -> None:
        if self.dashboard is not None:
            self.dashboard.stop(at_once=True)

    def go_on(self) -> None:
        """If the node has kept its leases for new code, ends this code and does not return. What would be called at the
        end of the process is called first.

        Raises:
            Failure: the system can't execute it.
        """
        if self.succeeds_as is None:
            return
        atexit._run_exitfuncs()
        bind = None if self.dashboard is None else self.dashboard.bind
        carried = json.dumps({"pid": os.getpid(), "nonce": self.succeeds_as, "web": bind})
        try:
            os.chdir(self.folder)
            os.execve(self.command[0], self.command, {**self.environment, _VARIABLE: carried})
        except OSError as error:
            raise Failure(f"the new code could not be started: {error}; the leases of the node run out") from None
