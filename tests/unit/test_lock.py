"""The lock files: what pyproject.toml wants, each with its hashes, of no place in particular; and its licences."""

import re
import tomllib
from importlib.metadata import metadata
from itertools import chain

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from requirements import FOLDER, pins

PROJECT = tomllib.loads((FOLDER.parents[1] / "pyproject.toml").read_text())
EXTRAS, GROUPS = PROJECT["project"]["optional-dependencies"], PROJECT["dependency-groups"]
OWN = PROJECT["project"]["name"]


def wanted_by(extra):
    """What an extra asks for, with what the extras of ours that it names do."""
    for text in EXTRAS[extra]:
        if (requirement := Requirement(text)).name == OWN:
            yield from chain.from_iterable(map(wanted_by, requirement.extras))
        else:
            yield text


WANTED = {
    "runtime": [*PROJECT["project"]["dependencies"], *EXTRAS["redis"]],  # which the image has
    "dev": [*PROJECT["project"]["dependencies"], *wanted_by("dev"), *EXTRAS["ucx"], *GROUPS["build"], *GROUPS["helm"]],
    "tools": GROUPS["tools"],
}


@pytest.mark.parametrize("lock", WANTED)
def test_what_pyproject_wants_is_locked(lock):
    locked = {name: version for name, version, _ in pins(FOLDER / f"{lock}.txt")}
    for requirement in map(Requirement, WANTED[lock]):
        if requirement.marker is None or requirement.marker.evaluate():
            version = locked[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(version), f"{requirement}: {version} is locked; `make lock`"


@pytest.mark.parametrize("lock", WANTED)
def test_everything_has_hashes_and_no_address(lock):
    text = (FOLDER / f"{lock}.txt").read_text()

    assert all(re.fullmatch("sha256:[0-9a-f]{64}", h) for h in chain.from_iterable(h for *_, h in pins_of(lock)))
    assert all(hashes for *_, hashes in pins_of(lock))
    assert "://" not in text
    assert not re.search(r"^\s*-(?!-hash=)", text, re.MULTILINE)


def pins_of(lock):
    return list(pins(FOLDER / f"{lock}.txt"))


def test_the_image_is_made_of_what_is_tested():
    tested = {name: version for name, version, _ in pins_of("dev")}

    assert all(tested[name] == version for name, version, _ in pins_of("runtime"))


def test_builds_use_what_the_build_system_asks_for():
    assert set(PROJECT["build-system"]["requires"]) <= set(GROUPS["build"])


@pytest.mark.parametrize("name", [name for name, *_ in pins(FOLDER / "runtime.txt")])
def test_what_users_install_has_a_licence_that_asks_for_no_more_than_a_notice(name):
    said = metadata(name)
    classified = [line.rpartition(":: ")[2] for line in said.get_all("Classifier", []) if line.startswith("License")]
    licence = said.get("License-Expression") or " ".join(classified) or said.get("License", "")

    assert re.search("MIT|BSD|Apache|ISC|PSF", licence), f"{name}: {licence!r}"
    assert not re.search("GPL|General Public", licence), f"{name}: {licence!r}"
