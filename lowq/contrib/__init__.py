"""Other people's tracing, metrics and error reporting, each a module with ``instrument(app)``::

    import lowq.contrib.sentry

    lowq.contrib.sentry.instrument()

They need the extras of their names, and nothing else of lowq imports them.
"""

from lowq.application import Lowq
from lowq.errors import ConfigError
from lowq.observe.events import Observer


def add_observer(app: object, observer: Observer, module: str) -> None:
    """Has an observer of a module of this package follow the pushes and batches of an application, in place of one of
    its kind.

    Raises:
        ConfigError: ``app`` is no application.
    """
    if not isinstance(app, Lowq):
        raise ConfigError(f"{module}.instrument({app!r:.100}): write instrument(), or instrument(app)")
    remove_observer(app, type(observer))
    app.observers.append(observer)


def remove_observer(app: Lowq, kind: type[Observer]) -> None:
    """Removes the observers of a kind."""
    app.observers[:] = [item for item in app.observers if type(item) is not kind]
