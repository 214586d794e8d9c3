"""A node's disk: a store that only the node's own copier writes to, and that fails without harm to memory."""

import numpy as np
from numpy.typing import NDArray

from kvpool.core.errors import CapacityError
from kvpool.core.slots import Slots
from kvpool.node.directory_link import DirectoryLink
from kvpool.node.disk.headers import DiskHeaders
from kvpool.node.fetching import FetchingStore
from kvpool.node.namespaces import NamespaceBook
from kvpool.node.segment.disk import DiskSegment


class DiskStore(FetchingStore):
    """One disk segment and everything in it; see `NodeStore`. Thread-safe."""

    def __init__(
        self,
        segment: DiskSegment,
        headers: DiskHeaders,
        slots: Slots,
        book: NamespaceBook,
        link: DirectoryLink,
        incarnation: int,
    ) -> None:
        super().__init__(segment, headers, slots, book, link, incarnation)
        self._counters["not_direct"] = int(not segment.direct)

    def prepare(
        self, sealed: bytes, owner: int, *, bound: bool = True
    ) -> tuple[NDArray[np.uint32], NDArray[np.uint64]]:
        """See `FetchingStore.prepare`."""
        try:
            return super().prepare(sealed, owner, bound=bound)
        except CapacityError as error:  # the documents of namespaces found no room
            self.turn_off(error, "write")
            raise
