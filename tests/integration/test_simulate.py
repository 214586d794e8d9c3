"""`kvpool simulate` as users run it, on a small generated trace."""

import importlib.util
import json
import random

import pytest

from kvpool.cli.main import main

KEYS = ["policy", "capacity", "hit_rate"]


@pytest.fixture
def trace(tmp_path):
    """Six conversations of eight turns, 16 tokens a block: 8 blocks and 2 more with each turn, interleaved."""
    rng, lines, ids = random.Random(3), [], iter(range(1, 10_000))
    chains = [[0, *(next(ids) for _ in range(7))] for _ in range(6)]
    for turn in range(8):
        for chain in rng.sample(chains, len(chains)):
            chain += [next(ids), next(ids)]
            at_ms = 10_000 * turn + rng.randrange(10_000)
            lines.append((at_ms, {"input_length": 16 * len(chain) + 5, "output_length": 3, "hash_ids": chain[:]}))
    path = tmp_path / "trace.jsonl"
    lines.sort(key=lambda line: line[0])
    for _, fields in lines:
        fields["hash_ids"].append(100_000 + len(lines))  # the partial tail
    path.write_text("".join(json.dumps({"timestamp": at_ms, **fields}) + "\n" for at_ms, fields in lines))
    return path


@pytest.fixture
def rows_of(capsys, trace):
    def rows_of(*arguments: str) -> list[dict]:
        assert main(["simulate", str(trace), *arguments, "--format", "json"]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return rows_of


def test_there_is_a_row_for_each_policy_and_capacity(rows_of):
    rows = rows_of("--capacity", "20%,50%,100%", "--policy", "default,lru,sieve,s3fifo,s3fifo-30,2q,2q-50,arc,optimal")

    assert all(list(row)[:3] == KEYS for row in rows)
    assert [row["capacity"] for row in rows] == [0.2, 0.5, 1.0] * 9
    by = {(row["policy"], row["capacity"]): row["hit_rate"] for row in rows}
    for (policy, capacity), rate in by.items():
        assert 0 <= rate <= by["optimal", capacity] <= rows[0]["ideal_hit_rate"], policy
        assert by[policy, 1.0] == rows[0]["ideal_hit_rate"], policy
    assert by["default", 0.2] >= by["lru", 0.2]


def test_a_pool_that_is_shared_hits_more_than_private_caches(rows_of):
    [row] = rows_of("--capacity", "50%", "--engines", "3", "--policy", "lru")

    assert 0 < row["private_hit_rate"] < row["hit_rate"]
    assert row["engines"] == 3


def test_a_size_is_as_many_blocks_as_its_bytes_hold(rows_of):
    [row] = rows_of("--capacity", "1MiB", "--bytes-per-token", "1KiB")

    assert row["capacity_blocks"] == 64
    assert row["capacity_bytes"] == 1 << 20


def test_people_are_told_the_definition_and_what_is_enough(capsys, trace):
    assert main(["simulate", str(trace), "--capacity", "10%,100%", "--bytes-per-token", "38kB"]) == 0

    text = " ".join(capsys.readouterr().out.split())
    assert "48 requests" in text
    assert "hit tokens / input tokens" in text
    assert "that an infinite cache hits" in text


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_the_curves_are_drawn(rows_of, tmp_path):
    rows_of("--capacity", "20%,50%", "--engines", "2", "--plot", str(tmp_path / "curve.png"))

    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is not None, reason="matplotlib is installed")
def test_without_matplotlib_the_fix_is_named_before_anything_runs(capsys, trace):
    assert main(["simulate", str(trace), "--plot", "curve.png"]) == 2

    assert "pip install 'kvpool[plot]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--capacity", "0%"], "'0%'"),
        (["--capacity", "nan%"], "'nan%'"),
        (["--capacity", "ten%"], "'ten%'"),
        (["--capacity", "1e9%"], "at most"),
        (["--capacity", "0.001%"], "0 blocks"),
        (["--capacity", "4GiB"], "--bytes-per-token"),
        (["--capacity", "4G", "--bytes-per-token", "1kB"], "'4G'"),
        (["--capacity", ""], "no capacity"),
        (["--policy", "fifo"], "use one or more of default,lru,sieve"),
        (["--policy", ","], "no policy"),
        (["--bytes-per-token", "0"], "bytes-per-token"),
        (["--engines", "60", "--capacity", "10%"], "60 engines"),
    ],
)
def test_bad_input_names_the_value_and_the_fix(capsys, trace, arguments, says):
    assert main(["simulate", str(trace), *arguments]) == 2

    assert says in capsys.readouterr().err


def test_a_broken_trace_is_refused_with_its_line(capsys, trace):
    trace.write_text(trace.read_text() + '{"timestamp": 1}\n')

    assert main(["simulate", str(trace)]) == 2

    assert "trace.jsonl, line 49" in capsys.readouterr().err
