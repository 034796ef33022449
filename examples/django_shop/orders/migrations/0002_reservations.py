"""Reservations, and the table of the outbox."""

from django.db import migrations, models

from lowq.contrib import outbox


def create_outbox(apps, schema_editor):
    outbox.create_table(schema_editor.connection)


class Migration(migrations.Migration):
    dependencies = [("orders", "0001_initial")]
    operations = [
        migrations.AddField("order", "is_reserved", models.BooleanField(default=False)),
        migrations.RunPython(create_outbox, migrations.RunPython.noop),
    ]
