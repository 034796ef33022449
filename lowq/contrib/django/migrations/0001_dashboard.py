"""The permissions ``lowq.view`` and ``lowq.act``. It makes no table."""

from typing import ClassVar

from django.db import migrations, models


class Migration(migrations.Migration):
    initial = True
    dependencies: ClassVar[list[tuple[str, str]]] = []
    operations: ClassVar = [
        migrations.CreateModel(
            name="Dashboard",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
            ],
            options={
                "managed": False,
                "base_manager_name": "objects",
                "default_permissions": (),
                "permissions": (
                    ("view", "Can see the dashboard of lowq"),
                    ("act", "Can act on jobs, queues and nodes of lowq"),
                ),
                "verbose_name": "dashboard",
                "verbose_name_plural": "dashboard",
            },
        ),
    ]
