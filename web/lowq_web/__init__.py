"""lowq over HTTP: a dashboard and an API. An ASGI application, run by any ASGI server or mounted into another one.

    uvicorn lowq_web:app                                  # the default application: LOWQ_REDIS_URL and so on
    parent.mount("/ops/lowq", lowq_web.create_app(my_app, auth=who_is_it))

How a request flows, file by file::

    security   Guard: is this server reachable by others without a password? who asks? may they? does the request come
               from our own pages? `logins` slows guesses down. Then, behind it, and only there:
    app        the routes
    pages/     HTML from templates/, complete without JavaScript: a module for each; static/app.js only adds to them
    api        the same as JSON; `openapi` describes it, and a test holds the two together
    actions    what people do: single ids at once, many in the background (`tasks`), each into the log of what was done
    live       numbers that change, as server-sent events
    metrics    the same numbers for Prometheus

`fields` reads what an address or a form carries, `listing` which jobs it asks for. `context` is what the handlers of
one application share.

What several viewers want to see at once is read once: `stats_cache` keeps the latest figures of all queues, and reads
them no oftener than Redis can afford; `single_flight` is how. Handlers run in `threads` of our own, a bounded number at
a time, and only while Redis answers. `retry_clock` tells the coming retries of an id, `chart` draws, `text` turns
values into words, and `redaction` masks what nobody is to see. What was just done is told once, by `notices`. On their
way out answers are packed by `compression`; `static_files` are packed once. `serve` is the server of `lowq web`, and
`connections` what bounds its connections.

Whatever comes from a job, an id, a queue or an error is hostile text. Templates escape it, and `pages.rendering` shows
control characters, direction marks and broken encodings as what they are.
"""

from starlette.applications import Starlette

from lowq_web.app import create_app
from lowq_web.security import BasicAuth, User

#: The application for lowq's default application. It connects when it is first asked something. It takes the place of
#: the submodule's name in this package, which is what `uvicorn lowq_web:app` looks up.
app: Starlette = create_app()  # type: ignore[no-redef, assignment, unused-ignore]  # the submodule has that name, too

__all__ = ["BasicAuth", "User", "app", "create_app"]
