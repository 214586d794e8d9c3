"""What `kvpool doctor` says of facts, which are given here."""

import dataclasses
import hashlib
from pathlib import Path

import msgspec
import pytest

from kvpool.cli.checks import devices, host, pool, tls
from kvpool.cli.checks.devices import DeviceFacts
from kvpool.cli.checks.finding import Verdict
from kvpool.cli.checks.host import UNLIMITED, HostFacts, Room
from kvpool.client.results import NodeStatus, PoolStatus, RecoveryStatus
from kvpool.core.namespace import Namespace
from kvpool.ops.pem import Leaf
from kvpool.ops.settings import Settings
from kvpool.ops.version import __version__

GIB = 1 << 30
ROOM = Room("/dev/shm", "tmpfs", 16 * GIB, 12 * GIB)
GOOD = HostFacts(ROOM, None, 65_536, 65_536, UNLIMITED, 8, 64 * GIB, "always [advise] never", "tsc", {"p 7300": ""})
NO_DEVICES = DeviceFacts("", {}, gpu_here=False, gpus=None)
NODE = NodeStatus("n0", "ready", 1, 0, 0, (), None, (), version=__version__)
NAMESPACE = Namespace(model="m", block_tokens=16, block_bytes=4096, hash_seed="a" * 16)


def settings(**node):
    return Settings.model_validate({"node": {"node_id": "n", "size": "8GiB", **node}})


def judged(facts, *, pool_is_here=False, **node):
    return {f.check: f for f in host.check_host(settings(**node), facts, pool_is_here=pool_is_here)}


def changed(**facts):
    return dataclasses.replace(GOOD, **facts)


def room(**facts):
    return dataclasses.replace(ROOM, **facts)


def status(*namespaces, nodes=(NODE,), version=__version__, recovering=False, unix_time_s=100.0):
    documents = {n.id.hex(): n.document.decode() for n in namespaces}
    recovery = RecoveryStatus(active=recovering, nodes_reported=1, nodes_expected=1, lasted_s=0.0)
    return PoolStatus(1, version, documents, nodes, {}, recovery, unix_time_s=unix_time_s)


def pool_findings(answer, seed=None, vllm="", skew_s=0.0):
    facts = pool.PoolFacts("grpc://h:1", answer, "" if answer else "refused", skew_s, vllm, seed)
    return {finding.check: finding for finding in pool.check_pool(facts)}


def test_a_good_host_has_nothing_to_do():
    findings = judged(GOOD)

    assert {finding.verdict for finding in findings.values()} == {Verdict.OK}
    assert all(not finding.fix for finding in findings.values())


@pytest.mark.parametrize(
    ("facts", "node", "check", "verdict", "fix"),
    [
        ({"segments": room(free_bytes=4 * GIB)}, {}, "shared memory", Verdict.FAIL, "remount,size=21G /dev/shm"),
        ({"segments": room(free_bytes=GIB, own_bytes=8 * GIB)}, {}, "shared memory", Verdict.OK, ""),
        ({"segments": room(kind="ext4")}, {}, "shared memory", Verdict.WARN, "--segment-dir /dev/shm"),
        ({"segments": Room("/x", error="No such file")}, {}, "shared memory", Verdict.FAIL, "--segment-dir"),
        ({"memory_bytes": GIB}, {}, "shared memory", Verdict.FAIL, "smaller --size"),
        ({"huge_pages": "always [never] advise"}, {}, "huge pages", Verdict.WARN, "echo advise >"),
        ({"huge_pages": "[never]"}, {"hugepages": "require"}, "huge pages", Verdict.FAIL, "echo advise >"),
        ({"huge_pages": "[never]"}, {"hugepages": "off"}, "huge pages", Verdict.OK, ""),
        ({"huge_pages": ""}, {}, "huge pages", Verdict.WARN, "--hugepages"),
        ({"descriptors": 1024}, {}, "open files", Verdict.WARN, "ulimit -n"),
        ({"memlock_bytes": 8 << 20}, {}, "locked memory", Verdict.OK, ""),
        ({"memlock_bytes": 8 << 20}, {"ucx": True}, "locked memory", Verdict.WARN, "memlock=-1"),
        ({"cpus": 1}, {}, "processors", Verdict.WARN, "two or more"),
        ({"clock": "hpet"}, {}, "clock source", Verdict.WARN, "dmesg"),
        ({"ports": {"meta.grpc_port 7300": "in use"}}, {}, "ports", Verdict.WARN, "--grpc-port"),
        (
            {"disk": Room("/d", "ext4", GIB, GIB)},
            {"disk": "/d", "disk_size": "2GiB"},
            "disk tier",
            Verdict.FAIL,
            "smaller --disk-size",
        ),
        (
            {"disk": Room("/d", "tmpfs", GIB, GIB)},
            {"disk": "/d", "disk_size": "1MiB"},
            "disk tier",
            Verdict.WARN,
            "local disk",
        ),
    ],
)
def test_each_finding_of_a_host_has_its_fix(facts, node, check, verdict, fix):
    finding = judged(changed(**facts), **node)[check]

    assert finding.verdict == verdict
    assert fix in finding.fix


