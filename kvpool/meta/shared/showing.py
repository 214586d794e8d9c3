"""What operators see of a pool whose state is shared."""

from kvpool.meta.results import MetaStatus, RecoveryStatus, StateStatus
from kvpool.meta.shared import nodes, servers
from kvpool.meta.shared.state import State


def status_of(state: State, incarnation: int, uptime_s: float) -> MetaStatus:
    """The whole pool as the service ``incarnation`` sees it; raises StateAwayError."""
    state.members.refresh_all()
    link, every = state.store.link, list(state.members)
    return MetaStatus(
        incarnation=incarnation,
        topology=nodes.topology(state),
        stats=state.store.stats(),
        used={s.number: (s.used_bytes, s.blocks) for s in state.store.segments()},
        scrubs={member.node_id: member.scrub for member in every},
        fetched_bytes={member.node_id: member.fetched_bytes for member in every},
        moved_bytes={member.node_id: member.moved_bytes for member in every},
        versions={member.node_id: member.version for member in every},
        off={member.node_id: member.off for member in every},
        recovery=RecoveryStatus.of(state.recovery),
        tenants=state.store.tenants(),
        uptime_s=uptime_s,
        state=StateStatus(servers.health(link, state.epoch), servers.servers(link, state.epoch)),
    )
