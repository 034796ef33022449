"""What is said where an extra is not installed, and that nobody imports one who does not use it."""

import subprocess
import sys

from tests.waiting import PATIENCE

CODE = """
import sys
from dataclasses import dataclass
import lowq, lowq.cli, lowq.testing

@dataclass
class Order:
    version: int

@lowq.worker
class OrderSync(lowq.Worker[Order]):
    def perform(self, payloads_by_id): ...

with lowq.testing.embedded(OrderSync):
    OrderSync.push(1, Order(1))
    assert lowq.testing.drain(OrderSync).performed == 1
print([name for name in ('pydantic', 'sentry_sdk', 'sqlalchemy', 'psycopg', 'lowq.contrib') if name in sys.modules])
for module, missing in (('sentry', 'sentry_sdk'), ('otel', 'opentelemetry')):
    sys.modules[missing] = None
    try:
        __import__('lowq.contrib.' + module)
    except ImportError as error:
        print(error)
from lowq.contrib import outbox
print([name for name in ('sqlalchemy', 'psycopg', 'sqlite3', 'django') if name in sys.modules])
sys.modules['psycopg'] = None
try:
    outbox.Relay(lowq.app, 'postgresql://127.0.0.1/shop')
except lowq.ConfigError as error:
    print(error)
"""


def test_lowq_alone_imports_no_integration_and_an_extra_that_is_missing_is_named() -> None:
    ran = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True, timeout=PATIENCE)
    assert ran.stdout.splitlines() == [
        "[]",
        "lowq.contrib.sentry needs sentry-sdk 2: pip install 'lowq[sentry]'",
        "lowq.contrib.otel needs opentelemetry-api: pip install 'lowq[otel]'",
        "[]",
        "the relay needs psycopg for PostgreSQL: pip install 'lowq[outbox]'",
    ]
