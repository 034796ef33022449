"""What runs in the background, over the API."""

from typing import Annotated, Any, Self

from msgspec import Meta
from starlette.requests import Request

from lowq_web.api.answer import Answer
from lowq_web.api.endpoint import get, post
from lowq_web.background import BackgroundAction, TaskState, read_actions
from lowq_web.context import actions_of, context_of, task_of
from lowq_web.words import TaskAction


class Task(Answer, frozen=True):
    is_accepted = True
    id: str
    who: str
    queue: Annotated[str | None, Meta(description="null: all queues whose names have part in them")]
    part: str
    action: TaskAction
    filter: dict[str, Any]
    reason: str | None
    owner: Annotated[str, Meta(description="The process that runs it")]
    state: Annotated[
        TaskState, Meta(description="interrupted: its process has not reported for 20 s, and has probably died")
    ]
    done: int
    total: int | None
    began_at: float
    heartbeat_at: Annotated[float, Meta(description="When its process reported last")]
    ended_at: float | None
    error: str | None
    shards_count: Annotated[
        int | None, Meta(description="Of reshard: what the queue is given; done and total count shards then")
    ]

    @classmethod
    def of_action(cls, action: BackgroundAction) -> Self:
        return cls.of(action, filter=action.filter.given())


class Tasks(Answer, frozen=True):
    tasks: list[Task]


@get("/tasks", "What runs in the background")
def tasks(request: Request) -> Tasks:
    return Tasks([Task.of_action(each) for each in read_actions(context_of(request).app)])


@get("/tasks/{task}", "How far something is")
def task(request: Request) -> Task:
    return Task.of_action(task_of(request))


@post("/tasks/{task}/cancel", "Stop it after its current step")
def cancel(request: Request) -> Task:
    actions_of(request).end_task(task_of(request))
    return Task.of_action(task_of(request))
