"""Nodes over the API: those that live, what they perform, what a deploy would interrupt; and their Redis."""

from typing import Annotated

from msgspec import Meta
from starlette.requests import Request

from lowq import inspection
from lowq.operate.nodes import NodeCommand, NodeInfo, StuckBatch
from lowq_web.api.answer import Answer
from lowq_web.api.endpoint import get, post
from lowq_web.api.received import Received
from lowq_web.context import actions_of, context_of


class Nodes(Answer, frozen=True):
    nodes: list[NodeInfo]
    #: Those that died within the last hour, the latest first, as of their last heartbeats.
    lost: list[NodeInfo]


@get("/nodes", "The nodes that live, and those lost within the last hour")
def nodes(request: Request) -> Nodes:
    app = context_of(request).app
    return Nodes(app.nodes(), app.nodes(lost=True))


class Interruption(Answer, frozen=True):
    """A running batch that a stop of its node would probably cut off, to be performed again: it has been running for
    longer than the node's ``shutdown_timeout``, or batches of its queue often do (`usual`).
    """

    node: str
    thread: Annotated[int | None, Meta(description="From 0; null: a task of the node's event loop")]
    batch: inspection.RunningBatch
    shutdown_timeout: Annotated[float, Meta(description="Seconds that a stop of the node waits")]
    usual: Annotated[
        float | None,
        Meta(description="Seconds that 95 % of its queue's batches take at most; 0: not known; null: more than 300"),
    ]


class Deploy(Answer, frozen=True):
    is_safe: bool
    interruptions: Annotated[list[Interruption], Meta(description="What a stop of all nodes would probably cut off")]
    consumers: Annotated[list[str], Meta(description="Those with jobs in hand")]
    tasks: Annotated[int, Meta(description="Actions that run in processes of the dashboard")]
    versions: Annotated[dict[str, int], Meta(description="How many nodes have each")]


@get("/deploy", "Whether a deploy is safe now: what a stop of all nodes would probably interrupt")
def deploy(request: Request) -> Deploy:
    found = context_of(request).app.deploy_check()
    return Deploy.of(found, consumers=[node.name for node in found.consumers])


class Stuck(Answer, frozen=True):
    batches: list[StuckBatch]


@get("/stuck", "The batches that run for much longer than those of their queue do")
def stuck(request: Request) -> Stuck:
    return Stuck(context_of(request).app.stuck())


class CommandDocument(Received, frozen=True):
    node: str
    do: NodeCommand


class Sent(Answer, frozen=True):
    is_accepted = True
    sent: str


@post("/nodes/command", "Send a node a command: to go quiet, take jobs again, stop or reload")
def send_command(request: Request, body: CommandDocument) -> Sent:
    actions_of(request).send_command(body.node, body.do)
    return Sent(body.do)


@get("/redis", "The server, and what to be warned of")
def redis(request: Request) -> inspection.RedisInfo:
    return context_of(request).app.redis_info()
