"""The installed app: what is done when Django starts."""

import logging

from django.apps import AppConfig
from django.core import checks
from django.utils.module_loading import autodiscover_modules

import lowq
from lowq.contrib.django import config
from lowq.contrib.django.connections import close_connections


class LowqConfig(AppConfig):
    """Makes `lowq.app` the application of the project."""

    name = "lowq.contrib.django"
    label = "lowq"
    verbose_name = "lowq"

    def ready(self) -> None:
        """Applies settings.LOWQ, and imports the workers of all installed apps."""
        _enable_loggers()
        config.apply(lowq.app.config)
        checks.register(config.check, "lowq")
        autodiscover_modules("workers")
        config.register_task_queues()
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
