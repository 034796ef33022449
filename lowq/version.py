"""The version that this package was installed as."""

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("lowq")
except PackageNotFoundError:  # run from a source tree that was never installed
    VERSION = "0.0.0"
