"""Mooncake traces: what is read, and how everything that cannot be replayed is refused."""

import gzip
import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.bench import lines as reading
from kvpool.bench import trace
from kvpool.bench.hitrate import ideal_hit_rate
from kvpool.bench.trace import TraceLine, parse_line, read_trace
from kvpool.core.errors import UsageError

PUBLIC_TRACES = Path(__file__).parents[3] / "shared" / "data" / "traces"


def line(tokens: int, ids: list[int], **others: object) -> str:
    return json.dumps({"timestamp": 0, "input_length": tokens, "output_length": 7, "hash_ids": ids, **others})


@pytest.fixture
def write(tmp_path):
    def write(*lines: str | bytes, packed: bool = False) -> Path:
        path = tmp_path / ("trace.jsonl.gz" if packed else "trace.jsonl")
        content = b"".join((x if isinstance(x, bytes) else x.encode()) + b"\n" for x in lines)
        path.write_bytes(gzip.compress(content) if packed else content)
        return path

    return write


@pytest.mark.parametrize("packed", [False, True])
def test_ids_become_chained_hashes_and_the_partial_tail_is_left_out(write, packed):
    path = write(line(100, [4, 9]), line(130, [4, 7, 8]), packed=packed)

    workload = read_trace(path)

    root = hashlib.sha256((4).to_bytes(8, "little")).digest()
    child = hashlib.sha256(root + (7).to_bytes(8, "little")).digest()
    assert workload.block_tokens == 64
    assert [request.input_tokens for request in workload.requests] == [100, 130]
    assert (root,) == workload.requests[0].hashes
    assert (root, child) == workload.requests[1].hashes


def test_an_id_under_two_parents_is_two_blocks(write):
    workload = read_trace(write(line(32, [1, 5]), line(32, [2, 5])))

    assert workload.unique_blocks() == 4


@pytest.mark.parametrize(
    ("requests", "block_tokens"),
    [
        ([(11_349, 177)], 64),  # full blocks only
        ([(6_758, 14), (7_322, 15)], 512),  # the partial tail too
        ([(10, 1)], 16),  # nothing to tell by: the smallest
        ([(15, 0), (16, 1)], 16),
    ],
)
def test_block_size_is_the_smallest_standard_one_that_fits_every_line(write, requests, block_tokens):
    path = write(*(line(tokens, list(range(ids))) for tokens, ids in requests))

    assert block_tokens == read_trace(path).block_tokens


def test_a_size_that_is_not_standard_must_be_given_and_must_fit(write):
    path = write(line(480, list(range(10))), line(100, [0, 1, 99]))

    with pytest.raises(UsageError, match=r"trace\.jsonl, line \d: .* --block-tokens"):
        read_trace(path)
    assert [len(request.hashes) for request in read_trace(path, block_tokens=48).requests] == [10, 2]
    with pytest.raises(UsageError, match=r"trace\.jsonl, line 1: 10 ids for 480 tokens do not fit 64"):
        read_trace(path, block_tokens=64)


def test_a_line_that_breaks_the_file_s_own_block_size_is_the_one_named(write):
    path = write(line(6_758, list(range(14))), line(7_322, list(range(15))), line(7_322, list(range(14))))

    with pytest.raises(UsageError, match=r"trace\.jsonl, line 3: 14 ids for 7322 tokens do not fit 512"):
        read_trace(path)


def test_ceil_and_floor_do_not_mix_in_one_file(write):
    with pytest.raises(UsageError, match="line 2"):
        read_trace(write(line(100, [1, 2]), line(100, [1])), block_tokens=64)


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (b"{", "truncated"),
        (b"", "truncated"),
        (b"\xff\xfe", "malformed"),
        (b"[1, 2]", "Expected `object`"),
        (b'{"timestamp": 1, "output_length": 1, "hash_ids": []}', "input_length"),
        (line(0, []).encode(), r"`int` >= 1 - at `\$.input_length`"),
        (line(1 << 40, []).encode(), r"<= 2147483648 - at `\$.input_length`"),
        (line(16, [-1]).encode(), r">= 0 - at `\$.hash_ids\[0\]`"),
        (line(16, [1 << 80]).encode(), r"\$.hash_ids"),
        (line(16, ["x"]).encode(), "Expected `int`, got `str`"),
        (line(16, [1], timestamp=-1).encode(), r"\$.timestamp"),
        (line(16, [1], output_length=None).encode(), r"\$.output_length"),
        (b'{"x": ' + b"[" * 100_000, "line 2"),
    ],
)
def test_a_malformed_line_is_one_error_with_file_line_and_fix(write, bad, complaint):
    path = write(line(16, [1]), bad, line(16, [1]))

    with pytest.raises(UsageError, match=complaint) as caught:
        read_trace(path)

    message = str(caught.value)
    assert message.startswith("trace.jsonl, line 2: ")
    assert "correct or delete the line" in message
    assert "\n" not in message


