"""Which vLLM the connector is for. Its plug-in contract changes between releases: others are refused, not tried."""

import re

from kvpool import SettingsError

OLDEST = (0, 32)
NEWEST = (0, 33)


def check_version(version: str) -> None:
    """Refuse a vLLM that this connector was not made for.

    Raises:
        SettingsError: Names the version found and the range.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or not OLDEST <= (int(found[1]), int(found[2])) <= NEWEST:
        raise SettingsError(
            f"this kvpool connector is for vLLM {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}, not {version}; "
            f"pip install 'vllm>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}'"
        )
