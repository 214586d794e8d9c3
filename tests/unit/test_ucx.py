"""The parts of the ucx transport that need no UCX: memory that is lent, what is read out, what is missing."""

import os
import threading
from pathlib import Path

import numpy as np
import pytest

import kvpool
from kvpool.core.errors import ClosedError, DeadlineError, ProtocolError, SettingsError
from kvpool.core.limits import PAGE_BYTES
from kvpool.node.pulling import Pulling
from kvpool.transport.deadline import Deadline
from kvpool.transport.ucx import nixl, said
from kvpool.transport.ucx.arena import REGION_BYTES, Arena
from kvpool.transport.ucx.messages import AGENT_BYTES_MAX, PullRequest, RegisterRequest
from kvpool.transport.ucx.shared import devices_for
from kvpool.transport.ucx.transport import _fell_back

SHARED = "sysv/memory cma/memory"
TWO_DC = "dc_mlx5/mlx5_0:1 dc_mlx5/mlx5_1:1"
USE = "please use one or more of:"
CUDA = "cuda_ipc/cuda rc_mlx5/mlx5_3:1"

PAGES = REGION_BYTES // PAGE_BYTES


@pytest.fixture
def arena():
    arena = Arena()
    yield arena
    arena.close()


def test_leases_do_not_overlap_and_come_back(arena):
    first, second = arena.lease(3, 5, Deadline(1)), arena.lease(2, 7, Deadline(1))

    taken = [page for lease, each in ((first, 5), (second, 7)) for s in lease.slots for page in range(s, s + each)]
    assert len(set(taken)) == 29
    assert arena.leased_bytes == 29 * PAGE_BYTES
    arena.release(first)
    arena.release(second)
    assert arena.leased_bytes == 0
    assert arena.lease(1, PAGES, Deadline(1)).pages == PAGES


def test_who_finds_no_room_waits_for_it_until_the_deadline(arena):
    whole = arena.lease(1, PAGES, Deadline(1))
    with pytest.raises(DeadlineError, match="in use"):
        arena.lease(1, 1, Deadline(0.01))
    got = []
    waiting = threading.Thread(target=lambda: got.append(arena.lease(1, 1, Deadline(60))))
    waiting.start()

    arena.release(whole)
    waiting.join()

    assert got[0].pages == 1


