"""Settings of the project. DJANGO_TASKS, if set, brings the package django-tasks, which Django 6 does without."""

import django

SECRET_KEY = "not secret"
INSTALLED_APPS = ["lowq.contrib.django", "tests.rules.contrib.django_site"]
if django.VERSION < (6,):
    INSTALLED_APPS.append("django_tasks")
DATABASES = {
    name: {"ENGINE": "django.db.backends.sqlite3", "NAME": f"{name}.sqlite3", "TEST": {"NAME": f"test_{name}.sqlite3"}}
    for name in ("default", "other")
}
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
LOWQ = {
    "REDIS_URL": "memory://",
    "MAX_PAYLOAD_BYTES": 5000,
    "SERVER_MIDDLEWARES": ["tests.rules.contrib.django_site.middlewares.seen"],
}
TASKS = {
    "default": {
        "BACKEND": "lowq.contrib.django.tasks.LowqBackend",
        "QUEUES": ["default", "mail", "loop", "patient"],
        "OPTIONS": {
            "result_cache": "default",
            "async_queues": ["loop"],
            "queue_options": {
                "mail": {"max_retry_count": 0},
                "default": {"max_retry_count": 2},
                "patient": {"max_retry_count": 1, "bury_on": (), "release_on": {TimeoutError: 60}, "priority": 7},
            },
        },
    },
    "no_results": {
        "BACKEND": "lowq.contrib.django.tasks.LowqBackend",
        "QUEUES": ["at_once"],
        "OPTIONS": {"enqueue_on_commit": False},
    },
}
