"""What is said where an extra is not installed."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "missing", "message"),
    [
        ("sentry", "sentry_sdk", "lowq.contrib.sentry needs sentry-sdk 2: pip install 'lowq[sentry]'"),
        ("otel", "opentelemetry", "lowq.contrib.otel needs opentelemetry-api: pip install 'lowq[otel]'"),
    ],
)
def test_an_extra_that_is_missing_is_named(module: str, missing: str, message: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; import lowq.contrib.{module}"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.stderr.splitlines()[-1] == f"ImportError: {message}"


def test_lowq_alone_imports_no_integration() -> None:
    code = (
        "import sys, lowq, lowq.cli, lowq.testing\n"
        "print([name for name in ('sentry_sdk', 'lowq.contrib') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"
