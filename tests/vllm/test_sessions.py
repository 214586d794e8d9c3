"""Sessions of text for `kvpool simulate`: here, since vLLM brings the package tokenizers that they need."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from kvpool.bench.formats import read_workload
from kvpool.bench.hitrate import ideal_hit_rate
from kvpool.cli.main import main
from kvpool.core.errors import UsageError

BLOCK = 4


@pytest.fixture
def tokenizer(tmp_path) -> Path:
    """A token a word, of w0 to w99."""
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(100)} | {"?": 100}, unk_token="?"))
    words.pre_tokenizer = WhitespaceSplit()
    words.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


@pytest.fixture
def write(tmp_path):
    def write(*calls: dict | str) -> Path:
        path = tmp_path / "sessions.jsonl"
        path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in calls))
        return path

    return write


def call(session: str, number: int, keep: int, words: range, at_s: float | None = None) -> dict:
    return {"s": session, "n": number, "t": at_s, "keep": keep, "add": "".join(f"w{i} " for i in words), "out": "w0"}


def test_prompts_are_what_was_kept_and_what_was_added(write, tokenizer):
    system = "".join(f"w{i} " for i in range(8))
    path = write(
        call("a", 0, 0, range(8)),
        call("b", 0, 0, range(10)),
        call("a", 1, len(system), range(20, 26)),
        call("b", 2, len("w0 "), range(1, 4)),
    )

    workload = read_workload(path, BLOCK, tokenizer)

    a, b, a2, b2 = workload.requests
    assert [request.input_tokens for request in workload.requests] == [8, 10, 14, 4]
    assert [len(request.hashes) for request in workload.requests] == [2, 2, 3, 1]
    assert a.hashes == b.hashes == a2.hashes[:2]
    assert b2.hashes == a.hashes[:1]
    assert ideal_hit_rate(workload) == pytest.approx((8 + 8 + 4) / (8 + 10 + 14 + 4))


def test_times_count_when_every_call_has_one(write, tokenizer):
    timed = read_workload(write(call("a", 0, 0, range(4), 1.5), call("a", 1, 0, range(4), 2.5)), BLOCK, tokenizer)
    assert [request.arrival_s for request in timed.requests] == [1.5, 2.5]
    partly = read_workload(write(call("a", 0, 0, range(4), 1.5), call("a", 1, 0, range(4))), BLOCK, tokenizer)
    assert [request.arrival_s for request in partly.requests] == [None, None]


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ([call("a", 0, 5, range(4))], "line 1: keeps 5 characters of a prompt of 0"),
        ([call("a", 1, 0, range(4)), call("a", 1, 0, range(4))], "line 2: call 1 of session 'a' comes after 1"),
        ([call("a", 0, 0, range(4)), "{}"], "line 2: .* missing required field"),
        ([call("a", 0, 0, range(4)) | {"keep": -1}], "line 1"),
        ([call("a", 0, 0, range(0))], "no prompts"),
    ],
)
def test_a_file_that_cannot_be_replayed_is_refused_by_line(lines, complaint, write, tokenizer):
    with pytest.raises(UsageError, match=complaint):
        read_workload(write(*lines), BLOCK, tokenizer)


def test_a_tokenizer_is_asked_for_and_checked(write, tmp_path):
    path = write(call("a", 0, 0, range(4)))
    with pytest.raises(UsageError, match="--tokenizer"):
        read_workload(path)
    with pytest.raises(UsageError, match="give a model's tokenizer"):
        read_workload(path, BLOCK, tmp_path / "absent.json")


def test_the_simulator_takes_them(write, tokenizer, capsys):
    calls = [call(f"s{i % 3}", i, 0, range(4 * (1 + i % 5))) for i in range(30)]
    arguments = ["--tokenizer", str(tokenizer), "--block-tokens", "4", "--capacity", "100%", "--policy", "lru"]
    assert main(["simulate", str(write(*calls)), *arguments, "--format", "json"]) == 0
    [row] = map(json.loads, capsys.readouterr().out.splitlines())
    assert row["hit_rate"] == row["ideal_hit_rate"] > 0
