"""Without NIXL all of kvpool works but the ucx transport, and asking for that says what to install."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

INSTALL = "the ucx transport needs NIXL, which is not installed here; run: pip install 'kvpool[ucx]'"

HIDDEN = """
import sys
for package in ("nixl", "nixl_cu12", "nixl_cu13"):
    assert package not in sys.modules
    sys.modules[package] = None  # what is not to be found
"""

IMPORTS = """
import importlib, pkgutil, kvpool
for module in pkgutil.walk_packages(kvpool.__path__, "kvpool."):
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        if error.name not in ("cupy", "torch", "vllm"):  # may be missing too
            raise
assert "kvpool.transport.ucx.transport" in sys.modules
"""

ROUND_TRIP = """
import os, pathlib, numpy as np, kvpool
from kvpool.embedded import EmbeddedPool
from kvpool.ops.settings import MetaSettings, NodeSettings
folder = pathlib.Path(sys.argv[1])
node = NodeSettings(size="4MiB", data_port=0, grpc_port=0, segment_dir=folder, unix_socket=folder / "n.sock")
with EmbeddedPool(MetaSettings(grpc_port=0, framed_port=0), node) as pool:
    for transports in (["shm", "tcp"], ["tcp"], ["inproc"]):
        with kvpool.connect(pool.uri, transports=transports) as client:
            name = kvpool.Namespace(model=str(transports), block_tokens=16, block_bytes=4096)
            keyspace = client.namespace(name)
            chain = [os.urandom(32) for _ in range(4)]
            blocks, loaded = np.full((4, 4096), 7, np.uint8), np.zeros((4, 4096), np.uint8)
            assert keyspace.store(chain, blocks).stored == 4
            assert keyspace.load(chain, loaded).loaded == 4 and (loaded == 7).all()
    for transports in (["ucx"], ["shm", "ucx"]):
        try:
            kvpool.connect(pool.uri, transports=transports)
        except kvpool.SettingsError as error:
            print(error)
"""

COMMAND = """
from kvpool.cli.main import main
sys.argv = ["kvpool", *sys.argv[2:]]
sys.exit(main())
"""


def run(code: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", HIDDEN + code, str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | {"COLUMNS": "300"}, check=False)


def test_everything_is_imported_and_serves(tmp_path):
    done = run(IMPORTS + ROUND_TRIP, tmp_path)

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines().count(INSTALL) == 2


@pytest.mark.parametrize("role", ["node", "up"])
def test_a_role_that_is_to_serve_ucx_says_what_to_install(role, tmp_path):
    place = ("--size=4MiB", f"--segment-dir={tmp_path}", f"--unix-socket={tmp_path / 'n.sock'}", "--data-port=0")
    ports = ("--grpc-port=0",) if role == "node" else ("--grpc-port=0", "--framed-port=0")

    done = run(COMMAND, tmp_path, role, "--ucx", *place, *ports)

    assert done.returncode == 2
    assert INSTALL in done.stderr
