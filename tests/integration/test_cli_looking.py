"""`kvpool top`, `stat`, `namespaces`, `block` and `doctor` against a real pool, which they share with other tests.

They run in this process, but for the one that needs a terminal.
"""

import contextlib
import os
import pty
import subprocess
import sys
import termios

import msgspec
import pytest

from kvpool.cli.main import main
from tests.integration.conftest import BLOCK_BYTES, blank, open_blocks, random_blocks, random_chain
from tests.waiting import eventually


@pytest.fixture
def run(pool, capsys, monkeypatch):
    """Runs a command for the pool; (exit code, what it printed, what it said on stderr)."""
    monkeypatch.setenv("COLUMNS", "160")

    def run(*arguments):
        capsys.readouterr()
        code = main([arguments[0], f"--pool={pool.uri}", *arguments[1:]])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def record(run):
    """The same, with --format json, for a command that ends well; each line decoded."""

    def record(*arguments):
        code, out, err = run(*arguments, "--format=json")
        assert code == 0, err
        return [msgspec.json.decode(line) for line in out.splitlines()]

    return record


@pytest.fixture
def stored(pool, rng):
    """Three blocks of a chain, and a second child of the first one."""
    extra = {"run": os.urandom(4).hex()}
    keyspace, chain = open_blocks(pool.connect(), model="org/model", tenant="t", extra=extra), random_chain(3)
    branch = [chain[0], *random_chain(1)]
    assert keyspace.store(chain, list(random_blocks(rng, 3))).stored == 3
    assert keyspace.store(branch, list(random_blocks(rng, 2))).stored == 1
    return keyspace, chain


def test_block_says_where_it_is_and_what_holds_it(run, record, stored):
    keyspace, chain = stored
    matched = keyspace.match(chain, lease_s=20)

    [answer] = record("block", chain[0].hex())
    [deepest] = record("block", chain[2].hex())[0]["blocks"]

    [head] = answer["blocks"]
    assert (head["state"], head["parent"], head["children"], head["leases"]) == ("visible", "", 2, 0)
    assert (head["block_bytes"], head["namespace"]) == (BLOCK_BYTES, keyspace.namespace.id.hex())
    assert (deepest["parent"], deepest["children"], deepest["leases"], deepest["pinned"]) == (
        chain[1].hex(),
        0,
        1,
        False,
    )
    assert 0 < deepest["leased_s"] <= 21
    [copy] = deepest["copies"]
    assert (copy["node_id"], copy["medium"], copy["shard"], copy["surplus"]) == ("n0", "shm", 0, False)
    assert copy["slot"] >= 0
    assert (copy["generation"] > 0, len(copy["checksum"])) == (True, 16)
    code, out, _ = run("block", chain[2].hex(), "--model=org/model")
    assert (code, "1 lease, " in out, "org/model" in out) == (0, True, True)
    keyspace.release(matched)
    assert "nothing: it may be evicted" in run("block", chain[2].hex())[1]


def test_a_block_that_nobody_has_is_exit_code_1_and_one_that_is_no_hash_2(run):
    code, _, err = run("block", "ab" * 32)
    assert (code, err.count("\n")) == (1, 1)
    assert "kvpool explain --hash" in err
    assert run("block", "xyz")[0] == 2
    assert run("block", "ab" * 32, "--model=a", "--namespace=b")[0] == 2


def test_namespaces_show_what_is_held_and_hit(run, record, stored):
    keyspace, chain = stored
    keyspace.match([*chain, *random_chain(1)])
    keyspace.load(chain, blank(3))

    [answer] = record("namespaces")

    by_id = {one["namespace"]: one for one in answer["namespaces"]}
    usage = by_id[keyspace.namespace.id.hex()]
    assert (usage["model"], usage["tenant"], usage["blocks"]) == ("org/model", "t", 4)
    assert (usage["asked_blocks"], usage["matched_blocks"]) == (4, 3)
    assert (usage["size_bytes"], usage["stored_bytes"], usage["read_bytes"]) == tuple(
        BLOCK_BYTES * n for n in (4, 4, 3)
    )
    assert "org/model" in run("namespaces")[1]


def test_namespaces_differ_by_field(run, record, stored, tmp_path):
    opened = stored[0].namespace
    changed = msgspec.structs.replace(opened, epoch=opened.epoch + 1, kv_dtype="fp8")
    (tmp_path / "changed.json").write_bytes(changed.document)

    [answer] = record("namespaces", "--diff", opened.id.hex()[:12], str(tmp_path / "changed.json"))

    assert {difference["field"] for difference in answer["differences"]} == {"epoch", "kv_dtype"}
    code, out, _ = run("namespaces", "--diff", opened.id.hex(), opened.id.hex())
    assert (code, out.strip()) == (0, "no difference: engines with these share blocks")
    code, _, err = run("namespaces", "--diff", opened.id.hex(), changed.id.hex())
    assert (code, "no such namespace is open" in err) == (1, True)


