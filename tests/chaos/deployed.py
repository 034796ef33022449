"""The application under chaos, as `lowq run tests.chaos.deployed:app` has it."""

from tests.chaos.app import prepare
from tests.processes.app_orders import app, configure

configure()
prepare()

__all__ = ["app"]
