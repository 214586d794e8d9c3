"""Every target takes its seeds and what once broke it; a short run of atheris finds nothing; each endpoint has one."""

import importlib
import logging
import pkgutil
import subprocess
import sys
import tempfile
import tracemalloc

import pytest
import structlog

import kvpool.v1
from kvpool.meta.framed import MetaSession
from kvpool.node.pulling import Pulling
from kvpool.node.serving import DataSession
from kvpool.transport.wire.messages import KINDS, Hello
from tests.fuzz import endpoints, target
from tests.fuzz.targets import TARGETS
from tests.property.test_hostile_grpc import METHODS

RUNS = "100"
"""Of each target: a moment. `make fuzz` goes on for minutes."""


@pytest.fixture(autouse=True)
def traced(reset_logging, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    tracemalloc.start(1)
    yield
    tracemalloc.stop()


@pytest.mark.parametrize("fuzzed", TARGETS.values(), ids=lambda fuzzed: fuzzed.name)
def test_seeds_and_what_once_broke_it_are_taken(fuzzed):
    for data in [b"", *fuzzed.seeds(), *(path.read_bytes() for path in fuzzed.found())]:
        fuzzed(data)


def test_a_short_search_finds_nothing():
    pytest.importorskip("atheris", reason="atheris is not installed: it has wheels for Linux alone")
    command = [sys.executable, "-m", "tests.fuzz", "--runs", RUNS, "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)

    assert done.returncode == 0, done.stdout + done.stderr[-8000:]


def test_a_target_fails_for_memory_and_for_what_a_thread_died_of():
    hoard = target.Target("hoard", lambda data: bytes(target.GROWTH_BYTES_MAX * 2), list, target.GROWTH_BYTES_MAX)

    with pytest.raises(AssertionError, match="0 bytes took"):
        hoard(b"")


def test_what_was_found_belongs_to_a_target():
    assert {path.name for path in target.FOUND.iterdir()} <= TARGETS.keys()


# Whoever adds an endpoint adds it here too, or one of these fails


def test_every_call_of_every_service_is_fuzzed():
    modules = [f"kvpool.v1.{module.name}" for module in pkgutil.iter_modules(kvpool.v1.__path__)]
    files = [importlib.import_module(name).DESCRIPTOR for name in modules if name.endswith("_pb2")]
    calls = {m.full_name for file in files for service in file.services_by_name.values() for m in service.methods}

    assert calls - {method.full_name for method in METHODS} == {"kvpool.v1.Membership.Control"}  # `grpc_control`


def test_every_framed_request_is_one_that_a_fuzzed_session_answers():
    sessions = [MetaSession(None), DataSession(None, 0, local=True), endpoints.UcxSession(None, None)]
    answered = {kind for session in sessions for kind in session._handlers}
    answered |= Pulling(None, None, 0).handlers.keys() | {Hello}

    assert {kind for kind in KINDS.values() if kind.kind % 2 == 0} - answered == set()


def test_every_page_is_asked_for():
    asked = {seed.split()[1].decode() for seed in TARGETS["http_request"].seeds()}

    assert asked >= endpoints.PAGES.keys()