def test_stat_prints_a_line_for_each_interval(run, record, stored):
    keyspace, chain = stored
    first, second = record("stat", "--count=2", "--interval=100ms")
    keyspace.match(chain)
    [since_start] = record("stat", "--count=1")

    assert first["nodes_ready"] == second["nodes_ready"] == 1
    assert second["uptime_s"] > first["uptime_s"]
    assert second["interval_s"] < first["interval_s"]
    assert since_start["lookups_per_s"] > 0
    header, line = run("stat", "--count=1")[1].splitlines()
    assert header.split()[:2] == ["nodes", "used"]
    assert line.split()[0] == "1/1"


def test_top_prints_one_frame_where_there_is_no_terminal(run, record, stored):
    code, out, _ = run("top", "--once", "--interval=100ms", "--namespaces=1000")

    assert code == 0
    assert "\x1b" not in out
    assert all(said in out for said in ("hit rate", "n0", "org/model"))
    [frame] = record("top", "--once", "--interval=100ms")
    assert frame["status"]["nodes"][0]["node_id"] == "n0"


def test_what_moves_through_sockets_is_told_by_transport(pool, record, rng):
    keyspace, chain = open_blocks(pool.connect("tcp")), random_chain(2)
    keyspace.store(chain, list(random_blocks(rng, 2)))
    assert keyspace.load(chain, blank(2)).loaded == 2

    def moved():
        [frame] = record("stat", "--count=1")
        return frame["moved_bytes_per_s"]

    eventually(lambda: {"in tcp", "out tcp"} <= set(moved()))


def test_completion_names_the_commands(monkeypatch, capsys):
    monkeypatch.setenv("_KVPOOL_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "kvpool st")
    monkeypatch.setenv("COMP_CWORD", "1")

    with contextlib.suppress(SystemExit):
        main([])

    assert capsys.readouterr().out.split() == ["status", "stat"]


@pytest.mark.parametrize("arguments", [["stat", "-i", "0s"], ["top", "--interval=never"], ["stat", "--count=0"]])
def test_what_cannot_be_is_a_usage_error(run, arguments):
    assert run(*arguments)[0] == 2


@pytest.mark.parametrize("command", ["stat", "top", "namespaces"])
def test_a_pool_that_is_not_there_is_exit_code_3(command, capsys):
    assert main([command, "--pool=grpc://127.0.0.1:1", "--timeout=1s"]) == 3
    assert capsys.readouterr().err.count("\n") == 1


def test_doctor_examines_this_host_and_the_pool(run, tmp_path):
    options = (f"--segment-dir={tmp_path}", "--size=1MiB")
    code, out, _ = run("doctor", *options, "--format=json")

    findings = {finding["check"]: finding for finding in msgspec.json.decode(out.splitlines()[0])["findings"]}
    assert findings["pool"]["verdict"] == findings["versions"]["verdict"] == "ok"
    assert {"shared memory", "open files", "ports", "UCX", "CUDA", "TLS", "time of day", "block hashes"} <= set(
        findings
    )
    assert all(bool(finding["fix"]) == (finding["verdict"] != "ok") for finding in findings.values())
    assert code == 4 * any(finding["verdict"] == "fail" for finding in findings.values())


def test_doctor_fails_for_a_node_that_does_not_fit(run, tmp_path):
    code, out, err = run("doctor", f"--segment-dir={tmp_path / 'nowhere'}")

    assert code == 4
    assert "fix: " in out
    assert err.count("\n") == 1


def test_top_draws_on_a_terminal_until_q_and_puts_the_terminal_back(pool):
    ours, theirs = pty.openpty()
    try:
        before = termios.tcgetattr(theirs)
        command = [sys.executable, "-m", "kvpool.cli.main", "top", f"--pool={pool.uri}"]
        environ = os.environ | {"TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
        with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, env=environ) as process:
            drawn = b""
            while b"hit rate" not in drawn:
                drawn += os.read(ours, 65_536)
            os.write(ours, b"q")
            os.set_blocking(ours, False)
            eventually(lambda: _drain(ours) or process.poll() is not None)
            assert process.returncode == 0, process.stderr.read()
        assert termios.tcgetattr(theirs) == before
    finally:
        os.close(ours)
        os.close(theirs)


def _drain(descriptor):
    """Take what is drawn, so that nobody waits for it to be taken."""
    with contextlib.suppress(BlockingIOError):
        os.read(descriptor, 65_536)
