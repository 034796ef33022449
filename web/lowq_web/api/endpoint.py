"""The endpoints of the API: declared by the functions that answer them, and served as routes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_type_hints

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lowq_web.api.answer import respond
from lowq_web.api.received import Nothing, Received, read_document, read_query
from lowq_web.context import query_of, queue_of
from lowq_web.security import is_json, visit_of

Handler = TypeVar("Handler", bound=Callable[..., Any])
Method = Literal["GET", "POST"]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A method of a path, and what it takes and gives."""

    method: Method
    path: str
    #: Of the request, and of what it takes if that is anything.
    handler: Callable[..., Any]
    text: str
    #: Status -> the type of the answer.
    answers: dict[int, Any]
    #: With GET its query, with POST its body.
    takes: type[Received] = Nothing

    def answer(self, request: Request) -> Response:
        """Checks what was sent, and has the handler answer it."""
        given = self._received(request)
        found = self.handler(request) if self.takes is Nothing else self.handler(request, given)
        return found if isinstance(found, Response) else respond(found, _status(self.method, type(found)))

    def _received(self, request: Request) -> Received:
        """The query or the document that was sent, checked against what the endpoint takes."""
        body = visit_of(request).body
        try:
            if self.method == "GET":
                return read_query(query_of(request), self.takes)
            read_query(query_of(request), Nothing)
            if not body and self.takes.body_optional:
                return self.takes()
            if not is_json(request.headers):
                raise HTTPException(415, "send a JSON document, with Content-Type: application/json")
            return read_document(body, self.takes)
        except ValueError as error:
            raise HTTPException(400, str(error)) from None


#: All that are declared.
ENDPOINTS: list[Endpoint] = []


def _endpoint(method: Method, path: str, text: str) -> Callable[[Handler], Handler]:
    """Declares a handler: of a request, and of what it takes if that is anything, to what it answers. A response is
    sent as it is.
    """

    def declare(handler: Handler) -> Handler:
        _, *takes, answer = get_type_hints(handler).values()
        kinds = get_args(answer) if isinstance(answer, UnionType) else [answer]
        answers = {_status(method, kind): kind for kind in kinds if kind is not Response}
        ENDPOINTS.append(Endpoint(method, path, handler, text, answers, takes[0] if takes else Nothing))
        return handler

    return declare


def _status(method: Method, kind: Any) -> int:
    return 202 if method == "POST" and kind.is_accepted else 200


get = partial(_endpoint, "GET")
post = partial(_endpoint, "POST")


def routes() -> list[Route]:
    """One route per path, with all its methods, so that a wrong method is answered with those that there are."""
    found = []
    for path in dict.fromkeys(endpoint.path for endpoint in ENDPOINTS):
        methods: dict[str, Endpoint] = {endpoint.method: endpoint for endpoint in ENDPOINTS if endpoint.path == path}
        found.append(Route(path.replace("{queue}", "{queue:name}"), _handler(methods), methods=list(methods)))
    return found


def _handler(methods: Mapping[str, Endpoint]) -> Callable[[Request], Response]:
    def handle(request: Request) -> Response:
        if "queue" in request.path_params:
            queue_of(request)  # an unknown queue is reported before anything else that is wrong
        return methods["GET" if request.method == "HEAD" else request.method].answer(request)

    return handle
