"""`kvpool quota`: shows what tenants may hold and ask for, and changes it while the pool runs."""

from collections.abc import Callable
from typing import Annotated

import typer

from kvpool.cli import ConfigOption
from kvpool.cli.connecting import connect_operator
from kvpool.cli.output import Format, FormatOption, emit
from kvpool.cli.tenants import tenants_table
from kvpool.core.errors import UsageError
from kvpool.core.units import parse_size
from kvpool.ops.logging import configure
from kvpool.ops.sources import field_of, load_settings

_NONE = "none"


def quota(
    tenant: Annotated[str | None, typer.Argument(metavar="[TENANT]", help="Only this one; to change it, too.")] = None,
    *,
    size: Annotated[str | None, typer.Option("--bytes", help="Memory for its blocks, e.g. 64GiB, or none.")] = None,
    share: Annotated[str | None, typer.Option("--share", help="Its weight when the pool is full; 1 is usual.")] = None,
    pins: Annotated[str | None, typer.Option("--pins", help="Blocks that may be pinned, or none.")] = None,
    lookups: Annotated[str | None, typer.Option("--lookups-per-s", help="Look-ups, or none; more are misses.")] = None,
    writes: Annotated[
        str | None, typer.Option("--writes-per-s", help="New blocks, or none; more are not wanted.")
    ] = None,
    pool: Annotated[str | None, typer.Option("--pool", help="The pool's metadata service.")] = None,
    tls_dir: Annotated[str | None, typer.Option("--tls-dir", help=field_of("tls.dir").description)] = None,
    config: ConfigOption = None,
    output: FormatOption = Format.TEXT,
) -> None:
    """Show the limits and the use of tenants, or change the limits of one: none is no limit.

    What is changed here holds until the metadata service restarts; then its settings (meta.tenants) hold again.
    """
    given = {"bytes": size, "share": share, "pins": pins, "lookups_per_s": lookups, "writes_per_s": writes}
    changes = {name: value for name, value in given.items() if value is not None}
    if changes and tenant is None:
        raise UsageError("which tenant is to change? write `kvpool quota TENANT ...`; for all, set meta.tenant_default")
    unlimited = [name for name, value in changes.items() if value == _NONE]
    limits = {name: _read(name, value) for name, value in changes.items() if value != _NONE}
    settings = load_settings(config, {"client.pool": pool, "tls.dir": tls_dir})
    configure(settings.log)
    with connect_operator(settings) as client:
        if tenant is not None and changes:
            tenants = [client.set_quota(tenant, unlimited=unlimited, **limits)]
        else:
            tenants = [known for known in client.status().tenants if tenant in {None, known.tenant}]
    if tenant is not None and not tenants:
        raise UsageError(f"no tenant {tenant!r} has blocks or limits here; give it some limits, or leave the name out")
    emit(tenants, output, tenants_table(tenants))


def _read(name: str, text: str) -> float:
    kinds: dict[str, Callable[[str], float]] = {"bytes": parse_size, "pins": int}
    try:
        return kinds.get(name, float)(text)
    except UsageError:
        raise
    except ValueError as error:
        raise UsageError(f"--{name.replace('_', '-')} is {text!r}; write a number, or none for no limit") from error
