"""Keys and tokens stay where they are: no log, status, settings or error shows one."""

from contextlib import ExitStack

import pytest

import kvpool
from kvpool.cli.main import main
from kvpool.ops.credentials import Credentials
from kvpool.ops.sources import load_settings
from kvpool.ops.tokens import new_token, token_digest
from kvpool.transport.wire.messages import PROTOCOL_VERSION, Hello
from tests.integration.conftest import Pool
from tests.pki import Pki

CALLS = (
    ["status"],
    ["status", "--format", "json"],
    ["config", "show"],
    ["config", "show", "--format", "json"],
    ["config", "check"],
    ["vllm-config"],
    ["explain", "--hash", "0" * 64],
    ["verify"],
    ["events", "--once"],
    ["drain", "nobody"],
    ["drain", "nobody", "--format", "json"],
)


@pytest.fixture
def pki(tmp_path):
    return Pki(tmp_path)


def secret_lines(pki):
    """What makes up the folder's private keys, line by line."""
    paths = (*pki.folder.glob("*-key.pem"), *pki.folder.glob("*.events-key"))
    keys = [path.read_text().splitlines() for path in paths]
    return {line for lines in keys for line in lines if not line.startswith("-----")}


def test_nothing_that_a_pool_says_has_a_secret(tmp_path, pki, monkeypatch, capfd):
    token, wrong = new_token(), new_token()
    (pki.folder / "tokens").write_text(f"{token_digest(token)} kvpool://admin/by-token")
    with ExitStack() as stack:
        (tmp_path / "pool").mkdir()
        pool = Pool(tmp_path / "pool", stack)
        tls = {"tls-dir": pki.folder, "tls-tokens": pki.folder / "tokens", "log-level": "debug"}
        pool.start_meta(**{"expected-nodes": 1, "token-port": 0, **tls})
        pool.start_node("n0", **tls)
        monkeypatch.setenv("KVPOOL_CLIENT__POOL", pool.meta_ready["for_tokens"])
        monkeypatch.setenv("KVPOOL_TLS__CA", str(pki.ca))
        for secret in (token, wrong):
            monkeypatch.setenv("KVPOOL_TLS__TOKEN", secret)
            codes = [main(call) for call in CALLS]
            assert 0 in codes
            assert 2 in codes
        said = [*capfd.readouterr(), str(pool.meta_ready), str(pool.ready)]
    said += [path.read_text() for path in pool.directory.glob("*.log")]

    everything = "\n".join(said)
    assert everything.count("nobody's here") > 5
    assert "security: TLS" in everything
    for secret in {token, wrong, *secret_lines(pki)}:
        assert secret not in everything


@pytest.mark.parametrize(
    "document",
    [
        "tls: {token: SECRET-SECRET-SECRET}",  # without a CA
        "tls: {dir: /nowhere, token: SECRET}",
        "tls: {dir: /nowhere, token: [SECRET]}",
        "tls: {dir: /nowhere, tokn: SECRET-SECRET-SECRET}",
        "tsl: {token: SECRET-SECRET-SECRET}",
        "client: {token: SECRET-SECRET-SECRET}",
        "SECRET-SECRET-SECRET",
        "tls: SECRET-SECRET-SECRET",
        "tls: {token: SECRET-SECRET-SECRET",
        "tls:\n  token: 'SECRET-SECRET-SECRET\n",
    ],
)
def test_settings_that_cannot_be_do_not_show_it(tmp_path, document):
    path = tmp_path / "kvpool.yaml"
    path.write_text(document)
    with pytest.raises(kvpool.SettingsError) as refused:
        kvpool.connect("grpc://127.0.0.1:1", tls=load_settings(path, environ={}).tls)
    assert "SECRET" not in str(refused.value)


@pytest.mark.parametrize("secret", ["SECRET", "SECRET" * 200, "SECRET\nSECRET-SECRET-SECRET"])
def test_a_token_that_cannot_be_is_not_shown(pki, tmp_path, secret):
    path = tmp_path / "token"
    path.write_text(secret)
    path.chmod(0o600)
    for tls in ({"token": secret}, {"token_file": path}):
        with pytest.raises(kvpool.SettingsError, match="a token has") as refused:
            kvpool.connect("grpc://127.0.0.1:1", tls=kvpool.TlsSettings(ca=pki.ca, **tls))
        assert "SECRET" not in str(refused.value)


def test_what_holds_a_secret_does_not_show_it_when_printed(pki):
    token = new_token()
    credentials = Credentials(pki.files("client"), token)
    shown = [
        repr(Hello(PROTOCOL_VERSION, "me", token)),
        repr(kvpool.TlsSettings(ca=pki.ca, token=token)),
        repr(kvpool.TlsSettings(ca=pki.ca, token=token).model_dump(mode="json")),
        repr(credentials),
        repr(credentials.current()),
        repr(credentials.toward("kvpool://meta")),
    ]
    for secret in {token, *secret_lines(pki)}:
        assert [text for text in shown if secret in text] == []


@pytest.mark.parametrize("name", ["client-key.pem", "token"])
def test_what_others_can_read_is_not_used(pki, name):
    path = pki.folder / name
    if name == "token":
        path.write_text(new_token())
        tls = kvpool.TlsSettings(ca=pki.ca, token_file=path)
    else:
        tls = kvpool.TlsSettings(dir=pki.folder)
    path.chmod(0o644)

    with pytest.raises(kvpool.SettingsError, match=f"can be read by others .mode 0644.: chmod 600 {path}"):
        kvpool.connect("grpc://127.0.0.1:1", tls=tls)
