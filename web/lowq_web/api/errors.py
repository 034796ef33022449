"""What fails, over the API."""

from starlette.requests import Request

from lowq.inspection import ErrorGroup
from lowq_web.api.answer import Answer
from lowq_web.api.endpoint import get
from lowq_web.context import context_of, queue_of


class Errors(Answer, frozen=True):
    errors: list[ErrorGroup]


@get("/errors", "What fails: failures of all queues, alike errors together")
def errors(request: Request) -> Errors:
    return Errors(context_of(request).app.error_groups())


@get("/queues/{queue}/errors", "What fails in it, alike errors together")
def queue_errors(request: Request) -> Errors:
    return Errors(queue_of(request).error_groups())
