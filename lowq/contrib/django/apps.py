"""The installed app: what Django does with it on start. Settings, system checks, workers, connections to databases.

settings.LOWQ has the settings of lowq, in upper case. Callables and classes there may be named by their dotted paths,
as settings are read before any model.

Around a batch, as around a request, connections are closed that are obsolete or broken. A worker thread has connections
of its own. The async workers of a process share one thread for what they call by ``sync_to_async``, and so its
connections: one batch must not close a connection from which another still reads rows. So as long as others run, only a
connection that is broken is closed.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping
from difflib import get_close_matches
from typing import Any

from asgiref.sync import sync_to_async
from django.apps import AppConfig
from django.conf import settings
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import connections, reset_queries
from django.utils.module_loading import autodiscover_modules, import_string

import lowq
from lowq.errors import ConfigError
from lowq.settings import SETTINGS

#: Settings that hold classes or callables: the environment can't.
_OF_CODE = [name for name, declared in SETTINGS.items() if not declared.variable]

#: Faults that `apply_settings` found.
_problems: list[checks.CheckMessage] = []


class LowqConfig(AppConfig):
    """Makes `lowq.app` the application of the project."""

    name = "lowq.contrib.django"
    label = "lowq"
    verbose_name = "lowq"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Applies settings.LOWQ, and imports the workers of all installed apps."""
        _enable_loggers()
        apply_settings(lowq.app.config)
        checks.register(check_settings, "lowq")
        autodiscover_modules("workers")
        register_task_queues()
        middlewares = lowq.app.config.server_middlewares
        if close_connections not in middlewares:  # also if a workers.py has set others
            lowq.app.config.server_middlewares = [close_connections, *middlewares]


def _enable_loggers() -> None:
    """Has lowq's loggers log. LOGGING without ``disable_existing_loggers: False`` turns off those that were made before
    Django was set up: all of a node that was started as ``lowq run``.
    """
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if name.partition(".")[0] == "lowq" and isinstance(logger, logging.Logger):
            logger.disabled = False


# --- settings and their checks ---


def apply_settings(config: lowq.Config) -> None:
    """Gives the application what settings.LOWQ says. What is wrong is kept for `check_settings`, and then a push raises
    `ImproperlyConfigured`: it might go to a Redis that nobody means.
    """
    _problems.clear()
    given: Any = getattr(settings, "LOWQ", None) or {}
    if not isinstance(given, Mapping):
        hint = 'Write LOWQ = {"REDIS_URL": "redis://localhost:6379/0"}.'
        _problems.append(_error(f"LOWQ is a {type(given).__name__}, not a dict.", hint, "E001"))
        given = {}
    for name, value in given.items():
        problem = _apply_one(config, name, value)
        if problem is not None:
            _problems.append(problem)
    if _problems:
        config.client_middlewares = [refuse_problems]


def _apply_one(config: lowq.Config, name: Any, value: Any) -> checks.CheckMessage | None:
    where = f"LOWQ[{name!r}]"
    setting = name.lower() if isinstance(name, str) else ""
    if setting not in SETTINGS or name != name.upper():
        near = get_close_matches(setting, SETTINGS, 1)
        hint = f'Write "{near[0].upper()}".' if near else f"Settings are {', '.join(map(str.upper, SETTINGS))}."
        return _error(f"{where} is no setting of lowq.", hint, "E002")
    try:
        value = _imported(value) if setting in _OF_CODE else value
    except (ImportError, ValueError) as error:
        hint = 'Write its dotted path, such as "shop.middlewares.timing", or the object itself.'
        return _error(f"{where}: {error}", hint, "E003")
    try:
        setattr(config, setting, value)
    except ConfigError as error:
        return _error(f"{where}: {error}.", "docs/settings.md has every setting with its unit.", "E004")
    return None


def _error(text: str, hint: str, number: str) -> checks.CheckMessage:
    return checks.Error(text, hint=hint, id=f"lowq.{number}")


