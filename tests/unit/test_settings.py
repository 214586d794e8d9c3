"""Settings: sources and their precedence, and errors that name key, value, source and fix."""

import io
import json
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from kvpool.core.errors import SettingsError
from kvpool.ops import logging, settings
from kvpool.ops.settings import LogSettings, MetaSettings, NodeSettings, Settings
from kvpool.ops.sources import effective, flag_name, known_keys, load_settings, variable_name
from kvpool.ops.tenant_settings import TenantSettings

DEFAULT_FILE = Path(settings.__file__).with_name("default.yaml")
COMPUTED_KEYS = {"node.node_id", "node.unix_socket"}
"""Keys whose default depends on the host; the default file shows them in comments."""


@pytest.fixture
def config(tmp_path):
    def write(text):
        path = tmp_path / "kvpool.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def refusal(config=None, overrides=None, environ=None):
    with pytest.raises(SettingsError) as caught:
        load_settings(config, overrides, environ or {})
    return str(caught.value)


def test_flag_beats_environment_beats_file_beats_default(config):
    path = config("meta: {grpc_port: 1001, framed_port: 1002, tombstones: 3}")
    environ = {"KVPOOL_META__GRPC_PORT": "2001", "KVPOOL_META__FRAMED_PORT": "2002"}

    meta = load_settings(path, {"meta.grpc_port": "3001", "meta.framed_port": None}, environ).meta

    assert (meta.grpc_port, meta.framed_port, meta.tombstones, meta.connections_max) == (3001, 2002, 3, 1024)


def test_effective_settings_tell_where_each_came_from(config):
    path = config("node: {size: 64MiB}")
    environ = {"KVPOOL_LOG__LEVEL": "debug"}

    loaded = load_settings(path, {"node.data_port": 0}, environ)
    shown = {key: (value, source) for key, value, source in effective(loaded)}

    assert known_keys() == list(shown)
    assert (64 << 20, f"file {path}") == shown["node.size"]
    assert shown["log.level"] == ("debug", "environment variable KVPOOL_LOG__LEVEL")
    assert shown["node.data_port"] == (0, "flag --data-port")
    assert shown["meta.grpc_port"] == (7300, "default")


def test_the_environment_can_name_the_file(config):
    path = config("client: {streams: 3}")

    assert load_settings(environ={"KVPOOL_CONFIG": str(path)}).client.streams == 3
    assert load_settings(config=DEFAULT_FILE, environ={"KVPOOL_CONFIG": str(path)}).client.streams == 2


def test_an_empty_variable_counts_as_not_set():
    assert load_settings(environ={"KVPOOL_META__GRPC_PORT": "", "KVPOOL_CONFIG": ""}).meta.grpc_port == 7300


def test_variables_that_kubernetes_makes_of_a_service_are_not_ours():
    environ = {
        "KVPOOL_META_SERVICE_HOST": "10.0.0.1",
        "KVPOOL_META_SERVICE_PORT_GRPC": "7300",
        "KVPOOL_META_PORT": "tcp://10.0.0.1:7300",
        "KVPOOL_META_PORT_7300_TCP_ADDR": "10.0.0.1",
    }

    assert Settings().model_dump() == load_settings(environ=environ).model_dump()


def test_human_units_and_lists():
    environ = {
        "KVPOOL_NODE__SIZE": "1.5GiB",
        "KVPOOL_CLIENT__TIMEOUT_S": "200ms",
        "KVPOOL_CLIENT__TRANSPORTS": "tcp, shm",
        "KVPOOL_META__REFLECTION": "true",
    }

    loaded = load_settings(environ=environ)

    assert loaded.node.size == 3 << 29
    assert loaded.client.timeout_s == 0.2
    assert loaded.client.transports == ("tcp", "shm")
    assert loaded.meta.reflection


def test_a_size_is_rounded_down_to_whole_pages():
    assert NodeSettings(size="12287B").size == 8192


def test_a_bare_off_in_yaml_means_off(config):
    assert load_settings(config("node: {hugepages: off}"), environ={}).node.hugepages == "off"


def test_the_default_file_states_the_defaults():
    loaded = load_settings(DEFAULT_FILE, environ={})

    assert Settings().model_dump() == loaded.model_dump()


def test_the_default_file_mentions_every_key():
    text = DEFAULT_FILE.read_text(encoding="utf-8")
    given = {f"{section}.{name}" for section, values in yaml.safe_load(text).items() for name in values}

    assert set(known_keys()) == given | COMPUTED_KEYS
    assert all(f"  # {key.split('.')[1]}: " in text for key in COMPUTED_KEYS)


