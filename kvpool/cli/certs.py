"""`kvpool certs`: makes a pool's CA, certificates and tokens, and renews them."""

import re
from pathlib import Path
from typing import Annotated

import typer

from kvpool.cli.output import Format, FormatOption, emit, table
from kvpool.core.errors import UsageError
from kvpool.core.identities import META, client_identity, node_identity, operator_identity
from kvpool.core.namespace import DEFAULT_TENANT
from kvpool.core.principals import Role
from kvpool.ops.curve import make_keys
from kvpool.ops.issuing import Authority, write_file
from kvpool.ops.tokens import new_token, token_digest

TOKENS_FILE = "tokens"

_NODE_ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")

_COLUMNS = ("file", "identity", "until", "")

Nodes = Annotated[list[str] | None, typer.Option("--node", help="A store node's id; may be repeated.")]
Clients = Annotated[
    list[str] | None, typer.Option("--client", metavar="TENANT/NAME", help="A client of a tenant; may be repeated.")
]
Holders = Annotated[
    list[str] | None,
    typer.Option("--token", metavar="TENANT/NAME", help="A client with a token instead; may be repeated."),
]


def certs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where the CA and the certificates are kept.")],
    *,
    node: Nodes = None,
    client: Clients = None,
    token: Holders = None,
    observer: Annotated[bool, typer.Option("--observer", help="A certificate for monitoring, too.")] = False,
    days: Annotated[int, typer.Option(min=1, max=3650, help="How long new certificates are valid.")] = 365,
    renew: Annotated[bool, typer.Option("--renew", help="Renew all that is there, old or not.")] = False,
    output: FormatOption = Format.TEXT,
) -> None:
    """Make a CA and certificates for a pool: the metadata service, an admin, a client, and the nodes named.

    A folder that is there keeps its CA; its certificates are renewed when less than a third of their days is left. Copy
    ca.pem and a part's own files to where it runs, and give it --tls-dir; running processes take new files by
    themselves. The CA's key, ca-key.pem, stays here.
    """
    authority = Authority(folder, days)
    wanted = {"meta": META, "admin": operator_identity(Role.ADMIN, "admin")}
    wanted["client"] = client_identity(DEFAULT_TENANT, "client")
    if observer:
        wanted["observer"] = operator_identity(Role.OBSERVER, "observer")
    wanted |= {f"node-{_node(name)}": node_identity(name) for name in node or []}
    wanted |= {f"client-{tenant}-{name}": client_identity(tenant, name) for tenant, name in map(_holder, client or [])}
    holders = authority.names() | wanted
    issued = [authority.issue(name, identity, renew=renew) for name, identity in holders.items()]
    make_keys(folder, holders)
    made = [_make_token(folder, *_holder(text)) for text in token or []]
    rows = [(f"{one.name}.pem", one.identity, one.until, one.done) for one in issued] + made
    emit({"new_ca": authority.is_new, "certificates": issued, "tokens": made}, output, table(_COLUMNS, rows))


def _make_token(folder: Path, tenant: str, name: str) -> tuple[str, str, str, str]:
    """A token's file, for its client, and its line in the servers' file."""
    path, identity = folder / f"client-{tenant}-{name}.token", client_identity(tenant, name)
    tokens = folder / TOKENS_FILE
    lines = tokens.read_text(encoding="utf-8").splitlines() if tokens.exists() else []
    kept = [line for line in lines if line.split()[1:] != [identity]]
    secret = new_token()
    write_file(path, f"{secret}\n".encode(), 0o600)
    write_file(tokens, "\n".join([*kept, f"{token_digest(secret)} {identity}", ""]).encode(), 0o644)
    return path.name, identity, "until its line in tokens goes", "made" if kept == lines else "renewed"


def _node(node_id: str) -> str:
    if _NODE_ID.fullmatch(node_id) is None or node_id.endswith("-key"):
        raise UsageError(
            f"--node {node_id!r}: with certificates, a node's id is 1 to 63 of a-z, 0-9, '.', '_' and '-', as a "
            "name in DNS, and does not end in -key, as files of keys do"
        )
    return node_id


def _holder(text: str) -> tuple[str, str]:
    tenant, _, name = text.partition("/")
    if not tenant or not name or "/" in name:
        raise UsageError(f"{text!r} is not TENANT/NAME; write e.g. {DEFAULT_TENANT}/engine-1")
    return tenant, name
