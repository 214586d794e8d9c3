"""A recorded history of puts and gets, and the checker that says whether a pool kept its promises in it.

Blocks of a test are made by `make_payload`: every page tells which put of which key it came from, so that old bytes,
bytes of another key and mixtures of several puts are all recognised by `find_attempt`, whatever the pool believes.
"""

import hashlib
import struct
from collections.abc import Iterable
from pathlib import Path

import msgspec

PAGE_BYTES = 4096
"""Every so many bytes of a payload can be told apart."""

_ATTEMPT = struct.Struct("<Q")


class Put(msgspec.Struct, frozen=True, tag="put"):
    """A client began to write ``key``; ``attempt`` is unique in the history."""

    key: str
    attempt: int
    began_s: float


class Commit(msgspec.Struct, frozen=True, tag="commit"):
    """The pool took an attempt in, as seen from inside, or told its writer so; ``attempt`` is None for a mixture."""

    key: str
    attempt: int | None
    at_s: float


class Get(msgspec.Struct, frozen=True, tag="get"):
    """A read of ``key`` that reported success; ``attempt`` is what the bytes were, None for nothing that was put."""

    key: str
    attempt: int | None
    began_s: float
    ended_s: float


class Call(msgspec.Struct, frozen=True, tag="call"):
    """Any call of a client, with the time by which it had to end; ``ended_s`` is None for a client that was killed."""

    what: str
    began_s: float
    deadline_s: float
    ended_s: float | None


Record = Put | Commit | Get | Call


class History:
    """Records in the order they were made. JSON Lines on disk: one record a line."""

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self.records: list[Record] = list(records)

    def add(self, record: Record) -> None:
        """Append a record."""
        self.records.append(record)

    def save(self, path: Path) -> None:
        """Write the records to ``path``."""
        path.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in self.records))

    @classmethod
    def load(cls, path: Path) -> "History":
        """The history in ``path``; raises msgspec.DecodeError for what is none."""
        decoder = msgspec.json.Decoder(Record)
        return cls(decoder.decode(line) for line in path.read_bytes().splitlines())

    def violations(self) -> list[str]:
        """What is wrong in this history; empty when every promise was kept.

        A read may find nothing at any time. If it reports success its bytes are one put's of that key, whole, and that
        put was committed before the read ended. Every call ends by its deadline.
        """
        found: list[str] = []
        put: set[tuple[str, int]] = set()
        committed: dict[tuple[str, int], float] = {}
        for record in self.records:
            match record:
                case Put():
                    put.add((record.key, record.attempt))
                case Commit() if record.attempt is not None:
                    committed.setdefault((record.key, record.attempt), record.at_s)
                case Call() if record.ended_s is not None and record.ended_s > record.deadline_s:
                    late_s = record.ended_s - record.deadline_s
                    found.append(f"{record.what} ended {late_s:.3f} s after its deadline")
        gets = [record for record in self.records if isinstance(record, Get)]
        return found + [wrong for get in gets if (wrong := _wrong(get, put, committed))]


def make_payload(key: str, attempt: int, size_bytes: int, page_bytes: int = PAGE_BYTES) -> bytes:
    """The bytes that put number ``attempt`` writes for ``key``: each page begins with the number, the rest follows."""
    pages = range(-(-size_bytes // page_bytes))
    return b"".join(_page(key, attempt, page, page_bytes) for page in pages)[:size_bytes]


def find_attempt(key: str, payload: bytes, page_bytes: int = PAGE_BYTES) -> int | None:
    """The put of ``key`` that wrote these bytes; None when they are of no single one, or altered."""
    if len(payload) < _ATTEMPT.size:
        return None
    (attempt,) = _ATTEMPT.unpack_from(payload)
    return attempt if payload == make_payload(key, attempt, len(payload), page_bytes) else None


def _page(key: str, attempt: int, page: int, page_bytes: int) -> bytes:
    seed = f"{key} {attempt} {page}".encode()
    return _ATTEMPT.pack(attempt) + hashlib.shake_128(seed).digest(page_bytes)[: page_bytes - _ATTEMPT.size]


def _wrong(get: Get, put: set[tuple[str, int]], committed: dict[tuple[str, int], float]) -> str | None:
    """What is wrong with a read, if anything is."""
    what = f"the read of {get.key[:8]} that ended at {get.ended_s:.3f}"
    if get.attempt is None:
        return f"{what} reported success with bytes of no put of that key"
    if (get.key, get.attempt) not in put:
        return f"{what} returned attempt {get.attempt}, which nobody made"
    committed_s = committed.get((get.key, get.attempt))
    if committed_s is None:
        return f"{what} returned attempt {get.attempt}, which was never committed"
    if committed_s > get.ended_s:
        return f"{what} returned attempt {get.attempt}, committed only at {committed_s:.3f}"
    return None