def test_every_setting_is_described():
    definitions = Settings.model_json_schema()["$defs"].values()

    fields = [field for part in definitions for field in part["properties"].values()]
    assert len(fields) == len(known_keys()) + len(TenantSettings.model_fields)
    assert all(field["description"] for field in fields)


@pytest.mark.parametrize(
    ("key", "value", "fix"),
    [
        ("meta.grpc_port", "65536", "less than or equal to 65535; the default is 7300"),
        ("meta.grpc_port", "http", "valid integer"),
        ("meta.lease_max_s", "2m", "less than or equal to 60"),
        ("meta.lease_cap", "1.5", "less than or equal to 1"),
        ("meta.node_ttl_s", "2s", "three heartbeats"),
        ("meta.policy", "fifo", "'lru'"),
        ("meta.unix_socket", "meta.sock", "must be an absolute path"),
        ("meta.listen", "0.0.0.0", "needs TLS (--tls-dir; `kvpool certs` makes one) or --insecure"),
        ("node.listen", "example.org", "needs TLS (--tls-dir; `kvpool certs` makes one) or --insecure"),
        ("node.size", "64G", "use one of B, KiB, MiB, GiB"),
        ("node.size", "0", "at least one page"),
        ("node.node_id", "rack 1", "write e.g. node-1"),
        ("node.meta", "http://127.0.0.1:7300", "write e.g. grpc://127.0.0.1:7300"),
        ("node.meta", "grpc://127.0.0.1:70000", "write e.g. grpc://127.0.0.1:7300"),
        ("node.unix_socket", "/" + "x" * 107, "at most 107 bytes"),
        ("node.hugepages", "maybe", "'auto', 'off' or 'require'"),
        ("client.timeout_s", "5 parsecs", "use one of us, ms, s"),
        ("client.timeout_s", "0", "greater than 0"),
        ("client.transports", "", "the default is ('shm', 'tcp')"),
        ("log.level", "loud", "'debug', 'info', 'warning' or 'error'"),
    ],
)
def test_a_bad_value_names_key_value_source_and_fix(config, key, value, fix):
    section, name = key.split(".")
    file = config(yaml.safe_dump({section: {name: value}}))

    from_flag = refusal(overrides={key: value})
    from_file = refusal(config=file)

    assert from_flag.startswith(f"{key} = {value!r} (flag {flag_name(key)}): ")
    assert from_file.startswith(f"{key} = {value!r} (file {file}): ")
    assert fix in from_flag
    assert fix in from_file
    if value:
        from_environment = refusal(environ={variable_name(key): value})
        assert from_environment.startswith(f"{key} = {value!r} (environment variable {variable_name(key)}): ")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_no_permission(host):
    assert host == load_settings(overrides={"meta.listen": host}, environ={}).meta.listen


def test_listening_everywhere_needs_permission_and_an_address_to_dial():
    open_node = {"node.listen": "0.0.0.0", "node.insecure": True}

    message = refusal(overrides=open_node)
    loaded = load_settings(overrides=open_node | {"node.advertise_host": "10.0.0.7"}, environ={})

    assert "node.advertise_host = None (default): nobody can dial 0.0.0.0" in message
    assert (loaded.node.listen, loaded.node.advertise_host) == ("0.0.0.0", "10.0.0.7")


@pytest.mark.parametrize("given", [{"tls.dir": "/certs"}, {"tls.ca": "/ca.pem"}, {"meta.insecure": True}])
def test_listening_everywhere_needs_tls_or_to_be_told_so(given):
    everywhere = {"meta.listen": "0.0.0.0", "meta.advertise_host": "10.0.0.7"}

    assert load_settings(overrides=everywhere | given, environ={}).meta.listen == "0.0.0.0"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"cert": "/c.pem", "key": "/k.pem"},
            "tls.cert = '/c.pem' (flag --tls-cert): needs TLS: name a CA",
        ),
        ({"token_file": "/t"}, "tls.token_file = '/t' (flag --tls-token-file): needs TLS"),
        ({"tokens": "/t"}, "tls.tokens = '/t' (flag --tls-tokens): needs TLS"),
        ({"dir": "/d", "cert": "/c.pem"}, "a certificate and its key go together"),
        ({"dir": "/d", "key": "/k.pem"}, "a certificate and its key go together"),
        ({"ca": "/c", "cert": "/c.pem", "key": "/k.pem", "token_file": "/t"}, "one proof is enough"),
        ({"ca": "/c", "token": "t" * 20, "token_file": "/t"}, "one proof is enough"),
    ],
)
def test_settings_of_tls_that_do_not_go_together(given, message):
    assert message in refusal(overrides={f"tls.{name}": value for name, value in given.items()})


