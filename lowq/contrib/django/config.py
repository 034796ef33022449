"""settings.LOWQ: the settings of lowq, in upper case, and their system checks.

What is callable or a class there may be named by its dotted path, as settings are read before any model.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from types import NoneType
from typing import Any, get_args

from django.conf import settings
from django.core.checks import CheckMessage, Error  # fmt: skip
from django.core.checks import Warning as CheckWarning
from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string

import lowq
from lowq.errors import ConfigError

#: The names of lowq's settings, with their types.
_TYPES: dict[str, Any] = {name: kind for name, kind in lowq.Config.__annotations__.items() if not name.startswith("_")}
_PLAIN = [str, int, float, bool, NoneType]
#: Settings that hold classes or callables.
_OF_CODE = [name for name, kind in _TYPES.items() if any(part not in _PLAIN for part in get_args(kind) or (kind,))]

#: What `apply` found wrong.
_problems: list[CheckMessage] = []


def apply(config: lowq.Config) -> None:
    """Gives the application what settings.LOWQ says. What is wrong is kept for `check`, and then a push raises
    `ImproperlyConfigured`: it might go to a Redis that nobody means.
    """
    _problems.clear()
    given: Any = getattr(settings, "LOWQ", None) or {}
    if not isinstance(given, Mapping):
        hint = 'Write LOWQ = {"REDIS_URL": "redis://localhost:6379/0"}.'
        _problems.append(Error(f"LOWQ is a {type(given).__name__}, not a dict.", hint=hint, id="lowq.E001"))
        given = {}
    for name, value in given.items():
        problem = _apply_one(config, name, value)
        if problem is not None:
            _problems.append(problem)
    if _problems:
        config.client_middlewares = [_Refusal()]


def _apply_one(config: lowq.Config, name: Any, value: Any) -> CheckMessage | None:
    where = f"LOWQ[{name!r}]"
    setting = name.lower() if isinstance(name, str) else ""
    if setting not in _TYPES or name != name.upper():
        near = get_close_matches(setting, _TYPES, 1)
        hint = f'Write "{near[0].upper()}".' if near else f"Settings are {', '.join(map(str.upper, _TYPES))}."
        return Error(f"{where} is no setting of lowq.", hint=hint, id="lowq.E002")
    try:
        value = _imported(value) if setting in _OF_CODE else value
    except (ImportError, ValueError) as error:
        hint = 'Write its dotted path, such as "shop.middlewares.timing", or the object itself.'
        return Error(f"{where}: {error}", hint=hint, id="lowq.E003")
    try:
        setattr(config, setting, value)
    except ConfigError as error:
        return Error(f"{where}: {error}.", hint="docs/settings.md has every setting with its unit.", id="lowq.E004")
    return None


def _imported(value: Any) -> Any:
    """The value, with what its dotted paths name in their places."""
    if isinstance(value, str):
        return import_string(value)
    if isinstance(value, Mapping):
        return {_imported(key): item for key, item in value.items()}
    return [_imported(item) for item in value] if isinstance(value, list | tuple) else value


class _Refusal:
    """A client middleware, for pushes of both kinds, that lets nothing pass."""

    def __call__(self, *_push: Any) -> None:
        refuse_problems()

    async def acall(self, *_push: Any) -> None:
        refuse_problems()


def refuse_problems() -> None:
    """Raises ImproperlyConfigured if settings.LOWQ is wrong."""
    if _problems:
        found = "; ".join(f"{problem.msg} {problem.hint} ({problem.id})" for problem in _problems)
        raise ImproperlyConfigured(f"settings.LOWQ is wrong: {found}")


def check(app_configs: object = None, **_options: Any) -> list[CheckMessage]:  # noqa: ARG001  # Django's
    """Django's system check of settings.LOWQ, the environment, and the queues of tasks."""
    found = list(_problems)
    scratch = lowq.Config()
    for name in _TYPES:
        try:
            getattr(scratch, name)
        except ConfigError as error:
            hint = "Correct or remove the variable."
            found.append(Error(f"{error}.", hint=hint, id="lowq.E005"))
    if lowq.app.config.redis_url.startswith("memory://") and not settings.DEBUG:
        found.append(
            CheckWarning(
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
