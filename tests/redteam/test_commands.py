"""Commands with a folder of certificates: all of them use it, and none falls back to plaintext."""

import shutil
import subprocess
import sys
from contextlib import ExitStack

import pytest

from kvpool.bench.process import RoleProcess
from tests.integration.conftest import Pool
from tests.pki import Pki


@pytest.fixture(scope="module")
def pki(tmp_path_factory):
    return Pki(tmp_path_factory.mktemp("pki"))


@pytest.fixture(scope="module")
def guarded(tmp_path_factory, pki):
    with ExitStack() as stack:
        pool = Pool(tmp_path_factory.mktemp("pool"), stack)
        tls = {"tls-dir": pki.folder}
        pool.start_meta(**{"expected-nodes": 1, "events-port": 0, **tls})
        pool.start_node("n0", **tls)
        yield pool


def kvpool(*arguments):
    command = [sys.executable, "-m", "kvpool.cli.main", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_a_ping_is_a_clients(guarded, pki):
    answer = kvpool("ping", "--pool", guarded.uri, "--tls-dir", pki.folder, "--transports", "tcp")

    assert answer.stdout.startswith("16 of 16 blocks came back over tls"), answer.stderr


def test_events_are_an_operators(guarded, pki, tmp_path):
    answer = kvpool("events", "--once", "--pool", guarded.uri, "--tls-dir", pki.folder)
    assert "snapshot cleared" in answer.stdout, answer.stderr

    for name in ("ca.pem", "client.pem", "client-key.pem", "events.pub"):
        shutil.copy(pki.folder / name, tmp_path / name)
    answer = kvpool("events", "--once", "--pool", guarded.uri, "--tls-dir", tmp_path)
    assert (answer.returncode, answer.stdout) == (2, "")
    assert "for observers and admins" in answer.stderr


def test_without_certificates_nothing_is_reached(guarded):
    answer = kvpool("ping", "--pool", guarded.uri, "--timeout", "2s")

    assert answer.returncode == 3, answer.stderr
    assert answer.stdout == ""


def test_a_pool_of_one_process_has_the_certificates_that_it_was_given(pki, tmp_path):
    options = {
        "size": "8MiB",
        "node-id": "n0",
        "tls-dir": pki.folder,
        "segment-dir": tmp_path,
        "unix-socket": tmp_path / "up.sock",
        "grpc-port": 0,
        "framed-port": 0,
        "data-port": 0,
        "http-port": 0,
    }
    with RoleProcess("up", options, tmp_path / "up.log") as up:
        ready = up.ready()
        where = ("--pool", ready["uri"], "--transports", "tcp")
        with_certificates = kvpool("ping", *where, "--tls-dir", pki.folder)
        without = kvpool("ping", *where, "--timeout", "2s")

    assert ready["security"] == "tls"
    assert with_certificates.returncode == 0, with_certificates.stderr
    assert without.returncode == 3, without.stderr
