"""lowq over HTTP: an ASGI application, run by any ASGI server or mounted into another application.

uvicorn lowq_web:app                    # the default application: LOWQ_REDIS_URL and so on
parent.mount("/lowq", lowq_web.create_app(my_app))
"""

from typing import Any

from lowq_web.app import create_app

__all__ = ["create_app"]


def __getattr__(name: str) -> Any:
    # `app` is made when a server asks for it, not when somebody imports `create_app`.
    if name == "app":
        application = globals()["app"] = create_app()
        return application
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
