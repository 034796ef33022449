"""New code for a node that stays in its place: the same process, the same name, the same leases.

::

    HUP  --> check     another process loads what is on the disk now; if that fails, nothing changes
         --> finish    no batch is begun any more; the leases are renewed as ever
         --> keep      everything is reported; the leases get their whole time
         --> exec      whoever started the node does it, with the nonce of the leases
         --> resume    the new code asks for the leases with that nonce, and goes on

If the process dies at any of these arrows, its leases run out, as after any crash. Nothing is in flight from `keep` on.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NewCode:
    """How a node gets new code; whoever started it knows. `check` is called in a thread of its own."""

    #: Loads what is on the disk now in another process. Why it can't be run, or None.
    check: Callable[[], str | None]
    #: Whether the terminal of the process was closed: then HUP says that, and asks for nothing.
    terminal_closed: Callable[[], bool]
    #: All is finished, and the leases are kept: the last that is called.
    on_kept: Callable[[], object]
    #: Why this node can't take new code, and what to do instead; empty: it can.
    refusal: str = ""


#: Of a node that was not started by `lowq run`.
NOT_OURS = "it was not started by `lowq run`: restart its program"