@pytest.mark.parametrize("more", [{"node.ucx_plaintext": True}, {"node.insecure": True}, {"node.listen": "127.0.0.1"}])
def test_ucx_beside_tls_wants_to_be_known_for_plaintext(more):
    secured = {"node.listen": "10.0.0.1", "node.ucx": True, "tls.dir": "/certs"}

    assert "is not encrypted by TLS; add --ucx-plaintext" in refusal(overrides=secured)
    assert load_settings(overrides=secured | more, environ={}).node.ucx


def test_all_bad_values_are_named_at_once():
    message = refusal(overrides={"node.node_id": "", "log.format": "xml"})

    assert "node.node_id = ''" in message
    assert "; also log.format = 'xml'" in message


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("KVPOOL_META__GRCP_PORT", "KVPOOL_META__GRPC_PORT"),
        ("KVPOOL_META_GRPC_PORT", "KVPOOL_META__GRPC_PORT"),
        ("KVPOOL_META__SIZE", "KVPOOL_NODE__SIZE"),
    ],
)
def test_an_unknown_variable_names_the_nearest(name, nearest):
    message = refusal(environ={name: "1"})

    assert f"= '1' (environment variable {name}): unknown key; did you mean {nearest}?" in message


@pytest.mark.parametrize(
    ("text", "key", "nearest"),
    [
        ("node: {sise: 1GiB}", "node.sise = '1GiB'", "node.size"),
        ("meta: {size: 1GiB}", "meta.size = '1GiB'", "node.size"),
        ("nodes: {size: 1GiB}", "nodes = {'size': '1GiB'}", "node"),
    ],
)
def test_an_unknown_key_in_the_file_names_the_nearest(config, text, key, nearest):
    file = config(text)

    assert f"{key} (file {file}): unknown key; did you mean {nearest}?" == refusal(config=file)


def test_an_unknown_key_without_neighbours_points_to_the_list():
    assert "unknown key; `kvpool config default` lists every key" in refusal(environ={"KVPOOL_ZZZZZZ": "1"})


@pytest.mark.parametrize("text", ["- 1", "meta: 7300", "meta: [7300]", "meta: {", "\0"])
def test_a_file_that_is_no_mapping_of_sections_is_refused(config, text):
    file = config(text)

    assert f"file {file}" in refusal(config=file)


def test_a_missing_file_is_refused(tmp_path):
    message = refusal(config=tmp_path / "none.yaml")

    assert "none.yaml" in message
    assert "`kvpool config default` prints a valid file" in message


def test_an_empty_file_and_an_empty_section_are_fine(config):
    assert Settings().model_dump() == load_settings(config("meta:\n"), environ={}).model_dump()


def test_direct_construction_reads_neither_environment_nor_files(monkeypatch, tmp_path):
    monkeypatch.setenv("KVPOOL_META__TOMBSTONES", "5")
    monkeypatch.setenv("KVPOOL_CONFIG", str(tmp_path / "none.yaml"))

    meta = MetaSettings(grpc_port=0, framed_port=0)
    node = NodeSettings(node_id="n0", size="64MiB", data_port=0, grpc_port=0, unix_socket=tmp_path / "n0.sock")

    assert meta.tombstones == 65_536
    assert node.size == 64 << 20


def test_a_node_s_socket_is_named_after_it_in_the_run_directory(monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")

    assert Path("/run/user/7/kvpool/n0.sock") == NodeSettings(node_id="n0").unix_socket


def test_settings_are_frozen_and_refuse_unknown_names():
    with pytest.raises(ValidationError):
        MetaSettings().grpc_port = 1
    with pytest.raises(ValidationError):
        MetaSettings(port=1)


def test_logs_are_json_lines_on_stderr_unless_it_is_a_terminal(capsys):
    logging.configure(LogSettings(level="warning"))
    log = logging.get_logger("kvpool.test")

    log.info("not_shown")
    log.warning("node_lost", node_id="n0")

    captured = capsys.readouterr()
    event = json.loads(captured.err)
    assert captured.out == ""
    assert event.pop("timestamp").endswith("Z")
    assert event == {"event": "node_lost", "level": "warning", "component": "kvpool.test", "node_id": "n0"}


@pytest.mark.parametrize("no_color", ["", "1"])
def test_logs_on_a_terminal_are_key_value_and_honour_no_color(monkeypatch, no_color):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("NO_COLOR", no_color)

    logging.configure(LogSettings())
    logging.get_logger("kvpool.test").info("node_lost", node_id="n0")

    assert ("\x1b[" in terminal.getvalue()) is not bool(no_color)
    if no_color:
        assert "node_id=n0" in terminal.getvalue()
