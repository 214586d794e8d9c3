"""The version of the installed distribution."""

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("kvpool")
except PackageNotFoundError:  # a checkout that was never installed
    VERSION = "0+unknown"
