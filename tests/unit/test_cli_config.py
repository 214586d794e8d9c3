"""The command line: `kvpool config`, help, and for each kind of error an exit code and one line on stderr."""

import json
import os
from importlib import resources

import pytest
import typer
import yaml
from typer.testing import CliRunner

from kvpool.cli import with_settings
from kvpool.cli.main import build_app, exit_code, main
from kvpool.cli.output import Format, UnhealthyError, emit, table
from kvpool.core.errors import CapacityError, ClosedError, DeadlineError, ProtocolError, SettingsError
from kvpool.ops.sources import effective, known_keys, load_settings


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith("KVPOOL_") or name.endswith("_COLOR")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "120")


def invoke(*arguments):
    return CliRunner().invoke(build_app(arguments), arguments, prog_name="kvpool")


def test_help_lists_every_command_and_imports_none():
    result = invoke("--help")

    assert result.exit_code == 0
    assert all(
        name in result.stdout for name in ("up", "meta", "node", "status", "demo", "bench", "vllm-config", "config")
    )


def test_without_arguments_it_shows_its_help():
    assert invoke("--help").stdout == invoke().stdout


def test_version():
    assert invoke("--version").stdout.startswith("kvpool ")


def test_config_show_has_every_key_with_value_and_source(monkeypatch):
    monkeypatch.setenv("KVPOOL_NODE__SIZE", "2GiB")

    result = invoke("config", "show")

    line = next(line for line in result.stdout.splitlines() if "node.size" in line)
    assert " ".join(line.split()) == "node.size 2147483648 (2 GiB) environment variable KVPOOL_NODE__SIZE"
    assert all(key in result.stdout for key in known_keys())


def test_config_show_as_json(monkeypatch):
    monkeypatch.setenv("KVPOOL_LOG__FORMAT", "json")

    rows = json.loads(invoke("config", "show", "--format", "json").stdout)

    assert known_keys() == [row["key"] for row in rows]
    assert list(rows[-1].values()) == ["log.format", "json", "environment variable KVPOOL_LOG__FORMAT"]


def test_config_default_prints_the_default_file():
    text = resources.files("kvpool.ops").joinpath("default.yaml").read_text(encoding="utf-8")

    assert text == invoke("config", "default").stdout


def test_what_config_default_prints_passes_config_check(tmp_path):
    path = tmp_path / "kvpool.yaml"
    path.write_text(invoke("config", "default").stdout, encoding="utf-8")

    result = invoke("config", "check", "--config", str(path))

    assert result.exit_code == 0
    assert result.stdout.startswith("ok: ")


def test_config_schema_describes_every_section():
    schema = json.loads(invoke("config", "schema").stdout)

    assert list(schema["properties"]) == ["meta", "node", "client", "tls", "log"]
    size = schema["$defs"]["NodeSettings"]["properties"]["size"]
    assert size["anyOf"] == [{"type": "string"}, {"type": "integer"}]


def test_config_check_refuses_a_bad_file_with_one_line_and_code_2(tmp_path, capsys):
    path = tmp_path / "kvpool.yaml"
    path.write_text("node: {size: 64G}", encoding="utf-8")

    code = main(["config", "check", "--config", str(path)])

    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert captured.err.startswith(f"error: node.size = '64G' (file {path}): ")
    assert len(captured.err.splitlines()) == 1


@pytest.mark.parametrize("form", [["--format", "json"], ["--format=json"]])
def test_errors_are_json_where_results_are(capsys, form):
    code = main(["node", "--listen", "0.0.0.0", *form])

    error = json.loads(capsys.readouterr().err)
    assert (code, error["exit_code"], error["error"]) == (2, 2, "SettingsError")
    assert error["message"].startswith("node.listen = '0.0.0.0' (flag --listen): ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["confg"], "No such command 'confg'. Did you mean 'config', 'vllm-config'? (see `kvpool --help`)"),
        (["config"], "Missing command. (see `kvpool config --help`)"),
        (["config", "show", "--colour"], "No such option: --colour (see `kvpool config show --help`)"),
        (["meta", "--grpc-port", "99999"], "meta.grpc_port = '99999' (flag --grpc-port): "),
        (["node", "--meta", "nowhere"], "node.meta = 'nowhere' (flag --meta): "),
        (["up", "--size", "0"], "node.size = '0' (flag --size): "),
        (["status", "--timeout", "-1"], "client.timeout_s = '-1' (flag --timeout): "),
    ],
)
def test_misuse_is_code_2_and_one_line_on_stderr(capsys, arguments, message):
    code = main(arguments)

    captured = capsys.readouterr()
    assert (code, captured.out, len(captured.err.splitlines())) == (2, "", 1)
    assert captured.err.startswith(f"error: {message}")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ProtocolError("a frame too long"), 1),
        (CapacityError("no memory"), 1),
        (FileNotFoundError("no such file"), 1),
        (SettingsError("a bad value"), 2),
        (ClosedError("used after close"), 2),
        (DeadlineError("no answer in 5 s"), 3),
        (UnhealthyError("no node is ready"), 4),
    ],
)
def test_each_kind_of_error_has_its_exit_code(error, code):
    assert exit_code(error) == code


@pytest.mark.parametrize("command", ["up", "meta", "node", "status"])
def test_help_of_a_command_names_its_flags_and_their_defaults(command):
    result = invoke(command, "--help")

    assert result.exit_code == 0
    assert all(flag in result.stdout for flag in ("--config", "--format", "--log-level"))
    assert "[default: (info)]" in result.stdout


def test_flags_become_settings_and_say_so(tmp_path):
    path = tmp_path / "kvpool.yaml"
    path.write_text("meta: {insecure: true, tombstones: 1}", encoding="utf-8")
    received = []

    @with_settings("meta.listen", "meta.insecure", "meta.tombstones")
    def command(settings, output):
        """A command."""
        received.append((settings, output))

    app = typer.Typer()
    app.command()(command)
    arguments = ["--listen", "10.0.0.7", "--config", str(path), "--format", "json"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)

    [(settings, output)] = received
    sources = {key: source for key, _, source in effective(settings) if source != "default"}
    assert result.exit_code == 0
    assert Format.JSON is output
    assert (settings.meta.listen, settings.meta.insecure, settings.meta.tombstones) == ("10.0.0.7", True, 1)
    assert sources["meta.listen"] == "flag --listen"
    assert f"file {path}" == sources["meta.insecure"]


def test_emit_writes_one_json_line_or_the_text(capsys):
    rows = table(("node", "#blocks"), [("n0", 12)])

    emit({"blocks": 12}, Format.JSON, rows)
    emit({"blocks": 12}, Format.TEXT, "x" * 300)
    emit({"blocks": 12}, Format.TEXT, rows)

    first, second, *shown = capsys.readouterr().out.splitlines()
    assert json.loads(first) == {"blocks": 12}
    assert second == "x" * 300
    assert ["node", "blocks"] in [line.split() for line in shown]
    assert ["n0", "12"] in [line.split() for line in shown]


def test_default_file_survives_a_round_trip():
    document = yaml.safe_load(invoke("config", "default").stdout)

    assert document["client"]["transports"] == list(load_settings(environ={}).client.transports)
