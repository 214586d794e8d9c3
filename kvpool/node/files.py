"""The files of a node's segment: one set a node id, taken over by a restart, never shared by two processes."""

import fcntl
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

from kvpool.core.errors import CapacityError
from kvpool.core.limits import PAGE_BYTES, SEGMENT_ID_BYTES
from kvpool.node.headers import HeaderFile, header_file_bytes, stored_segment_id
from kvpool.node.private_file import open_private
from kvpool.node.segment import Segment, VramSegment
from kvpool.node.segment.shm import NO_ROOM, HugePages, ShmSegment, check_room
from kvpool.ops.logging import get_logger
from kvpool.ops.settings import node_lock
from kvpool.transport.devices import allocate

S = TypeVar("S", bound=Segment)
H = TypeVar("H", bound=HeaderFile)

log = get_logger(__name__)


class StoredFiles:
    """Payload, headers and namespace documents under names that begin with ``stem``; one process has them at a time."""

    def __init__(self, directory: Path, stem: str, lock_path: Path) -> None:
        self.payload = directory / f"{stem}.payload"
        self.headers = directory / f"{stem}.headers"
        self.namespaces = directory / f"{stem}.namespaces"
        self.fresh = False
        """Whether `open` began with an empty segment."""
        self._lock_path = lock_path

    def _take(self, taken: str) -> None:
        """Lock the files until `close`; raises CapacityError, saying that they are ``taken``."""
        self._lock = open_private(self._lock_path, "a segment")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise CapacityError(taken) from error

    def _open(
        self, size_bytes: int, fix: str, make_segment: Callable[[bytes], S], make_headers: Callable[[bytes], H]
    ) -> tuple[S, H]:
        pages = size_bytes // PAGE_BYTES
        segment_id = stored_segment_id(self.headers, pages)
        same_payload = self.payload.exists() and self.payload.stat().st_size == pages * PAGE_BYTES
        self.fresh = segment_id is None or not same_payload
        with ExitStack() as undo:
            if self.fresh:
                # Before anything is removed: a size that cannot be must not cost the blocks that are there.
                check_room(self.payload, size_bytes, fix, header_file_bytes(pages))
                if self.payload.exists():
                    log.info("segment_replaced", path=str(self.payload), reason="another size or no headers")
                self.remove()
                undo.callback(self.remove)
            segment_id = segment_id if segment_id is not None and not self.fresh else os.urandom(SEGMENT_ID_BYTES)
            segment = make_segment(segment_id)
            undo.callback(segment.close)
            headers = make_headers(segment_id)
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


class SegmentFiles(StoredFiles):
    """Payload, headers and namespace documents of node ``node_id`` under ``directory``.

    Holds a lock from construction to `close`, so that a second node of the same name cannot map them.

    Raises:
        CapacityError: The directory cannot be used, or another node uses the files.
    """

    def __init__(self, directory: Path, node_id: str) -> None:
        super().__init__(directory, f"kvpool-{node_id}", node_lock(directory, node_id))
        self._take(f"another node {node_id!r} uses {self.payload}; stop it, or give this one another --node-id")

    def open_device(self, size_bytes: int, device: str) -> tuple[VramSegment, HeaderFile]:
        """A segment in a device's memory, and its headers: empty, since that memory went with the last run.

        Raises:
            CapacityError: Memory that cannot be had; nothing new is left behind.
            SettingsError: No such kind of device.
            UnavailableError: What the device needs is missing.
        """
        pages = size_bytes // PAGE_BYTES
        self.fresh = not self.headers.exists()
        memory = allocate(device, pages * PAGE_BYTES)
        if not self.fresh:
            log.warning("blocks_lost", headers=str(self.headers), reason="GPU memory does not outlive its process")
            self.fresh = True
        with ExitStack() as undo:
            undo.callback(memory.close)
            self.remove()
            undo.callback(self.remove)
            segment = VramSegment(os.urandom(SEGMENT_ID_BYTES), pages * PAGE_BYTES, memory)
            headers = HeaderFile(self.headers, segment.segment_id, pages)
            undo.pop_all()
        return segment, headers

    def open(self, size_bytes: int, hugepages: HugePages) -> tuple[ShmSegment, HeaderFile]:
        """Segment and headers: those of the last run when they fit ``size_bytes``, else empty ones.

        Raises:
            CapacityError: Memory that cannot be had; nothing new is left behind.
        """
        return self._open(
            size_bytes,
            NO_ROOM,
            lambda segment_id: ShmSegment(self.payload, segment_id, size_bytes, hugepages),
            lambda segment_id: HeaderFile(self.headers, segment_id, size_bytes // PAGE_BYTES),
        )
