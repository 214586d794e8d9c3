"""`kvpool certs`, and what processes take of the files that it makes."""

import datetime as dt
import json
import stat
from pathlib import Path

import pytest

from kvpool.cli.main import main
from kvpool.core.errors import SettingsError
from kvpool.core.identities import META, node_identity
from kvpool.ops.authentication import Security, open_authenticator, security_of
from kvpool.ops.credentials import CredentialFiles, Credentials, open_credentials
from kvpool.ops.issuing import Authority
from kvpool.ops.settings import MetaSettings, TlsSettings
from kvpool.ops.tokens import Tokens, check_token, new_token, token_digest


def take(folder: Path, source: str, target: str) -> None:
    for end in (".pem", "-key.pem"):
        (folder / f"{source}{end}").replace(folder / f"{target}{end}")


def other_ca(folder: Path) -> None:
    Authority(folder / "other", 1)
    (folder / "other" / "ca.pem").replace(folder / "ca.pem")


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "certs"


@pytest.fixture
def certs(folder, capsys):
    """What the command says it did, by file."""

    def run(*flags, code=0):
        assert main(["certs", str(folder), "--format", "json", *flags]) == code
        captured = capsys.readouterr()
        if code:
            return captured.err
        said = json.loads(captured.out)
        return {one["name"]: (one["identity"], one["done"]) for one in said["certificates"]}

    return run


def test_one_command_makes_all_that_a_pool_needs(folder, certs):
    made = certs("--node", "n0", "--node", "n1", "--client", "acme/e1", "--observer")

    assert made == {
        "meta": ("kvpool://meta", "made"),
        "admin": ("kvpool://admin/admin", "made"),
        "client": ("kvpool://client/default/client", "made"),
        "observer": ("kvpool://observer/observer", "made"),
        "node-n0": ("kvpool://node/n0", "made"),
        "node-n1": ("kvpool://node/n1", "made"),
        "client-acme-e1": ("kvpool://client/acme/e1", "made"),
    }
    for name, (identity, _) in made.items():
        files = CredentialFiles(folder / "ca.pem", folder / f"{name}.pem", folder / f"{name}-key.pem")
        assert Credentials(files).identity == identity


def test_nobody_else_can_read_keys_and_tokens(folder, certs):
    certs("--token", "acme/e1")

    secrets = [*folder.glob("*-key.pem"), *folder.glob("*.token")]
    assert {stat.S_IMODE(path.stat().st_mode) for path in secrets} == {0o600}
    assert len(secrets) == 5
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_the_ca_stays_and_what_is_fresh_is_kept(folder, certs):
    certs("--node", "n0")
    ca, leaf = (folder / "ca.pem").read_bytes(), (folder / "node-n0.pem").read_bytes()

    again = certs("--node", "n2")

    assert {done for name, (_, done) in again.items() if name != "node-n2"} == {"kept"}
    assert again["node-n2"][1] == "made"
    assert ((folder / "ca.pem").read_bytes(), (folder / "node-n0.pem").read_bytes()) == (ca, leaf)


def test_what_is_old_is_renewed_and_everything_on_demand(folder, certs):
    certs("--days", "1")
    authority = Authority(folder, 100)
    authority._now -= dt.timedelta(days=80)
    authority.issue("node-n0", node_identity("n0"), renew=True)

    assert {name: done for name, (_, done) in certs().items()} == {
        "meta": "kept", "admin": "kept", "client": "kept", "node-n0": "renewed",
    }  # fmt: skip
    assert {done for _, done in certs("--renew").values()} == {"renewed"}


