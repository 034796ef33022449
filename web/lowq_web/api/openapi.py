"""The description of the API, an OpenAPI 3.1 document, made from the types of its endpoints.

It is what is promised: a test compares it with the one that was agreed on.
"""

import re
from collections.abc import Sequence
from typing import Any, get_args

import msgspec

import lowq
from lowq import inspection
from lowq.job import State
from lowq.operate.actions import ActionName
from lowq.operate.job_filter import FilterState, OrderBy
from lowq.operate.nodes import NodeCommand
from lowq_web.api.answer import Error
from lowq_web.api.endpoint import Endpoint
from lowq_web.background import TaskState
from lowq_web.words import TaskAction

_REFERENCE = "#/components/schemas/{name}"
_PATH = {"queue": "A queue; a slash in its name is written %252F", "task": "The id of a task"}

#: Status -> what it means, for every endpoint, as far as it applies.
_ERRORS = {
    400: "The request is malformed; the error says what is expected",
    401: "A user and a password are needed",
    403: "This user may not do this, or a page of another site has sent it",
    404: "There is no such queue, node, task or schedule",
    409: "More jobs match than at_most says, or the queue is full, or it is being resharded",
    413: "The request is too large",
    415: "The request is no JSON document",
    429: "Too many tasks or scans of all ids run already",
    500: "A bug of the dashboard, or keys in Redis that another program has written",
    503: "Redis does not answer",
}


def describe(endpoints: Sequence[Endpoint], server: str) -> dict[str, Any]:
    """The description of these endpoints."""
    taken = [endpoint.takes for endpoint in endpoints]
    answered = [Error, *(answer for endpoint in endpoints for answer in endpoint.answers.values())]
    schemas, components = msgspec.json.schema_components([*taken, *answered], ref_template=_REFERENCE)
    schema_of = dict(zip(map(id, [*taken, *answered]), schemas, strict=True))
    received = msgspec.json.schema_components(taken, ref_template=_REFERENCE)[1]
    components = _name_words(components) | _named_words()
    for name, component in components.items():
        component.pop("title", None)
        if name not in received and "properties" in component:  # all fields of an answer are always there
            component.pop("description", None)  # that is a docstring, for those who read the code
            component |= {"required": list(component["properties"]), "additionalProperties": False}
            for field in component["properties"].values():
                field.pop("default", None)
    queries = {endpoint.takes.__name__ for endpoint in endpoints if endpoint.method == "GET"}
    paths: dict[str, Any] = {}
    for endpoint in sorted(endpoints, key=lambda endpoint: (endpoint.path, endpoint.method)):
        operation = _operation(endpoint, schema_of, components)
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "lowq", "version": lowq.__version__, "description": "Times are Unix time in seconds."},
        "servers": [{"url": server}],
        "paths": paths,
        "components": {
            "schemas": {name: components[name] for name in sorted(components) if name not in queries - {"Nothing"}},
            "securitySchemes": {"basic": {"type": "http", "scheme": "basic"}},
        },
        "security": [{}, {"basic": []}],
    }


#: Lists of words that have a name, so that a client has one type for each.
_WORDS = {
    "ActionName": ActionName, "FilterState": FilterState, "NodeCommand": NodeCommand, "OrderBy": OrderBy,
    "Span": inspection.Span, "State": State,
    "TaskAction": TaskAction, "TaskState": TaskState,
}  # fmt: skip


def _named_words() -> dict[str, Any]:
    return {name: {"type": "string", "enum": sorted(get_args(words))} for name, words in _WORDS.items()}


def _name_words(schema: Any) -> Any:
    """The schema, with references to the lists of words that have a name."""
    if isinstance(schema, list):
        return [_name_words(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    for name, words in _named_words().items():
        if schema.get("enum") == words["enum"]:
            reference = {"$ref": _REFERENCE.format(name=name)}
            rest = {key: value for key, value in schema.items() if key not in words}
            return {"allOf": [reference], **rest} if rest else reference
    return {key: _name_words(part) for key, part in schema.items()}


def _operation(endpoint: Endpoint, schema_of: dict[int, Any], components: dict[str, Any]) -> dict[str, Any]:
    def content(kind: Any) -> dict[str, Any]:
        return {"application/json": {"schema": schema_of[id(kind)]}}

    acts = endpoint.method == "POST"
    answers = {
        str(status): {"description": "Done", "content": content(kind)} for status, kind in endpoint.answers.items()
    }
    for status, text in _ERRORS.items():
        if status not in (409, 413, 415) or acts:
            answers[str(status)] = {"description": text, "content": content(Error)}
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}, "description": _PATH[name]}
        for name in re.findall(r"{(\w+)}", endpoint.path)
    ]
    operation = {
        "summary": endpoint.text,
        "operationId": endpoint.handler.__name__,
        "parameters": parameters,
        "responses": answers,
    }
    if acts:
        return operation | {"requestBody": {"required": True, "content": content(endpoint.takes)}}
    query = components[endpoint.takes.__name__]
    parameters += [
        {
            "name": name,
            "in": "query",
            "required": name in query["required"],
            "schema": {key: value for key, value in schema.items() if key != "description"},
            "description": schema["description"],
        }
        for name, schema in query["properties"].items()
    ]
    return operation
