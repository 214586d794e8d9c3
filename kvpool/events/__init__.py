"""Following a pool from outside: what can be loaded from it, kept up to date from its event stream.

with kvpool.events.Follower("tcp://127.0.0.1:7305", "tcp://127.0.0.1:7306") as follower:
    while True:
        for told in follower.poll(timeout_s=1.0):
            ...                                     # told.events, in order
        follower.index.namespaces                   # what can be loaded now, as far as is known
"""

from kvpool.events.follower import Follower, Source, Told
from kvpool.events.index import PoolIndex
from kvpool.ops.curve import follower_keys
from kvpool.transport.wire.events import AllBlocksCleared, BlockRemoved, BlockStored, Event

__all__ = [
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "Event",
    "Follower",
    "PoolIndex",
    "Source",
    "Told",
    "follower_keys",
]
