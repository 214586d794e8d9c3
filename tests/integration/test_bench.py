"""`kvpool bench` as users run it, at tiny sizes: the rows that it promises, and nothing left behind."""

import json
import signal
import subprocess
import sys

import pytest

from tests.integration.places import Place

COMMAND = [sys.executable, "-m", "kvpool.cli.main", "bench"]

TRANSFER_KEYS = [
    "bench",
    "transport",
    "op",
    "block_bytes",
    "blocks",
    "gbps",
    "limit_gbps",
    "ratio",
    "cpu_s_per_gb",
    "p50_us_single",
    "threads",
    "streams",
    "rounds",
    "layout",
    "evicting",
]
LOOKUP_KEYS = ["bench", "size", "p50_ms", "p99_ms", "keys_per_s", "via"]
TINY = ["--blocks", "8", "--rounds", "2"]


def run(place: Place, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], env=place.environ, capture_output=True, text=True, timeout=100, check=False
    )


def rows_of(place: Place, *arguments: str) -> list[dict]:
    result = run(place, *arguments, "--format", "json")
    assert result.returncode == 0, result.stderr
    place.assert_clean()
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    for row in rows:
        row_without = {name: value for name, value in row.items() if name != "lookup_max_ms"}  # 0: none came in between
        assert all(value > 0 for value in row_without.values() if type(value) in {int, float}), row
    return rows


def test_a_probe_compares_answers_about_anothers_blocks_with_those_about_nobodys(place):
    rows = rows_of(place, "probe", "--samples", "20")

    assert [(row["bench"], row["what"], row["samples"]) for row in rows] == [
        ("probe", "a namespace's id", 20),
        ("probe", "a prompt's hashes", 20),
    ]


def test_transfer_shows_tls_beside_plaintext_and_what_its_cipher_does_alone(place):
    rows = rows_of(place, "transfer", *TINY, "--transport", "tcp", "--tls", "--op", "put", "--block-bytes", "64KiB")

    assert [(row["bench"], row.get("transport")) for row in rows] == [
        ("transfer", "tcp"),
        ("transfer", "tls"),
        ("cipher", None),
    ]


@pytest.mark.parametrize("transport", ["shm", "unix", "tcp", "inproc"])
def test_transfer_has_a_row_for_each_operation_and_size(place, transport):
    rows = rows_of(place, "transfer", *TINY, "--transport", transport, "--block-bytes", "4KiB,1MiB")

    assert [list(row) for row in rows] == [TRANSFER_KEYS] * 4
    assert [(row["op"], row["block_bytes"], row["blocks"]) for row in rows] == [
        ("get", 4096, 8),
        ("get", 1 << 20, 8),
        ("put", 4096, 8),
        ("put", 1 << 20, 8),
    ]
    assert {row["transport"] for row in rows} == {transport}


def test_transfer_says_how_many_threads_and_streams_worked(place):
    options = ["--transport", "tcp,shm", "--op", "get", "--block-bytes", "1MiB", "--batch", "4MiB"]

    tcp, shm = rows_of(place, "transfer", *TINY, *options, "--threads", "2", "--streams", "3")

    assert (tcp["threads"], tcp["streams"], tcp["rounds"]) == (2, 3, 2)
    assert (shm["threads"], shm["streams"], shm["rounds"]) == (2, 3, 2)


def test_lookup_has_rows_for_the_wire_the_directory_and_its_memory(place):
    rows = rows_of(place, "lookup", "--sizes", "1,300", "--samples", "20", "--memory-blocks", "4096")

    wire, core, memory = rows[:4], rows[4:6], rows[6:]
    assert [list(row) for row in wire] == [LOOKUP_KEYS] * 4
    assert [(row["via"], row["size"]) for row in wire] == [("unix", 1), ("unix", 300), ("tcp", 1), ("tcp", 300)]
    assert [list(row) for row in core] == [["bench", "size", "p50_us"]] * 2
    assert [row["bench"] for row in core] == ["lookup_core"] * 2
    assert [list(row) for row in memory] == [["bench", "blocks", "bytes_per_block", "bytes_per_copy"]]
    assert (memory[0]["bench"], memory[0]["blocks"]) == ("directory_memory", 4096)


def test_store_has_one_row(place):
    (row,) = rows_of(place, "store", "--blocks", "512", "--rounds", "1", "--samples", "3")

    assert list(row) == ["bench", "blocks_per_s", "visible_ms", "end_to_end_blocks_per_s"]
    assert row["bench"] == "store"


def test_recovery_has_a_row_for_each_fault_and_one_for_the_hits_that_a_loss_costs(place):
    rows = rows_of(place, "recovery", "--blocks", "2048")

    faults, (loss,) = rows[:-1], rows[-1:]
    assert [list(row) for row in faults] == [["bench", "what", "blocks", "seconds", "cpu_s", "lookup_max_ms"]] * 4
    assert {(row["bench"], row["blocks"]) for row in faults} == {("recovery", 2048)}
    assert [row["what"] for row in faults] == ["reconnect", "metadata_restart", "node_restart", "node_loss"]
    assert list(loss) == ["bench", "what", "nodes", "lost_blocks", "requests", "hit_rate", "at_once", "later"]
    assert (loss["bench"], loss["nodes"]) == ("recovery_hits", 16)
    assert loss["hit_rate"] < 1


def test_a_table_shows_the_ratio_and_its_target(place):
    result = run(place, "transfer", *TINY, "--op", "get", "--block-bytes", "64KiB")

    assert result.returncode == 0, result.stderr
    assert all(words in result.stdout for words in ("ratio", "target", ">= 0.8", "shm get", "64 KiB"))
    place.assert_clean()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["transfer", "--transport", "pigeon"], "transport 'pigeon' is not known; use one of shm,"),
        (["transfer", "--op", "swap"], "op 'swap' is not known; use one of get, put"),
        (["transfer", "--block-bytes", "64K"], "size '64K'"),
        (["transfer", "--rounds", "0"], "rounds is 0; it must be 1 or more"),
        (["lookup", "--sizes", "1,many"], "'many' is not a number"),
        (["lookup", "--sizes", "65537"], "a look-up names at most 65536 blocks"),
        (["store", "--samples", "0"], "samples is 0"),
    ],
)
def test_misuse_is_code_2_before_anything_starts(place, arguments, message):
    result = run(place, *arguments)

    assert (result.returncode, result.stdout) == (2, "")
    assert message in result.stderr
    place.assert_clean()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_benchmark_that_is_stopped_in_the_middle_stops_its_processes(place, number):
    bench = subprocess.Popen(
        [*COMMAND, "transfer", "--transport", "tcp", "--rounds", "10000", "--blocks", "64"],
        env=place.environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    # Segments appear when the node has begun to serve: the benchmark is then past its start and has much to do.
    while not any(path.is_file() for path in place.segments.rglob("*")):
        with pytest.raises(subprocess.TimeoutExpired):
            bench.wait(0.05)

    bench.send_signal(number)
    _, stderr = bench.communicate(timeout=60)

    assert bench.returncode == 128 + number, stderr
    place.assert_clean()
