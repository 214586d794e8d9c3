"""`kvpool status`: shows what the pool holds and where, and fails if the pool is not well."""

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType

from kvpool.cli import with_settings
from kvpool.cli.connecting import CLIENT_TLS_KEYS, connect_operator
from kvpool.cli.output import Format, UnhealthyError, emit, table
from kvpool.cli.tenants import shows_tenants, tenants_table
from kvpool.core.directory import DISK
from kvpool.core.members import MemberState
from kvpool.core.units import format_size
from kvpool.ops.addresses import split_address
from kvpool.ops.authentication import Security
from kvpool.ops.settings import Settings, is_loopback

if TYPE_CHECKING:
    from kvpool.client import PoolStatus
    from kvpool.client.results import NodeStatus, ServerStatus

_COLUMNS = ("node", "state", "#used", "#of", "#%", "#blocks", "#scrub", "#bad", "transport", "endpoints")


@with_settings("client.pool", "client.timeout_s", "client.transports", "client.streams", *CLIENT_TLS_KEYS)
def status(settings: Settings, output: Format) -> None:
    """Show the pool's nodes; exit with 3 if the pool cannot be reached, 4 if it is not healthy."""
    with connect_operator(settings) as pool:
        pool_status = pool.status(reach=True)
    emit(pool_status, output, _view(pool_status))
    _check_health(pool_status)


def _view(pool_status: "PoolStatus") -> RenderableType:
    has_disks = any(segment.medium == DISK for node in pool_status.nodes for segment in node.segments)
    has_copies = any(node.fetched_bytes for node in pool_status.nodes)
    rows = [
        (
            node.node_id,
            node.state,
            format_size(node.used_bytes),
            format_size(node.capacity_bytes),
            f"{100 * node.used_bytes / max(1, node.capacity_bytes):.1f}",
            f"{node.blocks:,}",
            f"{100 * node.scrub.progress:.0f}%",
            node.scrub.bad_blocks,
            f"{node.transport} ({node.carrier})" if node.carrier else node.transport or "none",
            " ".join(uri for uri in node.endpoints if not uri.startswith("grpc://")),
            *([_disk(node)] if has_disks else []),
            *([_fetched(node)] if has_copies else []),
        )
        for node in pool_status.nodes
    ]
    headline = f"incarnation {pool_status.incarnation}, namespaces {len(pool_status.namespaces)}"
    columns = (*_COLUMNS, *(["disk"] if has_disks else []), *(["copied here"] if has_copies else []))
    tenants = [tenants_table(pool_status.tenants)] if shows_tenants(pool_status.tenants) else []
    heads = (headline, *_security(pool_status), *_state(pool_status), *_recovery(pool_status), *_events(pool_status))
    return Group(*heads, table(columns, rows), *tenants)


def _security(pool_status: "PoolStatus") -> list[str]:
    """How the pool is guarded; louder where it is not."""
    if pool_status.security == Security.INSECURE:
        return ["INSECURE: plaintext, for anybody who reaches the metadata service; see `kvpool certs`"]
    exposed = [node.node_id for node in pool_status.nodes if any(map(_is_exposed, node.endpoints))]
    if exposed:
        return [f"INSECURE: plaintext, for anybody who reaches {', '.join(exposed)}; see `kvpool certs`"]
    return ["security: TLS" if pool_status.security == Security.TLS else "security: none, on loopback alone"]


def _state(pool_status: "PoolStatus") -> list[str]:
    """Where several services share the state: how that is, and which they are."""
    state = pool_status.state
    if state is None:
        return []
    behind = f", {state.replicas} replicas, {format_size(state.lag_bytes)} behind" if state.replicas else ""
    held = f"{state.primaries} primaries, {format_size(state.used_bytes)}{behind}"
    return [f"state: epoch {state.epoch} in {state.url}, {held}", *map(_server, pool_status.servers)]


def _server(server: "ServerStatus") -> str:
    failures = f", {server.failures} calls that it did not answer" if server.failures else ""
    return (
        f"server: {server.address}, version {server.version}, Redis answers in {server.ping_s * 1e3:.1f} ms{failures}"
    )


def _is_exposed(uri: str) -> bool:
    scheme, _, address = uri.partition("://")
    return scheme == "tcp" and not is_loopback(split_address(address)[0])


def _disk(node: "NodeStatus") -> str:
    """How full the node's disk is."""
    disk = next((segment for segment in node.segments if segment.medium == DISK), None)
    if disk is None:
        return "none"
    return "off" if disk.off else f"{format_size(disk.used_bytes)} of {format_size(disk.capacity_bytes)}"


def _fetched(node: "NodeStatus") -> str:
    """What it has copied from other nodes, and over what."""
    return ", ".join(f"{format_size(size)} over {name}" for name, size in sorted(node.fetched_bytes.items())) or "none"


def _recovery(pool_status: "PoolStatus") -> list[str]:
    """A line while the directory is rebuilt."""
    recovery = pool_status.recovery
    if not recovery.active:
        return []
    of = f" of {recovery.nodes_expected}" if recovery.nodes_expected else ""
    reported = f"{recovery.nodes_reported}{of} nodes have reported"
    return [f"recovering for {recovery.lasted_s:.1f} s: {reported}; blocks not known yet are misses"]


def _events(pool_status: "PoolStatus") -> list[str]:
    """A line where events are published."""
    if not pool_status.events:
        return []
    counts = pool_status.counters
    if not counts:  # a tenant's client is shown none
        return [f"events at {pool_status.events[0]}"]
    told = f"{counts['events_subscribers']} subscribers, {counts['events_messages']:,} messages"
    untold = f"{counts['events_dropped']:,} drops, {counts['events_lost']:,} lost"
    return [f"events at {pool_status.events[0]}: {told}, {untold}"]


def _check_health(pool_status: "PoolStatus") -> None:
    lost = [node.node_id for node in pool_status.nodes if node.state == MemberState.LOST]
    if lost:
        raise UnhealthyError(f"lost nodes: {', '.join(lost)}; restart them, their blocks return with them")
    segments = [(node.node_id, segment) for node in pool_status.nodes for segment in node.segments]
    off = [f"{segment.medium} of {node_id} ({segment.off})" for node_id, segment in segments if segment.off]
    if off:
        raise UnhealthyError(f"turned off: {', '.join(off)}; all else serves. See to it, and restart the node")
    if not any(node.state == MemberState.READY for node in pool_status.nodes):
        raise UnhealthyError("no node is ready; start one with `kvpool node --meta URI`")
