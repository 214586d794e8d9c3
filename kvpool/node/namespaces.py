"""Documents of the namespaces a node has blocks of, so that a restarted metadata service can learn them from it.

One JSON document a line, appended when a namespace is first written; lines that do not parse are left out. A line
begins with its line break, so that it is whole even below one that a crash has cut short.
"""

import threading
from collections.abc import Callable
from pathlib import Path

from kvpool.core.errors import CapacityError, InvalidNamespaceError
from kvpool.core.namespace import parse_namespace


class NamespaceBook:
    """The documents by id, kept in a file. Thread-safe.

    Args:
        path: The file; made when absent.
        ask: Asks the metadata service for a document that is not known; raises KvpoolError.
    """

    def __init__(self, path: Path, ask: Callable[[bytes], bytes]) -> None:
        self._path = path
        self._ask = ask
        self._lock = threading.Lock()
        self._documents: dict[bytes, bytes] = {}
        for line in path.read_bytes().splitlines() if path.exists() else ():
            try:
                self._documents[parse_namespace(line).id] = line
            except InvalidNamespaceError:
                continue  # empty, or cut short by a crash

    def get(self, namespace_id: bytes) -> bytes | None:
        """The document, if known."""
        return self._documents.get(namespace_id)

    def learn(self, namespace_id: bytes) -> None:
        """Make sure that the document is known and kept; raises KvpoolError when nobody knows it."""
        if namespace_id in self._documents:
            return
        document = self._ask(namespace_id)
        with self._lock:
            if namespace_id not in self._documents:
                self._append(document)
                self._documents[namespace_id] = document

    def _append(self, document: bytes) -> None:
        try:
            with self._path.open("ab") as file:
                file.write(b"\n" + document)
        except OSError as error:
            raise CapacityError(f"{self._path} takes no more documents: {error}; give the node less --size") from error
