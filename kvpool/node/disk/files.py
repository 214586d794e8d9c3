"""The files of a node's disk: one set a directory, found again by whichever node is given it next."""

from collections.abc import Callable
from pathlib import Path

from kvpool.core.errors import CapacityError
from kvpool.core.limits import PAGE_BYTES
from kvpool.node.disk.headers import DiskHeaders
from kvpool.node.files import StoredFiles
from kvpool.node.segment.disk import DiskSegment

STEM = "kvpool-disk"


class DiskFiles(StoredFiles):
    """See `StoredFiles`; holds a lock on ``directory`` from construction to `close`.

    Raises:
        CapacityError: It is no directory, cannot be used, or another node uses it.
    """

    def __init__(self, directory: Path) -> None:
        if not directory.is_dir():
            raise CapacityError(f"--disk {directory} is not a directory; make it first, on the disk that is meant")
        super().__init__(directory, STEM, directory / f"{STEM}.lock")
        self._take(f"another node uses --disk {directory}; give each node a directory of its own")

    def open(self, size_bytes: int, on_error: Callable[[OSError], None]) -> tuple[DiskSegment, DiskHeaders]:
        """Segment and headers: those of the last run when they fit ``size_bytes``, else empty ones.

        Args:
            size_bytes: Whole pages.
            on_error: See `DiskHeaders`.

        Raises:
            CapacityError: Room that cannot be had, or a disk that fails; nothing new is left behind.
        """
        try:
            return self._open(
                size_bytes,
                "choose a smaller --disk-size or another --disk",
                lambda segment_id: DiskSegment(self.payload, segment_id, size_bytes),
                lambda segment_id: DiskHeaders(self.headers, segment_id, size_bytes // PAGE_BYTES, on_error),
            )
        except OSError as error:
            raise CapacityError(f"cannot use {self.payload.parent}: {error}; choose another --disk, or none") from error
