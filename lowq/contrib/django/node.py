"""The application of a Django project, for ``lowq run lowq.contrib.django.node``, and for the processes that
``manage.py lowq`` starts. DJANGO_SETTINGS_MODULE names the project's settings.
"""

import django
from django.apps import apps

import lowq
from lowq.contrib.django.apps import refuse_problems

if not apps.ready:
    django.setup()
if not apps.is_installed("lowq.contrib.django"):
    raise lowq.ConfigError('lowq.contrib.django is not installed; write INSTALLED_APPS += ["lowq.contrib.django"]')
refuse_problems()

app = lowq.app
