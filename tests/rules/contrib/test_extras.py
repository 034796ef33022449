"""What is said where an extra is not installed."""

import subprocess
import sys

MISSING = {
    "sentry": ("sentry_sdk", "lowq.contrib.sentry needs sentry-sdk 2: pip install 'lowq[sentry]'"),
    "otel": ("opentelemetry", "lowq.contrib.otel needs opentelemetry-api: pip install 'lowq[otel]'"),
}


def test_lowq_alone_imports_no_integration_and_an_extra_that_is_missing_is_named() -> None:
    code = f"""
import sys, lowq, lowq.cli, lowq.testing
print([name for name in ('sentry_sdk', 'lowq.contrib') if name in sys.modules])
for module, (missing, _) in {MISSING}.items():
    sys.modules[missing] = None
    try:
        __import__('lowq.contrib.' + module)
    except ImportError as error:
        print(error)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == ["[]", *(said for _, said in MISSING.values())]