def test_closing_wakes_those_who_wait():
    arena, errors = Arena(), []
    arena.lease(1, PAGES, Deadline(1))

    def wait() -> None:
        try:
            arena.lease(1, 1, Deadline(60))
        except (ClosedError, DeadlineError) as error:
            errors.append(type(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    arena.close()
    waiting.join()

    assert errors == [ClosedError]


@pytest.mark.parametrize(
    ("line", "carrier"),
    [
        ("a intra-node cfg#1 rma_am(tcp/lo)  amo_am(tcp/lo)  am(tcp/lo cma/memory)  ka(tcp/lo)", "tcp/lo cma/memory"),
        ("a intra-node cfg#1 rma(sysv/memory)  amo(sysv/memory)  am(sysv/memory cma/memory)  ka(tcp/lo)", SHARED),
        ("a inter-node cfg#2 rma(rc_mlx5/mlx5_0:1)  am(rc_mlx5/mlx5_0:1)  ka(ud_mlx5/mlx5_0:1)", "rc_mlx5/mlx5_0:1"),
        (
            "a inter-node cfg#2 rma(dc_mlx5/mlx5_0:1 dc_mlx5/mlx5_1:1)  am(dc_mlx5/mlx5_0:1)  ka(ud_mlx5/mlx5_0:1)",
            TWO_DC,
        ),
        (
            "a inter-node cfg#3 rma_am(ud_verbs/bnxt_re0:1)  am(ud_verbs/bnxt_re0:1)  ka(ud_verbs/x:1)",
            "ud_verbs/bnxt_re0:1",
        ),
        ("a intra-node cfg#4 rma(cuda_ipc/cuda rc_mlx5/mlx5_3:1)  am(rc_mlx5/mlx5_3:1 cuda_ipc/cuda)  ka(x/y)", CUDA),
        ("a inter-node cfg#5 rma_am(tcp/eth0)  amo_am(tcp/eth0)  device(rc_gda/mlx5_0:1)  am(tcp/eth0)", "tcp/eth0"),
        ("a self cfg#0 rma_am(tcp/lo)  am(tcp/lo)", ""),
        ("UCX  INFO  Version 1.23.0", ""),
    ],
)
def test_what_ucx_moves_data_over_is_read_out_of_its_log(line, carrier):
    assert said.carrier_of(f"[1.0] [vm:1:0]      ucp_worker.c:1997 UCX  INFO    {line}") == carrier


@pytest.mark.parametrize(
    ("line", "environ", "why"),
    [
        (
            f"UCX  WARN  network devices 'ib8','ib9' are not available, {USE} 'a'(tcp), 'mlx5_0:1'(ib)",
            {"UCX_NET_DEVICES": "ib8,ib9"},
            "UCX does not find 'ib8','ib9' of UCX_NET_DEVICES='ib8,ib9'; use one or more of 'a'(tcp), 'mlx5_0:1'(ib)",
        ),
        (
            f"UCX  WARN  transport 'dc_mlx5' is not available, {USE} cma, self, tcp",
            {"UCX_TLS": "dc_mlx5", "UCX_NET_DEVICES": ""},
            "UCX does not have 'dc_mlx5' of UCX_TLS='dc_mlx5'; use one or more of cma, self, tcp",
        ),
        (
            "UCX  ERROR   no active messages transport to <no debug data>: self/memory",
            {},
            "UCX does not work with what this host has: no active messages transport to <no debug data>: self/memory",
        ),
        ("UCX  INFO  Version 1.23.0", {}, "UCX does not work with what this host has: NIXL_ERR_BACKEND"),
    ],
)
def test_why_ucx_does_not_start_names_what_was_asked_for_and_what_there_is(line, environ, why):
    text = f"[1.0] [vm:1:0]     ucp_context.c:1508 {line}\nUCX  INFO  more\n"

    assert said.why_useless(text, "NIXL_ERR_BACKEND", environ) == why


def test_what_ucx_says_is_read_once_and_cut_in_mid_line_as_it_comes(monkeypatch):
    for name in ("UCX_LOG_FILE", "UCX_LOG_LEVEL"):
        monkeypatch.setenv(name, "")  # so that it is as before when the test ends
        monkeypatch.delenv(name)
    ucx_log = said.UcxLog()
    with Path(os.environ["UCX_LOG_FILE"]).open("ab", buffering=0) as written:
        written.write(b"x \xff UCX  INFO  a inter-node cfg#2 rma(rc_mlx5/mlx5_0:1)  am(rc_mlx5/mlx5_0:1)\n")
        assert ucx_log.carrier() == "rc_mlx5/mlx5_0:1"
        written.write(b"x UCX  INFO  a inter-node cfg#3 rma_am(tcp/e")
        assert ucx_log.carrier() == "rc_mlx5/mlx5_0:1"
        written.write(b"th0)  am(tcp/eth0)\n")
        assert ucx_log.carrier() == "tcp/eth0"
    assert ucx_log.read() == ""
    ucx_log.close()


@pytest.mark.parametrize(
    ("carrier", "asked", "expected"),
    [
        ("tcp/eth0", "", True),
        ("tcp/eth0", "rc,tcp", False),
        ("rc_mlx5/mlx5_0:1 tcp/eth0", "", False),
        ("tcp/lo cma/memory", "", False),
        ("", "", False),
    ],
)
def test_a_fall_to_tcp_is_one_that_nobody_asked_for(monkeypatch, carrier, asked, expected):
    monkeypatch.setenv("UCX_TLS", asked)

    assert _fell_back(carrier) is expected


@pytest.mark.parametrize(
    ("host", "devices"),
    [("127.0.0.1", "lo"), ("::1", "lo"), ("localhost", "lo"), ("10.0.0.7", ""), ("n1.example", ""), ("0.0.0.0", "")],
)
def test_who_works_on_loopback_opens_no_port_elsewhere(host, devices):
    assert devices_for(host) == devices


def test_without_nixl_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(nixl, "PACKAGES", ("nixl_that_is_not_there",))

    with pytest.raises(SettingsError, match=r"pip install 'kvpool\[ucx\]'"):
        kvpool.connect("grpc://127.0.0.1:1", transports=["ucx"])


@pytest.mark.parametrize(
    "change",
    [
        {"agent": b"x" * (AGENT_BYTES_MAX + 1)},
        {"address": 1},
        {"size_bytes": 1},
        {"size_bytes": REGION_BYTES + 1},
        {"size_bytes": (1 << 64) - 1},  # NIXL takes it: its own check wraps round
    ],
)
def test_an_impossible_region_of_a_writer_is_refused_before_ucx_sees_it(change):
    request = RegisterRequest(**({"agent": b"x", "address": PAGE_BYTES, "size_bytes": PAGE_BYTES} | change))
    pulling = Pulling(None, None, 1)

    with pytest.raises(ProtocolError, match="cannot be"):
        pulling.handlers[RegisterRequest](request, None)


def test_pages_beyond_a_region_are_refused():
    with pytest.raises(ProtocolError, match="page 4 is not in a region of 4 pages"):
        nixl._check_pages(np.array([0, 3], np.uint32), 2, 4 * PAGE_BYTES)
    with pytest.raises(ProtocolError, match="no pages"):
        nixl._check_pages(np.array([], np.uint32), 1, PAGE_BYTES)


class _AnySegment:
    def check_segment(self, segment_id: bytes) -> None:
        pass


def test_a_pull_without_a_region_is_refused():
    pulling = Pulling(_AnySegment(), None, 1)

    with pytest.raises(ProtocolError, match="before the writer's region"):
        pulling.handlers[PullRequest](PullRequest(b"", 1, b"", b"", b"", b""), None)
