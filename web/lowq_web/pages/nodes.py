"""The nodes that live, the commands that are sent to them, and what a deploy would interrupt."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from lowq import inspection
from lowq.operate.deploy import deploy_check
from lowq.schedules import is_internal
from lowq_web.context import actions_of, context_of, form_of, query_of
from lowq_web.pages.rendering import redirect, render

#: Commands that are asked about.
CONFIRMED = ("quiet", "stop", "reload")


class Process(NamedTuple):
    """A supervisor, or a node."""

    name: str
    version: str
    #: Unix time, seconds; None: not known.
    started_at: float | None
    #: The node; None: it is a supervisor.
    node: inspection.NodeInfo | None
    #: Names of the nodes that a supervisor has started.
    nodes: list[str]
    #: The running batch of the node that has been running longest.
    longest: inspection.RunningBatch | None = None

    @property
    def seconds(self) -> float:
        """For how long that has been running."""
        return self.longest["seconds"] if self.longest else 0.0

    @classmethod
    def of(cls, node: inspection.NodeInfo) -> "Process":
        longest = max((batch for _, batch in node.batches()), key=lambda batch: batch["seconds"], default=None)
        return cls(node.name, node.version, node.started_at, node, [], longest)


def _supervisors(living: Iterable[inspection.NodeInfo]) -> dict[str, Process]:
    """The processes that start another node in the place of one that ends, by name."""
    found: dict[str, Process] = {}
    for node in living:
        if node.supervisor:
            name, own = _name_of_supervisor(node), node.supervisor
            process = Process(name, own.get("version") or "", own.get("started_at"), None, [])
            found.setdefault(name, process).nodes.append(node.name)
    return found


def _name_of_supervisor(node: inspection.NodeInfo) -> str:
    return f"{node.host}:{node.supervisor.get('pid')}" if node.supervisor else ""


_SORTS: dict[str, Callable[[Process], Any]] = {
    "name": lambda process: process.name,
    "version": lambda process: process.version,
    "up": lambda process: -(process.started_at or 0.0),
    "longest": lambda process: process.seconds,
}


def nodes(request: Request) -> Response:
    """The nodes that live, and those that were lost within the last hour."""
    app, query = context_of(request).app, query_of(request)
    sort, down = query.get("sort", "name"), query.get("dir") == "desc"
    sort = sort if sort in _SORTS else "name"
    living = app.nodes()
    processes = [*map(Process.of, living), *_supervisors(living).values()]
    return render(
        request,
        "nodes.html",
        nodes=living,
        lost=app.nodes(lost=True),
        deploy=deploy_check(app, living),
        processes=sorted(processes, key=_SORTS[sort], reverse=down),
        longest=max((each for each in processes if each.longest), key=_SORTS["longest"], default=None),
        sort=sort,
        down=down,
    )


def command(request: Request) -> Response:
    """Sends a node a command; after a confirmation page, unless it only takes jobs again."""
    context, form = context_of(request), dict(form_of(request))
    name, what = form.get("node", ""), form.get("do", "")
    living = context.app.nodes()
    node = next((node for node in living if node.name == name), None)
    if node is not None and what in CONFIRMED and form.get("sure") != "1":
        others = [other for other in living if other is not node and not other.quiet]
        return render(request, "command.html", node=node, what=what, last=not others, alone=_alone(node, others),
                      supervisor=_supervisors(living).get(_name_of_supervisor(node)))  # fmt: skip
    actions_of(request).send_command(name, what)
    return redirect(request, "nodes", done=f"Sent {what} to {name}.")


def _alone(node: inspection.NodeInfo, others: Sequence[inspection.NodeInfo]) -> list[str]:
    """The queues that no other node works."""
    return [
        queue for queue in node.queues if not is_internal(queue) and not any(queue in other.queues for other in others)
    ]