def test_a_plain_file_that_was_cut_off_names_the_cut_line(write):
    path = write(line(16, [1]), line(32, [1, 2]))
    path.write_bytes(path.read_bytes()[:-10])

    with pytest.raises(UsageError, match=r"trace\.jsonl, line 2: Input data was truncated"):
        read_trace(path)


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: data[:20] + b"!" + data[21:]])
def test_damaged_gzip_is_one_error_with_file_line_and_fix(write, damage):
    path = write(*(line(16 * i, list(range(i))) for i in range(1, 200)), packed=True)
    path.write_bytes(damage(path.read_bytes()))

    with pytest.raises(UsageError, match=r"trace\.jsonl\.gz, (after )?line \d+: .*fetch the file again"):
        read_trace(path)


def test_a_file_without_requests_or_not_there_is_refused(write, tmp_path):
    with pytest.raises(UsageError, match=r"trace\.jsonl has no requests"):
        read_trace(write())
    with pytest.raises(UsageError, match=r"absent\.jsonl' cannot be read: .*No such file"):
        read_trace(tmp_path / "absent.jsonl")
    with pytest.raises(UsageError, match="cannot be read"):
        read_trace(tmp_path)


def test_limits_end_the_reading_before_the_memory_does(write, monkeypatch):
    monkeypatch.setattr(reading, "LINE_BYTES_MAX", 200)
    with pytest.raises(UsageError, match="line 2 is longer than 200 bytes"):
        read_trace(write(line(16, [1]), line(1_600, list(range(100)))))

    monkeypatch.setattr(trace, "REQUESTS_MAX", 2)
    with pytest.raises(UsageError, match="line 3: more than 2 requests"):
        read_trace(write(*[line(16, [1])] * 3))

    monkeypatch.setattr(trace, "REFERENCES_MAX", 3)
    with pytest.raises(UsageError, match=r"line 2: more than .* 3 ids"):
        read_trace(write(line(32, [1, 2]), line(32, [1, 2])))


def test_too_many_ids_in_a_line_are_refused(write):
    ids = list(range(65_537))
    with pytest.raises(UsageError, match="line 1: Expected `array` of length <= 65536"):
        read_trace(write(line(65_537 * 16, ids)))


@pytest.mark.parametrize("block_tokens", [0, -16, 1 << 21])
def test_an_impossible_block_size_is_refused(write, block_tokens):
    with pytest.raises(UsageError, match=f"block tokens are {block_tokens}"):
        read_trace(write(line(16, [1])), block_tokens)


@given(
    st.one_of(
        st.binary(max_size=300),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=4)
                | st.dictionaries(
                    st.sampled_from(["timestamp", "input_length", "output_length", "hash_ids", "x"]), inner
                )
            ),
        ).map(lambda document: json.dumps(document).encode()),
        st.fixed_dictionaries(
            {
                "timestamp": st.integers(-1, 10) | st.floats(),
                "input_length": st.integers(-1, 1 << 33),
                "output_length": st.integers(-1, 10),
                "hash_ids": st.lists(st.integers(-1, 1 << 64), max_size=5),
            }
        ).map(lambda document: json.dumps(document).encode()),
    )
)
def test_any_bytes_are_a_request_or_a_usage_error(raw):
    try:
        parsed = parse_line(raw, "fuzz.jsonl", 3)
    except UsageError as error:
        message = str(error)
    else:
        assert isinstance(parsed, TraceLine)
        assert parsed.input_length >= 1
        assert all(0 <= block_id < 1 << 63 for block_id in parsed.hash_ids)
        return
    assert message.startswith("fuzz.jsonl, line 3: ")


@pytest.mark.skipif(not PUBLIC_TRACES.is_dir(), reason="the public traces are not on this machine")
@pytest.mark.parametrize(
    ("name", "block_tokens", "requests", "ideal"),
    [
        ("agentic_le64k_u16.mooncake64.jsonl.gz", 64, 1_091, 0.9150),
        ("agentic_le64k_u16.mooncake512.jsonl.gz", 512, 1_091, 0.9089),
        ("conversation_trace.jsonl.gz", 512, 12_031, 0.3734),
        ("synthetic_trace.jsonl.gz", 512, 3_993, 0.6504),
    ],
)
def test_public_traces_have_their_known_ideal_hit_rates(name, block_tokens, requests, ideal):
    workload = read_trace(PUBLIC_TRACES / name)

    assert block_tokens == workload.block_tokens
    assert requests == len(workload.requests)
    assert ideal == pytest.approx(ideal_hit_rate(workload), abs=5e-5)
