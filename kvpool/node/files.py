"""The files of a node's segment: one set a node id, taken over by a restart, never shared by two processes."""

import fcntl
import os
from contextlib import ExitStack
from pathlib import Path

from kvpool.core.errors import CapacityError
from kvpool.core.limits import PAGE_BYTES, SEGMENT_ID_BYTES
from kvpool.node.headers import HeaderFile, header_file_bytes, stored_segment_id
from kvpool.node.private_file import open_private
from kvpool.node.segment.shm import HugePages, ShmSegment, check_room
from kvpool.ops.logging import get_logger
from kvpool.ops.settings import node_lock

log = get_logger(__name__)


class SegmentFiles:
    """Payload, headers and namespace documents of node ``node_id`` under ``directory``.

    Holds a lock from construction to `close`, so that a second node of the same name cannot map them.

    Raises:
        CapacityError: The directory cannot be used, or another node uses the files.
    """

    def __init__(self, directory: Path, node_id: str) -> None:
        self.payload = directory / f"kvpool-{node_id}.payload"
        self.headers = directory / f"kvpool-{node_id}.headers"
        self.namespaces = directory / f"kvpool-{node_id}.namespaces"
        self.fresh = False
        """Whether `open` began with an empty segment."""
        self._lock_path = node_lock(directory, node_id)
        self._lock = open_private(self._lock_path, "a segment")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise CapacityError(
                f"another node {node_id!r} uses {self.payload}; stop it, or give this one another --node-id"
            ) from error

    def open(self, size_bytes: int, hugepages: HugePages) -> tuple[ShmSegment, HeaderFile]:
        """Segment and headers: those of the last run when they fit ``size_bytes``, else empty ones.

        Raises:
            CapacityError: Memory that cannot be had; nothing new is left behind.
        """
        pages = size_bytes // PAGE_BYTES
        segment_id = stored_segment_id(self.headers, pages)
        same_payload = self.payload.exists() and self.payload.stat().st_size == pages * PAGE_BYTES
        self.fresh = segment_id is None or not same_payload
        with ExitStack() as undo:
            if self.fresh:
                # Before anything is removed: a size that cannot be must not cost the blocks that are there.
                check_room(self.payload, size_bytes, header_file_bytes(pages))
                if self.payload.exists():
                    log.info("segment_replaced", path=str(self.payload), reason="another size or no headers")
                self.remove()
                undo.callback(self.remove)
            segment_id = segment_id if segment_id is not None and not self.fresh else os.urandom(SEGMENT_ID_BYTES)
            segment = ShmSegment(self.payload, segment_id, size_bytes, hugepages)
            undo.callback(segment.close)
            headers = HeaderFile(self.headers, segment_id, pages)
            undo.pop_all()
        return segment, headers

    def remove(self) -> None:
        """Remove the blocks; the lock stays."""
        for path in (self.payload, self.headers, self.namespaces):
            path.unlink(missing_ok=True)

    def close(self, *, keep: bool) -> None:
        """Let go of the files, and remove them unless they are kept for the next run."""
        if not keep:
            self.remove()
            self._lock_path.unlink(missing_ok=True)
        os.close(self._lock)
