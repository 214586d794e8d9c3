"""The connector's settings and its range of vLLM versions."""

import pytest

from kvpool import SettingsError, UsageError
from kvpool_connector.vllm.config import parse_config
from kvpool_connector.vllm.version import check_version


def test_nothing_needs_to_be_said() -> None:
    config = parse_config({})
    assert (config.pool, config.transports, config.save_decode) == ("grpc://127.0.0.1:7300", ("shm", "tcp"), True)


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"pol": "grpc://h:1"}, "pol"),
        ({"transports": ["rdma"]}, "transports"),
        ({"lease_s": -1}, "lease_s"),
        ({"lease_s": "soon"}, "soon"),
        ({"local_node": {"size": "8GiB", "port": 1}}, "local_node.port"),
        ({"pool": "http://h"}, "grpc://HOST:PORT"),
        ({"load_threads": 0}, "load_threads"),
        ({"epoch": 1 << 31}, "epoch"),
        ({"tls": {"folder": "/x"}}, "tls.folder"),
        ({"tls": {"dir": "/x", "token": "secret-secret-secret"}}, "tls.token_file"),
        ({"tls": {"cert": "/x"}}, "tls.cert = .not shown.*needs TLS"),
    ],
)
def test_an_error_names_the_key_and_the_value(extra: dict, named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        parse_config(extra)


def test_certificates_are_named_by_folder_or_by_file() -> None:
    config = parse_config({"tls": {"dir": "/etc/kvpool/tls", "cert": "/run/e.pem", "key": "/run/e-key.pem"}})
    assert config.tls is not None
    assert [str(config.tls.dir), str(config.tls.cert)] == ["/etc/kvpool/tls", "/run/e.pem"]


def test_the_local_nodes_size_is_checked_before_anything_starts() -> None:
    with pytest.raises(UsageError, match="8G"):
        parse_config({"local_node": {"size": "8G"}})


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1+cpu", "0.33.0", "0.33.0rc1"])
def test_versions_it_was_made_for(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["0.19.0", "0.31.9", "0.34.0", "1.0.0", "dev"])
def test_other_versions_are_refused_with_the_range(version: str) -> None:
    with pytest.raises(SettingsError, match=r"0\.32 to 0\.33"):
        check_version(version)
