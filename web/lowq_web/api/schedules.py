"""Schedules over the API."""

from typing import Annotated

from msgspec import UNSET, Meta, UnsetType
from starlette.requests import Request

from lowq import inspection
from lowq_web.api.answer import Answer
from lowq_web.api.endpoint import get, post
from lowq_web.api.queues import Paused
from lowq_web.api.received import Received
from lowq_web.context import actions_of, context_of


class Schedules(Answer, frozen=True):
    schedules: list[inspection.ScheduleInfo]


@get("/schedules", "What is pushed at set times, and when")
def schedules(request: Request) -> Schedules:
    return Schedules(context_of(request).app.schedules())


_Queue = Annotated[str, Meta(description="Needed where schedules of several queues have the name")]


class ScheduleDocument(Received, frozen=True):
    name: Annotated[str, Meta(min_length=1, max_length=512)]
    queue: _Queue | UnsetType = UNSET

    @property
    def of_queue(self) -> str | None:
        return self.given().get("queue")


class RanSchedule(Answer, frozen=True):
    planned_at: float


@post("/schedules/run-now", "Push a job of a schedule now")
def run_schedule(request: Request, body: ScheduleDocument) -> RanSchedule:
    return RanSchedule(actions_of(request).run_schedule(body.name, body.of_queue))


@post("/schedules/pause", "Push no tick of a schedule any more")
def pause_schedule(request: Request, body: ScheduleDocument) -> Paused:
    return Paused(paused=True, changed=actions_of(request).pause_schedule(body.name, body.of_queue))


@post("/schedules/resume", "End a pause of a schedule")
def resume_schedule(request: Request, body: ScheduleDocument) -> Paused:
    return Paused(paused=False, changed=actions_of(request).resume_schedule(body.name, body.of_queue))
