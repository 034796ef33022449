"""Another number of shards for a queue, over the API."""

from typing import Annotated

from msgspec import Meta
from starlette.requests import Request

from lowq.store import untrusted
from lowq.store.keys import MAX_SHARDS
from lowq_web.api.answer import Answer
from lowq_web.api.endpoint import get, post
from lowq_web.api.received import Received
from lowq_web.api.tasks import Task
from lowq_web.context import actions_of, queue_of


class Reshard(Answer, frozen=True):
    shards_count: int
    epoch: Annotated[int, Meta(description="Counts the reshards that have ended")]
    to: Annotated[int | None, Meta(description="The number of shards that the queue is given; null: none is under way")]
    shards_moved: Annotated[int, Meta(description="Shards that nothing is left in, of shards_count")]
    jobs_left: Annotated[int, Meta(description="Jobs that are still in shards of the layout before")]
    waits_for: Annotated[list[int], Meta(description="Shards whose holders finish what is in flight")]
    began_at: float | None
    by: Annotated[str | None, Meta(description="Who began it")]


@get("/queues/{queue}/reshard", "How far it is with another number of shards")
def reshard_progress(request: Request) -> Reshard:
    handle = queue_of(request)
    layout, progress = handle.layouts.current, handle.reshard_progress()
    if progress is None:
        return Reshard(layout.shards_count, layout.epoch, None, 0, 0, [], None, None)
    before, began_at, by = progress.before, progress.facts.get("began_at"), progress.facts.get("by")
    return Reshard(
        before.shards_count, before.epoch, progress.after.shards_count, progress.shards_moved, progress.jobs_left or 0,
        list(progress.waits_for), untrusted.number(began_at), untrusted.text(by),
    )  # fmt: skip


class ReshardDocument(Received, frozen=True):
    shards_count: Annotated[int, Meta(ge=1, le=MAX_SHARDS, description="What the queue is given")]


@post("/queues/{queue}/reshard", "Give it another number of shards, in the background")
def reshard(request: Request, body: ReshardDocument) -> Task:
    return Task.of_action(actions_of(request).reshard(queue_of(request).name, body.shards_count))
