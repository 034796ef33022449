"""lowq over HTTP: a dashboard and an API. An ASGI application, run by any ASGI server or mounted into another one.

    uvicorn lowq_web:app                                  # the default application: LOWQ_REDIS_URL and so on
    parent.mount("/ops/lowq", lowq_web.create_app(my_app, auth=who_is_it))

How a request flows, file by file::

    security   Guard: is this server reachable by others without a password? who is the user? what may they do? does
               the request come from our own pages? `auth` names the user. Behind it:
    app        the routes; `errors` answers what they raise
    pages/     HTML from templates/, complete without JavaScript: a module for each; static/app.js adds to them
    api/       the same as JSON: a module for each subject, with the types of what it takes and answers; `received`
               checks requests against them, and `openapi` describes it by them
    actions    what its user may do: on single ids at once, on many in the `background`, each entered in the `journal`
    live       numbers that change, as server-sent events; `open_streams` wakes them
    prometheus the same numbers for Prometheus

`context` is what handlers need: what those of one application share, and what a request names. `listing` turns its
fields into a `JobQuery`.

What several viewers see at once is read once: `stats_cache` keeps the latest figures of all queues, with one
`single_flight` for each value. Handlers run in `threads` of our own, a bounded number at a time, and only while Redis
answers. `retry_clock` computes the coming retries of an id, `chart` draws, `text` formats values, `words` names things,
and `redaction` masks fields of payloads. `notices` keeps the message about a finished action until the next page shows
it. `serve` is the server of `lowq web`, and `connections` bounds its connections.

Whatever comes from a job, an id, a queue or an error is hostile text. Templates escape it, and `pages.rendering` shows
control characters, direction marks and broken encodings as what they are.
"""

from starlette.types import ASGIApp

from lowq_web.app import create_app, default_app
from lowq_web.auth import BasicAuth, User

#: The dashboard of lowq's default application. It is made at its first use, and connects at the first request. It
#: replaces the name of the submodule in this package, which is what `uvicorn lowq_web:app` looks up.
app: ASGIApp = default_app  # type: ignore[no-redef, assignment, unused-ignore]  # the submodule has that name, too

__all__ = ["BasicAuth", "User", "app", "create_app"]
