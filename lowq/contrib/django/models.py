"""The permissions of the dashboard in the admin: ``lowq.view`` to look, ``lowq.act`` to act as well."""

from django.db import models


class _NoRows(models.Manager):
    """Asks no database, as there is no table: for ``dumpdata``, which reads all models."""

    def get_queryset(self) -> models.QuerySet:
        return super().get_queryset().none()


class Dashboard(models.Model):
    """The dashboard, as the admin lists it. Its permissions are named after the app, and it has no table."""

    objects = _NoRows()

    class Meta:
        app_label = "lowq"
        managed = False
        base_manager_name = "objects"
        default_permissions = ()
        permissions = (("view", "Can see the dashboard of lowq"), ("act", "Can act on jobs, queues and nodes of lowq"))
        verbose_name = verbose_name_plural = "dashboard"
