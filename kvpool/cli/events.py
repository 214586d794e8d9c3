"""`kvpool events`: follows what can be loaded from the pool, a line for each change."""

from typing import TYPE_CHECKING, Annotated

import typer

from kvpool.cli import with_settings
from kvpool.cli.connecting import CLIENT_TLS_KEYS, connect_operator
from kvpool.cli.output import Format, emit
from kvpool.core.errors import SettingsError, UnavailableError, UsageError
from kvpool.ops.curve import CurveKeys, follower_keys
from kvpool.ops.logging import get_logger
from kvpool.ops.settings import Settings

if TYPE_CHECKING:
    from kvpool.events import Event, Follower, Told

POLL_S = 1.0

_DIGITS = 16

log = get_logger(__name__)


@with_settings("client.pool", "client.timeout_s", *CLIENT_TLS_KEYS)
def events(
    settings: Settings,
    output: Format,
    once: Annotated[bool, typer.Option("--once", help="Show what is there now, and end.")] = False,
) -> None:
    """Show what can be loaded from the pool, then each change, until Ctrl-C; what is missed is caught up with."""
    with connect_operator(settings) as client:
        endpoints = client.status().events
    if not endpoints:
        raise UsageError(f"{settings.client.pool} publishes no events; start `kvpool meta` with --events-port")
    from kvpool.events import Follower  # noqa: PLC0415 - ZeroMQ, which no other command needs

    with Follower(endpoints[0], endpoints[1], _keys(settings)) as follower:
        for told in follower.poll(settings.client.timeout_s):
            _show(told, output)
        while not once:
            _follow(follower, output)


def _keys(settings: Settings) -> CurveKeys | None:
    tls = settings.tls
    if not tls.enabled:
        return None
    if tls.dir is None:
        raise SettingsError("following events with TLS needs tls.dir: `kvpool certs` puts the keys of followers there")
    return follower_keys(tls.dir)


def _follow(follower: "Follower", output: Format) -> None:
    try:
        for told in follower.poll(POLL_S):
            _show(told, output)
    except UnavailableError as error:
        log.warning("events_unavailable", reason=str(error))


def _show(told: "Told", output: Format) -> None:
    for event in told.events:
        record = _record(event)
        emit({"sequence": told.sequence, "source": told.source, **record}, output, _line(told, record))


def _record(event: "Event") -> dict[str, object]:
    from kvpool.transport.wire.events import AllBlocksCleared, BlockStored, namespace_of  # noqa: PLC0415 - as above

    if isinstance(event, AllBlocksCleared):
        return {"event": "cleared"}
    namespace, hashes = namespace_of(event).hex(), [block_hash.hex() for block_hash in event.block_hashes]
    if not isinstance(event, BlockStored):
        return {"event": "removed", "namespace": namespace, "hashes": hashes}
    parent = event.parent_block_hash
    return {"event": "stored", "namespace": namespace, "hashes": hashes, "parent": parent.hex() if parent else None}


def _line(told: "Told", record: dict[str, object]) -> str:
    start = f"{told.sequence} {told.source:8} {record['event']:7}"
    if record["event"] == "cleared":
        return start
    hashes = record["hashes"]
    assert isinstance(hashes, list)
    ends = hashes[0][:_DIGITS] + (f"…{hashes[-1][:_DIGITS]}" if len(hashes) > 1 else "")
    below = f" below {str(record['parent'])[:_DIGITS]}" if record.get("parent") else ""
    return f"{start} {str(record['namespace'])[:_DIGITS]} {len(hashes):5} {ends}{below}"
