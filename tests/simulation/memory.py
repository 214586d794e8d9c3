"""What of a node outlives its process: payload, slot headers and namespace documents, in plain memory."""

import numpy as np

from kvpool.core.limits import PAGE_BYTES
from kvpool.node.headers import HeaderFile, header_file_bytes
from kvpool.node.namespaces import NamespaceBook


class Memory:
    """A node's shared memory: a segment for `NodeStore`, found again by the next process."""

    medium = "shm"

    def __init__(self, segment_id, pages):
        self.segment_id = segment_id
        self.pages = pages
        self.size_bytes = pages * PAGE_BYTES
        self.payload = np.zeros(self.size_bytes, np.uint8)
        self.address = self.payload.__array_interface__["data"][0]
        self.headers = bytearray(header_file_bytes(pages))
        self.documents = {}

    def view(self, page, length):
        return self.payload[page * PAGE_BYTES :][:length].data

    def descriptors(self):
        return self.payload, self.payload

    def close(self):
        pass


class MemoryHeaders(HeaderFile):
    """The header file over `Memory`."""

    def __init__(self, memory):
        self.pages = memory.pages
        self._segment_id = memory.segment_id
        self._map = memory.headers
        self.next_generation = self._read_prologue("the headers") if any(memory.headers[:8]) else 1
        self._records = records_of(memory)
        self._reserved = 0
        self.reserve_generations(self.next_generation)


class MemoryBook(NamespaceBook):
    """The namespaces' documents in `Memory`."""

    def __init__(self, memory, ask):
        super().__init__(NO_FILE, ask)
        self._documents = memory.documents

    def _append(self, document):
        pass


class _NoFile:
    @staticmethod
    def exists():
        return False


NO_FILE = _NoFile()


def records_of(memory):
    """The header records, to look at or to damage."""
    from kvpool.node.headers import _PROLOGUE, RECORD

    return np.frombuffer(memory.headers, RECORD, offset=_PROLOGUE.size)


class Mapping:
    """A client's mapping of a segment: the same memory, as long as anybody looks at it."""

    def __init__(self, readable, writable, size_bytes):
        self.readable = readable
        self._writable = writable
        self.size_bytes = size_bytes

    def writable(self):
        return self._writable

    def close(self):
        pass
