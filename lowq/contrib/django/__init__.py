"""lowq as an installed app of a Django project: ``INSTALLED_APPS += ["lowq.contrib.django"]``.

::

    apps         on start: settings.LOWQ with its system checks, every <app>/workers.py, the queues of tasks;
                 connections to databases, which are closed around batches when they are obsolete
    on_commit    `push_on_commit`, `apush_on_commit`
    tasks        `LowqBackend` for django.tasks; `task_results` keeps what became of them
    admin        the dashboard as a page of the admin, by `models` (permissions) and `dashboard` (its requests);
                 `LowqJobLink`
    node         what `lowq run lowq.contrib.django.node` loads
    test         test cases with a store of their own
    management   `manage.py lowq VERB`

The project has one application, `lowq.app`: workers are made with ``@lowq.worker``.
"""

try:
    import django  # noqa: F401
except ModuleNotFoundError:
    raise ImportError("lowq.contrib.django needs Django: pip install 'lowq[django]'") from None

from lowq.contrib.django.on_commit import apush_on_commit, push_on_commit

__all__ = ["apush_on_commit", "push_on_commit"]
