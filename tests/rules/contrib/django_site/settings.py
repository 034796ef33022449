"""Settings of the project. DJANGO_TASKS, if set, brings the package django-tasks, which Django 6 does without."""

import django

from tests.compiled_scripts import compile_scripts_once

compile_scripts_once()

SECRET_KEY = "not secret"
INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "lowq.contrib.django",
    "tests.rules.contrib.django_site",
]
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]
ROOT_URLCONF = "tests.rules.contrib.django_site.urls"
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
if django.VERSION < (6,):
    INSTALLED_APPS.append("django_tasks")
DATABASES = {
    name: {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": f"{name}.sqlite3",
        "TEST": {"NAME": f"test_{name}.sqlite3"},
        "OPTIONS": {"init_command": "PRAGMA synchronous=OFF"},  # files in which threads meet, and nothing is kept
    }
    for name in ("default", "other")
}
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
LOWQ = {
    "REDIS_URL": "memory://",
    "MAX_PAYLOAD_BYTES": 5000,
    "OUTBOX": "default",
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
