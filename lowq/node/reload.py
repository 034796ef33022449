"""New code for a node that stays in its place: the same process, the same name, the same leases.

::

    HUP  --> check     another process loads what is on the disk now; if that fails, nothing changes
         --> finish    no batch is begun any more; the leases are renewed as ever
         --> keep      everything is reported; the leases get their whole time
         --> exec      whoever started the node does it, with the nonce of the leases
         --> resume    the new code asks for the leases with that nonce, and goes on

If the process dies at any of these arrows, its leases run out, as after any crash. Nothing is in flight from `keep` on.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lowq.logs import describe, get_log

log = get_log("lowq.node")


@dataclass(frozen=True, slots=True)
class NewCode:
    """The way a node gets new code, given by the program that started it. `check` runs in a thread of its own."""

    #: Loads the code on the disk in another process. Returns why it can't be run, or None.
    check: Callable[[], str | None]
    #: Whether the terminal of the process was closed: then HUP says that, and is no request.
    terminal_closed: Callable[[], bool]
    #: Called last, when everything is finished and the leases are kept.
    on_kept: Callable[[], object]
    #: Why this node can't take new code, and what to do instead; empty: it can.
    refusal: str = ""
    #: The process that has started it and starts others in its place: pid, started_at, version. Empty: there is none.
    supervisor: Mapping[str, Any] = field(default_factory=dict)


#: Of a node that was not started by `lowq run`.
NOT_OURS = "it was not started by `lowq run`: restart its program"


class Reload:
    """How far a node is with its change to new code. Only for the thread that is in `Node.run`; the check has a thread
    of its own, which calls ``on_checked`` at its end, and then `checked` is to be called.
    """

    def __init__(self, new_code: NewCode | None, on_checked: Callable[[], object]) -> None:
        self._new_code = new_code
        self._on_checked = on_checked
        #: "again": it was asked for another time while the code was checked, and may have changed since.
        self._state: Literal["idle", "checking", "again", "finishing"] = "idle"
        self._check: threading.Thread | None = None
        #: Why the code that was checked can't be run, or None.
        self._refused: str | None = None
        #: Monotonic time at which what still runs is cut short, once `is_finishing`.
        self.finish_by = float("inf")

    @property
    def refusal(self) -> str:
        """Why the node can't take new code, and what to do instead; empty: it can."""
        return NOT_OURS if self._new_code is None else self._new_code.refusal

    def details(self) -> dict[str, Any]:
        """Fields of the node's entry."""
        return {"reload_refusal": self.refusal, "supervisor": self._new_code.supervisor if self._new_code else {}}

    @property
    def is_finishing(self) -> bool:
        """Whether the code can be run, and running batches are being finished for it."""
        return self._state == "finishing"

    def request(self, node: str) -> None:
        """Has the new code checked. ``node``: its name, for the log."""
        if self._check is not None:
            self._state = "again"
            log.info("node %s checks the code once more after that: it may have changed", node)
        elif self._state == "idle":  # once it finishes, it loads what is on the disk then
            self._begin(node)

    def checked(self, node: str, seconds: float, busy: Callable[[], Sequence[str]]) -> bool:
        """Ends the check. Returns whether it `is_finishing` now, for so many seconds. ``busy``: running batches."""
        if self._check is None:
            return False
        self._check.join()
        self._check = None
        if self._state == "again":
            self._begin(node)
        elif self._state == "checking" and self._refused is not None:
            self._state = "idle"
            log.error(
                "node %s goes on with the code that it has, as the new code can't be run: %s", node, self._refused,
                extra={"event": "reload_failed"},
            )  # fmt: skip
        elif self._state == "checking":
            self._state = "finishing"
            self.finish_by = time.monotonic() + seconds
            runs = "; ".join(busy())
            log.info(
                "node %s changes to the new code%s", node, f", waiting up to {seconds:g} s for {runs}" if runs else "",
                extra={"event": "reload"},
            )  # fmt: skip
            return True
        return False

    def call_off(self, node: str) -> None:
        """Calls the change off: the node ends, or takes nothing more."""
        if self._state != "idle":
            self._state = "idle"
            log.warning("node %s is not reloaded any more", node, extra={"event": "reload_refused"})

    def kept(self) -> None:
        """Lets the new code be executed: the leases are kept."""
        assert self._new_code is not None
        self._new_code.on_kept()

    def _begin(self, node: str) -> None:
        self._state = "checking"
        log.info("node %s reloads: it checks the new code", node, extra={"event": "reload"})
        self._check = threading.Thread(target=self._run_check, name="lowq-reload", daemon=True)
        self._check.start()

    def _run_check(self) -> None:
        assert self._new_code is not None
        try:
            self._refused = self._new_code.check()
        except Exception as error:
            self._refused = describe(error)
        self._on_checked()