def _imported(value: Any) -> Any:
    """The value, with what its dotted paths name in their places."""
    if isinstance(value, str):
        return import_string(value)
    if isinstance(value, Mapping):
        return {_imported(key): item for key, item in value.items()}
    return [_imported(item) for item in value] if isinstance(value, list | tuple) else value


def refuse_problems(*_push: Any) -> None:
    """Raises ImproperlyConfigured if settings.LOWQ is wrong; also as a client middleware."""
    if _problems:
        found = "; ".join(f"{problem.msg} {problem.hint} ({problem.id})" for problem in _problems)
        raise ImproperlyConfigured(f"settings.LOWQ is wrong: {found}")


def check_settings(app_configs: object = None, **_options: Any) -> list[checks.CheckMessage]:  # noqa: ARG001  # Django's
    """Django's system check of settings.LOWQ, the environment, and the queues of tasks."""
    found = list(_problems)
    scratch = lowq.Config()
    for name in SETTINGS:
        try:
            getattr(scratch, name)
        except ConfigError as error:
            found.append(_error(f"{error}.", "Correct or remove the variable.", "E005"))
    try:
        redis_url, outbox = lowq.app.config.redis_url, lowq.app.config.outbox
    except ConfigError:
        return found  # which has it, as it is of the environment
    if outbox is not None and "://" not in outbox:  # with a URL the driver may be missing here, and a node have it
        from lowq.contrib.outbox.databases import connector

        try:
            connector(outbox)
        except ConfigError as error:
            hint = "Write the name of a database in DATABASES, or a URL."
            found.append(_error(f"LOWQ['OUTBOX']: {error}.", hint, "E004"))
    if redis_url.startswith("memory://") and not settings.DEBUG:
        found.append(
            checks.Warning(
                "The jobs of lowq are in the memory of each process: other processes do not see them, and they are "
                "gone when it ends.",
                hint='Write LOWQ = {"REDIS_URL": "redis://localhost:6379/0"}; tests have stores of their own.',
                id="lowq.W001",
            )
        )
    return found


def register_task_queues() -> None:
    """Makes the backends of settings.TASKS that are lowq's, so that a node has workers for their queues."""
    for alias, params in (getattr(settings, "TASKS", None) or {}).items():
        try:
            backend = import_string(params["BACKEND"])
        except (ImportError, KeyError, TypeError) as error:
            if isinstance(error, ImportError) and params["BACKEND"].startswith("lowq."):
                raise  # django-tasks is missing
            continue  # which Django's own check says
        register = getattr(backend, "register_workers_of", None)
        if register is not None:
            register(alias)


# --- connections to databases ---


class CloseConnections:
    """The server middleware, of sync and async workers. Inside a transaction, as in a test, it leaves things alone."""

    def __init__(self) -> None:
        #: Async batches that run, each as an object of its own: to add and to discard one is atomic.
        self._running: set[object] = set()

    def __call__(self, worker: Any, batch: Any, call_next: Callable[[], object]) -> None:  # noqa: ARG002
        _close(is_alone=True)
        try:
            call_next()
        finally:
            _close(is_alone=True)

    async def acall(self, worker: Any, batch: Any, call_next: Callable[[], Awaitable[object]]) -> None:  # noqa: ARG002
        await sync_to_async(self._close_if_quiet)()
        this = object()
        self._running.add(this)
        try:
            await call_next()
        finally:
            self._running.discard(this)
            await sync_to_async(self._close_if_quiet)()

    def _close_if_quiet(self) -> None:
        _close(is_alone=not self._running)


def _close(*, is_alone: bool) -> None:
    for connection in connections.all(initialized_only=True):
        if connection.in_atomic_block:
            continue
        if is_alone:
            connection.close_if_unusable_or_obsolete()
        elif connection.errors_occurred and not connection.is_usable():
            connection.close()
    if settings.DEBUG and is_alone:  # or the statements of all batches pile up
        reset_queries()


#: The middleware of all workers of the project.
close_connections = CloseConnections()
