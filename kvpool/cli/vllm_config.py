"""`kvpool vllm-config`: prints what `vllm serve` needs to be told to use a pool."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

import msgspec
import typer

from kvpool.cli import ConfigOption
from kvpool.cli.output import Format, FormatOption, emit
from kvpool.core.errors import SettingsError, UsageError
from kvpool.core.limits import PAGE_BYTES
from kvpool.core.units import parse_size
from kvpool.ops.settings import ClientSettings, TlsSettings
from kvpool.ops.sources import field_of, load_settings
from kvpool.transport.registry import SCHEMES

_TENANT = "default"


class Role(StrEnum):
    """What an engine does with the pool, in vLLM's words."""

    BOTH = "kv_both"
    PRODUCER = "kv_producer"
    CONSUMER = "kv_consumer"


def vllm_config(
    *,
    pool: Annotated[
        str | None, typer.Option(help=field_of("client.pool").description, show_default=ClientSettings().pool)
    ] = None,
    transport: Annotated[
        list[str] | None,
        typer.Option(help=f"Transport to use, best first; may be repeated. One of {', '.join(SCHEMES)}."),
    ] = None,
    tenant: Annotated[str, typer.Option(help="Owner of the blocks; tenants share none.")] = _TENANT,
    epoch: Annotated[int, typer.Option(min=0, help="Raise it to forget all blocks of lower epochs.")] = 0,
    prompt_only: Annotated[bool, typer.Option("--prompt-only", help="Store prompts, not what is generated.")] = False,
    local_node: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Have the first engine of a host start a store node, e.g. 8GiB.")
    ] = None,
    tls_dir: Annotated[
        str | None, typer.Option("--tls-dir", help="Folder on the engines' hosts that `kvpool certs` made.")
    ] = None,
    role: Annotated[Role, typer.Option(help="Store and load, store only, or load only.")] = Role.BOTH,
    config: ConfigOption = None,
    output: FormatOption = Format.TEXT,
) -> None:
    """Print the JSON that `vllm serve MODEL --kv-transfer-config` takes; one line, also with --format text."""
    settings = load_settings(config, {"client.pool": pool, "tls.dir": tls_dir})
    client = settings.client
    extra: dict[str, object] = {"pool": client.pool}
    transports = _known(transport or client.transports)
    if transports != list(ClientSettings().transports):
        extra["transports"] = transports
    if _named(tenant) != _TENANT:
        extra["tenant"] = tenant
    if epoch:
        extra["epoch"] = epoch
    if prompt_only:
        extra["save_decode"] = False
    if local_node is not None:
        extra["local_node"] = {"size": _usable(local_node)}
    if settings.tls.enabled:
        extra["tls"] = _paths(settings.tls)
    document = _document(role, extra)
    emit(document, output, msgspec.json.encode(document).decode())


def _document(role: Role, extra: dict[str, object]) -> dict[str, object]:
    """What vLLM calls a ``KVTransferConfig``; a block that cannot be loaded is computed, and fails no request."""
    return {
        "kv_connector": "KVPoolConnector",
        "kv_connector_module_path": "kvpool_connector.vllm.connector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def _paths(tls: TlsSettings) -> dict[str, str]:
    """Where an engine finds its certificates; this line is shown in logs, and is no place for a token."""
    if tls.token is not None:
        raise SettingsError(
            "tls.token would be in vLLM's logs: put the token in a file, and name that in tls.token_file"
        )
    files = {"dir": tls.dir, "ca": tls.ca, "cert": tls.cert, "key": tls.key, "token_file": tls.token_file}
    return {name: str(path) for name, path in files.items() if path is not None}


def _known(transports: Sequence[str]) -> list[str]:
    for name in transports:
        if name not in SCHEMES:
            raise SettingsError(f"--transport {name!r} is not known; use one of {', '.join(SCHEMES)}")
    return list(transports)


def _named(tenant: str) -> str:
    if not tenant:
        raise SettingsError(f"--tenant is empty; name one, or leave it out for {_TENANT!r}")
    return tenant


def _usable(size: str) -> str:
    try:
        size_bytes = parse_size(size)
    except UsageError as error:
        raise SettingsError(f"--local-node: {error}") from error
    if size_bytes < PAGE_BYTES:
        raise SettingsError(f"--local-node {size!r} holds not one page of {PAGE_BYTES} bytes; write e.g. 8GiB")
    return size
