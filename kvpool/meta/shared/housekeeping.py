"""What every service of a pool does each heartbeat, whoever comes first."""

import threading
import time

from kvpool.core.members import QUIET
from kvpool.meta.shared import nodes, servers
from kvpool.meta.shared.records import ServerRecord
from kvpool.meta.shared.state import State
from kvpool.ops.logging import get_logger

LOSS_BLOCKS = 512
LOSS_PAUSE_S = 0.001
"""What lost nodes held goes so many blocks at a time, for others to come in between."""

SERVER_TTL_S = 5.0

log = get_logger(__name__)


def keep_house(state: State, node_ttl_s: float, here: ServerRecord, stopping: threading.Event) -> None:
    """Say that this service is there, free what was abandoned, lose silent nodes; raises StateAwayError."""
    link = state.store.link
    state.members.refresh()
    servers.say_here(link, state.epoch, here)
    servers.drop_silent(link, state.epoch, SERVER_TTL_S)
    state.store.expire()
    for record in state.members.silent(node_ttl_s):
        log.warning("node_silent", node=record.node_id, ttl_s=node_ttl_s)
        nodes.lose(state, record.node_id, record.session)
    for record in state.members.silent(node_ttl_s * QUIET):
        nodes.set_quiet(state, record, quiet=True)
    while state.store.drop_lost(LOSS_BLOCKS) and not stopping.is_set():
        time.sleep(LOSS_PAUSE_S)
