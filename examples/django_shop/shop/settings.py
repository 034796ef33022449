"""Settings of the shop. REDIS_URL and DATABASE name where its data are."""

import os
from pathlib import Path

import django

BASE_DIR = Path(__file__).resolve().parent.parent
SECRET_KEY = os.environ.get("SECRET_KEY", "for development only")
DEBUG = os.environ.get("DEBUG", "1") == "1"
ALLOWED_HOSTS = ["*"]
INSTALLED_APPS = ["lowq.contrib.django", "orders"]
if django.VERSION < (6,):
    INSTALLED_APPS.append("django_tasks")  # tasks, which Django 6 has itself: pip install django-tasks
MIDDLEWARE = ["django.middleware.common.CommonMiddleware"]
ROOT_URLCONF = "shop.urls"
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ.get("DATABASE", BASE_DIR / "shop.sqlite3"),
        "CONN_MAX_AGE": 60,  # or each batch makes a new connection
        "OPTIONS": {"timeout": 30, "transaction_mode": "IMMEDIATE"},  # SQLite: threads wait for each other
    }
}
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

LOWQ = {"REDIS_URL": os.environ.get("REDIS_URL", "redis://localhost:6379/0"), "NAMESPACE": "shop"}
TASKS = {
    "default": {
        "BACKEND": "lowq.contrib.django.tasks.LowqBackend",
        "QUEUES": ["default", "mail"],
        "OPTIONS": {"async_queues": ["mail"], "queue_options": {"mail": {"max_retry_count": 10}}},
    }
}
