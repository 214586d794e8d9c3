"""The segments blocks can be placed on, and how full they are."""

from array import array
from dataclasses import dataclass, field

from kvpool.core.directory.surplus import SurplusList
from kvpool.core.directory.table import NEVER_US, NIL

DISK = "disk"
"""The medium that new blocks are never written to: copies come there from memory, and go back when they are read."""

SHM = "shm"
"""Shared memory of the node's host."""

VRAM = "vram"
"""Memory of a GPU."""

FETCHED = frozenset({DISK, VRAM})
"""Media that the node's processor cannot address: it fetches their bytes before it sends or checks them."""


@dataclass(slots=True)
class Totals:
    """Sums over all segments of one tier."""

    capacity_bytes: int = 0
    used_bytes: int = 0
    surplus_bytes: int = 0


@dataclass(slots=True)
class Segment:
    """One kind of memory of one store node.

    Attributes:
        number: The directory's short name for it; never reused while the directory lives.
        capacity_bytes: Bytes its slots may take.
        medium: What it is made of; `DISK` is the tier below memory.
        totals: Of its tier.
        of_tenants: Bytes used in its tier by tenant.
        used_bytes: Sum of the slots of its placements, reserved and committed, and of what is promised to copies.
        out_of_use_bytes: What bad memory, and memory that rests, has taken off the capacity.
        open: False once it is lost: it is emptied, and nothing else has to do with it.
        accepts: False while its node drains or is lost: nothing new is placed there.
        spared_until_us: Nothing is evicted before: leases that an earlier service gave may still run.
        first: First row of its list of primary placements.
        surplus: Lists of its surplus copies, by tenant.
        blocks: Length of all lists.
        surplus_blocks: Surplus copies among them.
        surplus_bytes: Sum of their slots.
    """

    number: int
    segment_id: bytes
    node_id: str
    capacity_bytes: int
    medium: str = SHM
    totals: Totals = field(default_factory=Totals)
    of_tenants: "array[int]" = field(default_factory=lambda: array("q"))
    used_bytes: int = 0
    out_of_use_bytes: int = 0
    open: bool = True
    accepts: bool = True
    spared_until_us: int = NEVER_US
    first: int = NIL
    surplus: dict[int, SurplusList] = field(default_factory=dict)
    blocks: int = 0
    surplus_blocks: int = 0
    surplus_bytes: int = 0

    @property
    def is_disk(self) -> bool:
        """Whether it is of the tier below memory."""
        return self.medium == DISK

    @property
    def takes_new(self) -> bool:
        """Whether new blocks may be placed there, and copies for other readers."""
        return self.accepts and not self.is_disk

    @property
    def free_bytes(self) -> int:
        """Bytes that can be placed without evicting."""
        return self.capacity_bytes - self.used_bytes

    @property
    def fill(self) -> float:
        """Used share of the capacity."""
        return self.used_bytes / self.capacity_bytes

    def last_surplus(self, owner: int) -> int:
        """The surplus copy of a tenant to give up first, or NIL."""
        copies = self.surplus.get(owner) if self.surplus_blocks else None
        return copies.last if copies is not None else NIL