def test_a_token_is_in_its_clients_file_and_its_digest_in_the_servers(folder, certs):
    certs("--token", "acme/e1", "--token", "acme/e2")
    first = (folder / "client-acme-e1.token").read_text().strip()
    certs("--token", "acme/e1")
    second = (folder / "client-acme-e1.token").read_text().strip()

    tokens = Tokens(folder / "tokens")
    assert tokens.holder(second).tenant == "acme"
    assert first not in (folder / "tokens").read_text()
    with pytest.raises(Exception, match="nobody's here"):
        tokens.holder(first)
    assert len((folder / "tokens").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("flags", "fix"),
    [
        (["--node", "N0"], "1 to 63 of a-z"),
        (["--node", "../x"], "1 to 63 of a-z"),
        (["--node", "a-key"], "does not end in -key"),
        (["--client", "acme"], "TENANT/NAME"),
        (["--token", "/x"], "TENANT/NAME"),
        (["--days", "0"], "--days"),
    ],
)
def test_names_that_cannot_be_are_refused(certs, flags, fix):
    assert fix in certs(*flags, code=2)


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda folder: (folder / "meta-key.pem").chmod(0o604), r"can be read by others .mode 0604.: chmod 600"),
        (lambda folder: (folder / "meta-key.pem").unlink(), "meta-key.pem cannot be read: No such file"),
        (lambda folder: (folder / "meta.pem").write_text("x"), "holds no certificate in PEM"),
        (lambda folder: (folder / "meta-key.pem").write_text("x"), "is no private key in PEM"),
        (lambda folder: (folder / "ca.pem").write_text("x"), "holds no certificate in PEM"),
        (lambda folder: (folder / "ca.pem").write_bytes(bytes(2 << 20)), "more than 1048576 bytes"),
        (lambda folder: (folder / "node-n0-key.pem").replace(folder / "meta-key.pem"), "is not that of certificate"),
        (lambda folder: (folder / "meta.pem").unlink(), "has no meta.pem; `kvpool certs"),
        (
            lambda folder: take(folder, "node-n0", "meta"),
            "is of kvpool://node/n0; this process needs one of kvpool://m",
        ),
        (other_ca, "is not of the CA in"),
    ],
)
def test_files_that_cannot_be_used_are_named_with_the_fix(folder, certs, spoil, problem):
    certs("--node", "n0")
    spoil(folder)
    with pytest.raises(SettingsError, match=problem):
        open_credentials(TlsSettings(dir=folder), ["meta"], META)


def test_a_spoilt_key_of_the_ca_is_named(folder, certs):
    certs()
    (folder / "ca-key.pem").write_text("x")

    assert f"{folder / 'ca-key.pem'} is no private key in PEM" in certs("--renew", code=2)


def test_the_services_certificate_is_no_clients(folder, certs):
    certs()
    take(folder, "meta", "client")
    with pytest.raises(SettingsError, match="is no identity of a caller"):
        open_credentials(TlsSettings(dir=folder), ["client"])


def test_a_ca_alone_proves_nothing(folder, certs):
    certs()
    with pytest.raises(SettingsError, match=r"add tls\.cert and tls.key, or, for clients, a token"):
        open_credentials(TlsSettings(ca=folder / "ca.pem"), ["client"])
    with pytest.raises(SettingsError, match=r"add tls\.cert"):
        open_credentials(TlsSettings(ca=folder / "ca.pem", token=new_token()), ["meta"], META)


@pytest.mark.parametrize("line", ["x", "x y z", "x kvpool://client/a/b", f"{'0' * 64} kvpool://meta"])
def test_a_line_that_is_no_token_is_named(tmp_path, line):
    path = tmp_path / "tokens"
    path.write_text(f"# tokens\n\n{line}\n")
    with pytest.raises(SettingsError, match=f"{path}, line 3"):
        Tokens(path)


def test_a_token_never_makes_a_node(tmp_path):
    path = tmp_path / "tokens"
    path.write_text(f"{token_digest(new_token())} kvpool://node/n0")
    with pytest.raises(SettingsError, match="nodes have certificates, not tokens"):
        Tokens(path)


def test_tokens_that_are_made_are_taken_and_differ():
    assert check_token(new_token()) != check_token(new_token())


@pytest.mark.parametrize(
    ("listen", "insecure", "security"), [("127.0.0.1", False, Security.LOOPBACK), ("10.0.0.7", True, Security.INSECURE)]
)
def test_a_server_without_tls_says_whom_it_serves(listen, insecure, security):
    settings = MetaSettings(insecure=insecure, listen=listen)
    guard = open_authenticator(TlsSettings(), settings, "meta", META)
    assert (guard, security_of(guard, settings)) == (None, security)


def test_settings_made_for_tls_do_not_serve_others_without(folder, certs):
    certs()
    settings = MetaSettings.model_validate({"listen": "10.0.0.7"}, context={"tls": True})
    assert security_of(open_authenticator(TlsSettings(dir=folder), settings, "meta", META), settings) == Security.TLS
    with pytest.raises(SettingsError, match="beyond loopback needs TLS"):
        open_authenticator(TlsSettings(), settings, "meta", META)
