"""Reads the lock files of `deploy/requirements`."""

from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

FOLDER = Path(__file__).parents[1] / "deploy/requirements"


def pins(path: Path) -> Iterator[tuple[str, str, list[str]]]:
    """Name, version and hashes of what a lock file installs on this machine."""
    text = "".join(line for line in path.read_text().splitlines(keepends=True) if not line.startswith("#"))
    for line in text.replace("\\\n", " ").splitlines():
        pinned, *hashes = line.split(" --hash=")
        requirement = Requirement(pinned.strip())
        if requirement.marker is None or requirement.marker.evaluate():
            [version] = [clause.version for clause in requirement.specifier if clause.operator == "=="]
            yield requirement.name, version, [digest.strip() for digest in hashes]
