"""What is in the image: kvpool, what the lock file says, and nothing that installs, compiles or gains rights."""

import json
import subprocess

import pytest

from tests.compose.stack import IMAGE, ROOT, why_not
from tests.requirements import pins

LOOK = """
import importlib.metadata, importlib.util, json, os, shutil, stat, sys

TOOLS = ("cc", "gcc", "g++", "clang", "ld", "make", "pip", "pip3", "curl", "wget", "git", "ssh", "sudo")
INSTALLERS = ("pip", "ensurepip", "setuptools", "wheel")
privileged, writable = [], []
for folder, names, files in os.walk("/"):
    names[:] = [name for name in names if not os.path.ismount(os.path.join(folder, name))]
    for name in files:
        path = os.path.join(folder, name)
        mode = os.lstat(path).st_mode
        if stat.S_ISREG(mode) and mode & (stat.S_ISUID | stat.S_ISGID):
            privileged.append(path)
        if stat.S_ISREG(mode) and os.access(path, os.W_OK):
            writable.append(path)
print(json.dumps({
    "user": os.getuid(),
    "privileged": privileged,
    "writable": writable,
    "tools": [tool for tool in TOOLS if shutil.which(tool)],
    "installers": [name for name in INSTALLERS if importlib.util.find_spec(name)],
    "packages": {d.metadata["Name"].lower().replace("_", "-"): d.version for d in importlib.metadata.distributions()},
    "prefix": sys.prefix,
}))
"""


@pytest.fixture(scope="module")
def found():
    if reason := why_not():
        pytest.skip(reason)
    command = ["docker", "run", "--rm", "--network", "none", "--entrypoint", "python3", IMAGE, "-I", "-c", LOOK]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    return json.loads(done.stdout)


def test_nothing_in_it_installs_compiles_or_gains_rights(found):
    assert found["user"] == 10001
    assert found["privileged"] == []
    assert found["writable"] == []
    assert found["tools"] == []
    assert found["installers"] == []


def test_it_has_what_the_lock_file_says_and_no_more(found):
    locked = {name: version for name, version, _ in pins(ROOT / "deploy/requirements/runtime.txt")}

    assert found["prefix"] == "/opt/kvpool"
    assert found["packages"].pop("kvpool")
    assert found["packages"] == locked
