"""Settings of the shop. REDIS_URL and DATABASE_URL (postgresql://user:password@host/name) name where its data are."""

import os
from pathlib import Path
from urllib.parse import urlsplit

import django

BASE_DIR = Path(__file__).resolve().parent.parent
SECRET_KEY = os.environ.get("SECRET_KEY", "for development only")
DEBUG = os.environ.get("DEBUG", "1") == "1"
ALLOWED_HOSTS = ["*"]
INSTALLED_APPS = [
    "django.contrib.admin",  # lowq's dashboard is a page of it
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "lowq.contrib.django",
    "orders",
]
if django.VERSION < (6,):
    INSTALLED_APPS.append("django_tasks")  # tasks, which Django 6 has itself: pip install django-tasks
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]
ROOT_URLCONF = "shop.urls"
WSGI_APPLICATION = "shop.wsgi.application"
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
STATIC_URL = "static/"
server = urlsplit(os.environ.get("DATABASE_URL", ""))
if server.scheme:
    database = {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": server.path[1:],
        "USER": server.username,
        "PASSWORD": server.password,
        "HOST": server.hostname,
        "PORT": server.port,
    }
else:
    database = {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": BASE_DIR / "shop.sqlite3",
        "OPTIONS": {"timeout": 30, "transaction_mode": "IMMEDIATE"},  # threads wait for each other
    }
DATABASES = {"default": {**database, "CONN_MAX_AGE": 60}}  # without it each batch makes a new connection
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True
if django.VERSION < (6, 1):
    EMAIL_BACKEND = "django.core.mail.backends.console.EmailBackend"
else:
    MAILERS = {"default": {"BACKEND": "django.core.mail.backends.console.EmailBackend"}}
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"console": {"class": "logging.StreamHandler"}},
    "root": {"handlers": ["console"], "level": "INFO"},
}

LOWQ = {
    "REDIS_URL": os.environ.get("REDIS_URL", "redis://localhost:6379/0"),
    "NAMESPACE": "shop",
    "OUTBOX": "default",  # the database: each node relays the jobs that transactions have left there
}
TASKS = {
    "default": {
        "BACKEND": "lowq.contrib.django.tasks.LowqBackend",
        "QUEUES": ["default", "mail"],
        "OPTIONS": {"async_queues": ["mail"], "queue_options": {"mail": {"max_retry_count": 10}}},
    }
}
