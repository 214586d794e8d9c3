"""How block bytes move between clients and store nodes. One file per transport; `registry` knows them by URI scheme."""

from kvpool.transport.base import ReadBatch, Reading, ReadStatus, Target, Transport, WriteBatch, WriteStatus
from kvpool.transport.registry import SCHEMES, open_transport, scheme_of
from kvpool.transport.ways import LOCAL_SCHEMES, Ways

__all__ = [
    "LOCAL_SCHEMES",
    "SCHEMES",
    "ReadBatch",
    "ReadStatus",
    "Reading",
    "Target",
    "Transport",
    "Ways",
    "WriteBatch",
    "WriteStatus",
    "open_transport",
    "scheme_of",
]
