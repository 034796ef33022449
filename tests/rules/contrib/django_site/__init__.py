"""A Django project whose test cases, ``cases_*.py``, are run by Django's own runner: `test_django.py` starts it."""
