"""The directory of blocks. `Directory` is the interface; the other modules are its parts."""

from kvpool.core.directory.copies import Copy
from kvpool.core.directory.directory import Directory
from kvpool.core.directory.draining import Drain
from kvpool.core.directory.explaining import Explanation, Memory
from kvpool.core.directory.following import Part
from kvpool.core.directory.heat import HotHead, HotRun
from kvpool.core.directory.inventory import AnnouncedBlock, Inventory
from kvpool.core.directory.journal import Changes, Pile
from kvpool.core.directory.lookup import LEASE_MARGIN_S
from kvpool.core.directory.outbox import FetchBlocks, FreeSlot, Order
from kvpool.core.directory.results import (
    CommitStatus,
    DirectoryStats,
    Location,
    LookupStats,
    Match,
    ReserveResult,
    Share,
    Want,
)
from kvpool.core.directory.segments import DISK, FETCHED, SHM, VRAM, Segment
from kvpool.core.directory.state import DirectoryConfig
from kvpool.core.directory.table import BlockState
from kvpool.core.directory.tenants import REFUSALS, TenantStats
from kvpool.core.directory.tombstones import Cause, MissReason
from kvpool.core.directory.viewing import BlockView, HeadView, MissView, NamespaceUsage, View

__all__ = [
    "DISK",
    "FETCHED",
    "LEASE_MARGIN_S",
    "REFUSALS",
    "SHM",
    "VRAM",
    "AnnouncedBlock",
    "BlockState",
    "BlockView",
    "Cause",
    "Changes",
    "CommitStatus",
    "Copy",
    "Directory",
    "DirectoryConfig",
    "DirectoryStats",
    "Drain",
    "Explanation",
    "FetchBlocks",
    "FreeSlot",
    "HeadView",
    "HotHead",
    "HotRun",
    "Inventory",
    "Location",
    "LookupStats",
    "Match",
    "Memory",
    "MissReason",
    "MissView",
    "NamespaceUsage",
    "Order",
    "Part",
    "Pile",
    "ReserveResult",
    "Segment",
    "Share",
    "TenantStats",
    "View",
    "Want",
]
