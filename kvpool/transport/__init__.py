"""How block bytes move between clients and store nodes. One file per transport; `registry` knows them by URI scheme."""

from kvpool.transport.base import ReadBatch, ReadStatus, Transport, WriteBatch, WriteStatus
from kvpool.transport.registry import SCHEMES, open_best, open_transport, prepare_transport, scheme_of

__all__ = [
    "SCHEMES",
    "ReadBatch",
    "ReadStatus",
    "Transport",
    "WriteBatch",
    "WriteStatus",
    "open_best",
    "open_transport",
    "prepare_transport",
    "scheme_of",
]
