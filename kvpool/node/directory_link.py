"""What a node's store asks of the directory."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvpool.node.headers import SlotHeaders


class DirectoryLink(Protocol):
    """How the store tells the directory what was written."""

    def commit(self, segment_id: bytes, reservation: int, headers: SlotHeaders) -> NDArray[np.uint8]:
        """Commit written slots; one `CommitStatus` each. Raises KvpoolError when the directory cannot be asked."""

    def abort(self, reservation: int, hashes: list[bytes]) -> None:
        """Give blocks back that will not be written; best effort."""

    def gone(self, segment_id: bytes, headers: SlotHeaders) -> None:
        """Slots of one namespace whose bytes are bad, and are not served any more; best effort."""