def test_ports_in_use_where_a_pool_answers_are_its_own():
    assert judged(changed(ports={"meta.grpc_port 7300": "in use"}), pool_is_here=True)["ports"].verdict == Verdict.OK


@pytest.mark.parametrize(
    ("facts", "node", "check", "verdict"),
    [
        ({}, {}, "UCX", Verdict.OK),
        ({}, {"ucx": True}, "UCX", Verdict.FAIL),
        ({"nixl": "nixl_cu12 1.5"}, {"ucx": True}, "UCX", Verdict.WARN),
        ({"nixl": "nixl_cu12 1.5", "rdma": {"mlx5_0": "4: ACTIVE"}}, {"ucx": True}, "UCX", Verdict.OK),
        ({"nixl": "nixl_cu12 1.5", "rdma": {"mlx5_0": "1: DOWN"}}, {"ucx": True}, "UCX", Verdict.WARN),
        ({}, {"vram": "1GiB"}, "CUDA", Verdict.FAIL),
        ({"gpu_here": True}, {}, "CUDA", Verdict.WARN),
        ({"gpus": 2}, {"vram": "1GiB"}, "CUDA", Verdict.OK),
    ],
)
def test_devices_are_judged_by_what_is_asked_of_them(facts, node, check, verdict):
    found = devices.check_devices(settings(**node), dataclasses.replace(NO_DEVICES, **facts))

    finding = next(finding for finding in found if finding.check == check)
    assert finding.verdict == verdict
    assert bool(finding.fix) == (verdict != Verdict.OK)


def test_a_pool_that_does_not_answer_is_no_failure():
    finding = pool_findings(None)["pool"]

    assert (finding.verdict, finding.seen) == (Verdict.WARN, "refused")
    assert "kvpool up" in finding.fix


def test_a_pool_in_order():
    findings = pool_findings(status(NAMESPACE))

    assert {finding.verdict for finding in findings.values()} == {Verdict.OK}


@pytest.mark.parametrize(
    ("answer", "check", "verdict", "said"),
    [
        (status(nodes=()), "pool", Verdict.FAIL, "no node is ready"),
        (status(nodes=(dataclasses.replace(NODE, state="lost"),)), "pool", Verdict.FAIL, "lost nodes: n0"),
        (status(recovering=True), "pool", Verdict.WARN, "recovering"),
        (status(version="0.0.1"), "versions", Verdict.WARN, "0.0.1: metadata service"),
        (status(nodes=(dataclasses.replace(NODE, version=""),)), "versions", Verdict.WARN, "unknown: n0"),
        (
            status(NAMESPACE, msgspec.structs.replace(NAMESPACE, hash_seed="b" * 16)),
            "block hashes",
            Verdict.WARN,
            "hash differently",
        ),
    ],
)
def test_each_finding_of_a_pool(answer, check, verdict, said):
    finding = pool_findings(answer)[check]

    assert finding.verdict == verdict
    assert said in finding.seen


def test_a_seed_that_no_engine_of_the_pool_has():
    digest = hashlib.sha256(b"7").hexdigest()[:16]
    same = msgspec.structs.replace(NAMESPACE, hash_seed=digest)

    assert pool_findings(status(NAMESPACE), seed="7")["block hashes"].verdict == Verdict.WARN
    assert pool_findings(status(same), seed="7")["block hashes"].verdict == Verdict.OK


@pytest.mark.parametrize(
    ("number", "verdict"),
    [("0.31.2", Verdict.FAIL), ("0.32.0", Verdict.OK), ("0.33.1+cpu", Verdict.OK), ("0.34.0", Verdict.FAIL)],
)
def test_the_engines_version(number, verdict):
    assert pool_findings(None, vllm=number)["vLLM"].verdict == verdict


def test_clocks_are_compared_with_the_time_of_the_answer_left_out():
    on_time = pool.judge_answer("u", status(unix_time_s=103.0), 100.0, 104.0)
    ahead = pool.judge_answer("u", status(unix_time_s=60.0), 100.0, 104.0)

    assert on_time.skew_s == 0.0
    assert ahead.skew_s == -40.0
    finding = pool_findings(status(), skew_s=-40.0)["time of day"]
    assert (finding.verdict, finding.seen[:21]) == (Verdict.WARN, "40 s ahead of the poo")


def test_certificates_that_soon_end():
    leaf = Leaf("kvpool://meta", "2030-01-01 00:00 UTC", 3 * 86_400.0)

    finding = tls.judge_leaf(Path("/pki/meta.pem"), leaf)

    assert (finding.verdict, finding.fix) == (Verdict.WARN, "kvpool certs /pki: renews it")
    assert tls.judge_leaf(Path("/pki/meta.pem"), dataclasses.replace(leaf, left_s=9e9)).verdict == Verdict.OK


def test_plaintext_is_for_this_host_alone():
    [here], [there] = (list(tls.check_tls(settings(), name)) for name in ("127.0.0.1", "pool.example"))

    assert (here.verdict, there.verdict) == (Verdict.OK, Verdict.WARN)
