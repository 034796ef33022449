"""lowq over HTTP: an ASGI application, run by any ASGI server or mounted into another application.

uvicorn lowq_web:app                    # the default application: LOWQ_REDIS_URL and so on
parent.mount("/lowq", lowq_web.create_app(my_app))
"""

from starlette.applications import Starlette

from lowq_web.app import create_app

#: The application for lowq's default application. It connects when it is first asked something. It takes the place of
#: the submodule's name in this package, which is what `uvicorn lowq_web:app` looks up.
app: Starlette = create_app()  # type: ignore[no-redef, assignment, unused-ignore]  # the submodule has that name, too

__all__ = ["app", "create_app"]
