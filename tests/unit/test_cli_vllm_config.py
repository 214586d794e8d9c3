"""`kvpool vllm-config`: the JSON that `vllm serve` is given, and the line of `kvpool up` that shows it."""

import json

import pytest

from kvpool.cli.main import main
from kvpool.cli.up import _banner
from kvpool.ops.settings import Settings
from kvpool.ops.sources import load_settings

DEFAULT_POOL = "grpc://127.0.0.1:7300"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in ("KVPOOL_CONFIG", "KVPOOL_CLIENT__POOL", "KVPOOL_CLIENT__TRANSPORTS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def printed(capsys):
    """What the command prints for these flags, decoded; exactly one line."""

    def run(*flags):
        assert main(["vllm-config", *flags]) == 0
        captured = capsys.readouterr()
        assert (captured.out.count("\n"), captured.err) == (1, "")
        return json.loads(captured.out)

    return run


@pytest.fixture
def extra(printed):
    return lambda *flags: printed(*flags)["kv_connector_extra_config"]


def test_without_flags_it_names_the_connector_and_the_default_pool(printed):
    assert printed() == {
        "kv_connector": "KVPoolConnector",
        "kv_connector_module_path": "kvpool_connector.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"pool": DEFAULT_POOL},
    }


def test_the_line_has_no_white_space_that_a_shell_could_split(capsys):
    main(["vllm-config", "--local-node", "8GiB", "--transport", "shm"])

    assert len(capsys.readouterr().out.split()) == 1


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--pool", "grpc://meta.example:7300"], {"pool": "grpc://meta.example:7300"}),
        (["--pool", "grpc://[::1]:7300"], {"pool": "grpc://[::1]:7300"}),
        (["--transport", "tcp"], {"pool": DEFAULT_POOL, "transports": ["tcp"]}),
        (["--transport", "tcp", "--transport", "unix"], {"pool": DEFAULT_POOL, "transports": ["tcp", "unix"]}),
        (["--transport", "shm", "--transport", "tcp"], {"pool": DEFAULT_POOL}),
        (["--tenant", "team-a"], {"pool": DEFAULT_POOL, "tenant": "team-a"}),
        (["--tenant", "default"], {"pool": DEFAULT_POOL}),
        (["--epoch", "3"], {"pool": DEFAULT_POOL, "epoch": 3}),
        (["--epoch", "0"], {"pool": DEFAULT_POOL}),
        (["--prompt-only"], {"pool": DEFAULT_POOL, "save_decode": False}),
        (["--local-node", "8GiB"], {"pool": DEFAULT_POOL, "local_node": {"size": "8GiB"}}),
        (["--tls-dir", "/etc/kvpool/tls"], {"pool": DEFAULT_POOL, "tls": {"dir": "/etc/kvpool/tls"}}),
    ],
)
def test_each_flag_adds_its_key_unless_it_is_the_default(extra, flags, expected):
    assert extra(*flags) == expected


@pytest.mark.parametrize("role", ["kv_both", "kv_producer", "kv_consumer"])
def test_role(printed, role):
    assert printed("--role", role)["kv_role"] == role


def test_the_pool_comes_from_the_settings_too(extra, monkeypatch, tmp_path):
    path = tmp_path / "kvpool.yaml"
    path.write_text("client: {pool: 'grpc://in-file:1', transports: [tcp]}", encoding="utf-8")
    assert extra("--config", str(path)) == {"pool": "grpc://in-file:1", "transports": ["tcp"]}

    monkeypatch.setenv("KVPOOL_CLIENT__POOL", "grpc://in-environment:1")
    assert extra("--config", str(path))["pool"] == "grpc://in-environment:1"
    assert extra("--config", str(path), "--pool", "grpc://flag:1")["pool"] == "grpc://flag:1"


def test_json_and_text_are_the_same(printed):
    assert printed("--epoch", "1") == printed("--epoch", "1", "--format", "json")


@pytest.mark.parametrize(
    ("flags", "problem", "fix"),
    [
        (["--pool", "http://host:7300"], "client.pool = 'http://host:7300' (flag --pool)", "grpc://HOST:PORT"),
        (["--pool", "grpc://host:0"], "(flag --pool)", "grpc://HOST:PORT"),
        (["--transport", "rdma"], "--transport 'rdma' is not known", "use one of inproc, cuda, shm, ucx, unix, tcp"),
        (["--transport", "tcp://host"], "--transport 'tcp://host' is not known", "use one of"),
        (["--tenant", ""], "--tenant is empty", "leave it out"),
        (["--epoch", "-1"], "'--epoch'", "greater than or equal to 0"),
        (["--local-node", "8G"], "--local-node: size '8G'", "use one of B, KiB, MiB, GiB"),
        (["--local-node", "much"], "--local-node: size 'much'", "write e.g. 64GiB"),
        (["--local-node", "0"], "--local-node '0' holds not one page", "write e.g. 8GiB"),
        (["--role", "both"], "'--role'", "'kv_both', 'kv_producer', 'kv_consumer'"),
    ],
)
def test_bad_values_exit_with_2_and_say_the_fix(capsys, flags, problem, fix):
    assert main(["vllm-config", *flags]) == 2

    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert problem in captured.err
    assert fix in captured.err


@pytest.mark.parametrize(
    ("uri", "command"),
    [
        (DEFAULT_POOL, "kvpool vllm-config"),
        ("grpc://127.0.0.1:7400", "kvpool vllm-config --pool grpc://127.0.0.1:7400"),
    ],
)
def test_the_banner_of_up_says_how_vllm_uses_the_pool(uri, command):
    lines = _banner(Settings(), uri, "http://127.0.0.1:7302").split("\n")

    assert f'  in vLLM     vllm serve MODEL --kv-transfer-config "$({command})"' in lines
    assert "  metrics     http://127.0.0.1:7302/metrics" in lines


def test_with_tls_the_banner_names_the_certificates():
    settings = load_settings(overrides={"tls.dir": "/certs"}, environ={})

    banner = _banner(settings, DEFAULT_POOL, "http://127.0.0.1:7302")

    assert "$(kvpool vllm-config --tls-dir /certs)" in banner
    assert f'kvpool.connect("{DEFAULT_POOL}", tls=kvpool.TlsSettings(dir="/certs"))' in banner
