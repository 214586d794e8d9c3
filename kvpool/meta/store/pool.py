"""What is of the whole pool in Redis: its epoch, the open namespaces and their numbers, the segments.

All of it lives under one hash tag, and every key but the epoch's begins with the epoch: state of an earlier one is
never looked at.
"""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from kvpool.core.errors import CapacityError, SettingsError, UnknownNamespaceError
from kvpool.core.limits import NAMESPACES_MAX, SEGMENTS_MAX
from kvpool.core.namespace import Namespace, parse_namespace
from kvpool.meta.store.link import POOL, RedisLink

EPOCH = f"{POOL}epoch"


class Epoch(msgspec.Struct, frozen=True, array_like=True):
    """One life of the state in Redis.

    Attributes:
        number: Random; nodes know it as the incarnation of the service.
        began_us: On Redis's clock.
        runs: Run ids of the primaries that held it from the start: with another one writes may have been lost.
    """

    number: int
    began_us: int
    runs: list[str]

    @property
    def pool(self) -> str:
        """First part of the pool's own keys."""
        return f"{POOL}{self.number:x}:"

    def prefix(self, namespace_id: bytes) -> str:
        """First part of the keys of a namespace, its hash tag included."""
        return f"kvpool:{self.number:x}:{{{namespace_id.hex()}}}:"


class SegmentRecord(msgspec.Struct, array_like=True):
    """A segment as all services know it.

    ``open`` is False once its node's session is over. What lies there is dropped then, unless it ``waits``: its node
    has joined again and says in its inventory what of it is still there.
    """

    segment_id: bytes
    node_id: str
    capacity_bytes: int
    medium: str
    accepts: bool = True
    out_of_use_bytes: int = 0
    open: bool = True
    waits: bool = False


@dataclass(frozen=True, slots=True)
class Known:
    """A namespace and its number in the pool."""

    number: int
    namespace: Namespace


def current_epoch(link: RedisLink, random_bytes: Callable[[int], bytes]) -> Epoch:
    """The epoch in Redis; a new one when there is none, or Redis may have lost writes of it.

    Raises:
        StateAwayError: Redis does not answer.
        SettingsError: Redis may drop keys by itself.
    """
    servers = link.servers()
    runs = sorted(info["run_id"] for info in servers)
    for info in servers:
        if int(info.get("maxmemory", 0)) and info.get("maxmemory_policy") != "noeviction":
            raise SettingsError(
                f"Redis evicts keys by itself ({info['maxmemory_policy']}), and so parts of the pool's state; "
                "set maxmemory-policy noeviction there"
            )
    (found,) = link.run([("GET", EPOCH)])
    if found is not None:
        epoch = msgspec.msgpack.decode(found, type=Epoch)
        if epoch.runs == runs:
            return epoch
    number = int.from_bytes(random_bytes(8), "little") >> 1
    new = Epoch(number, max(int(info["server_time_usec"]) for info in servers), runs)
    return _replace(link, found, new)


def _replace(link: RedisLink, found: bytes | None, new: Epoch) -> Epoch:
    """Put the new epoch in place of the one found, unless another service was first."""
    document = msgspec.msgpack.encode(new)
    link.call(POOL, "replace", "epoch", found or b"", document)
    (now,) = link.run([("GET", EPOCH)])
    return msgspec.msgpack.decode(now, type=Epoch)


class Pool:
    """Namespaces and segments of one epoch. Thread-safe: what it remembers is only ever added to, or read anew."""

    def __init__(self, link: RedisLink, epoch: Epoch) -> None:
        self.link = link
        self.epoch = epoch
        self._known: dict[bytes, Known] = {}
        self._segments_key = f"{epoch.pool}segments"
        self._namespaces_key = f"{epoch.pool}namespaces"

    # Namespaces

    def open_namespace(self, namespace: Namespace) -> None:
        """Give it a number, if it has none."""
        self.read_namespaces()
        if namespace.id in self._known:
            return
        number = self.link.run([("INCR", f"{self.epoch.pool}namespaces_opened")])[0] - 1
        if number >= NAMESPACES_MAX:
            raise CapacityError(f"{NAMESPACES_MAX} namespaces are open, the limit; drop old ones by raising an epoch")
        entry = msgspec.msgpack.encode((number, namespace.document))
        self.link.run([("HSETNX", self._namespaces_key, namespace.id, entry)])
        self.read_namespaces()

    def read_namespaces(self) -> None:
        """Learn which namespaces others have opened."""
        (found,) = self.link.run([("HGETALL", self._namespaces_key)])
        for namespace_id, entry in _pairs(found):
            if namespace_id not in self._known:
                number, document = msgspec.msgpack.decode(entry, type=tuple[int, bytes])
                self._known[namespace_id] = Known(number, parse_namespace(document))

    def known(self, namespace_id: bytes) -> Known:
        """The open namespace; raises UnknownNamespaceError."""
        if namespace_id not in self._known:
            self.read_namespaces()
        known = self._known.get(namespace_id)
        if known is None:
            raise UnknownNamespaceError(
                f"namespace {namespace_id.hex()[:16]} is not open here; open it with its document first"
            )
        return known

    def is_of(self, namespace_id: bytes, tenant: str) -> bool:
        """Whether it is open and the tenant's, as far as this service knows."""
        known = self._known.get(namespace_id)
        return known is not None and known.namespace.tenant == tenant

    def all_known(self) -> list[Known]:
        """All that are open, as far as this service knows."""
        return sorted(self._known.values(), key=lambda known: known.number)

    # Segments

    def add_segment(self, record: SegmentRecord) -> int:
        """A number that no other segment had in this epoch."""
        number = self.link.run([("INCR", f"{self.epoch.pool}segments_opened")])[0] - 1
        if number >= SEGMENTS_MAX:
            raise CapacityError(f"{SEGMENTS_MAX} segments were opened, the limit; restart the pool's state")
        self.put_segment(number, record)
        self.link.run([("HSET", f"{self.epoch.pool}segment_nodes", number, record.node_id)])
        return int(number)

    def put_segment(self, number: int, record: SegmentRecord) -> None:
        """Change what all services know of it."""
        self.link.run([("HSET", self._segments_key, number, msgspec.msgpack.encode(record))])

    def drop_segment(self, number: int) -> None:
        """Nothing lies there any more."""
        self.link.run([("HDEL", self._segments_key, number)])

    def segments(self) -> dict[int, SegmentRecord]:
        """Open and lost segments, by number."""
        (found,) = self.link.run([("HGETALL", self._segments_key)])
        return {int(n): msgspec.msgpack.decode(r, type=SegmentRecord) for n, r in sorted(_pairs(found), key=_number)}

    def node_of_segment(self, number: int) -> str:
        """The node whose segment it is or was."""
        (found,) = self.link.run([("HGET", f"{self.epoch.pool}segment_nodes", number)])
        return found.decode() if found else ""


def _pairs(found: dict[bytes, bytes] | list[bytes]) -> list[tuple[bytes, bytes]]:
    """Redis's answer to HGETALL, as the client gives it: a dictionary, or a flat list from within a pipeline."""
    if isinstance(found, dict):
        return list(found.items())
    return list(zip(found[::2], found[1::2], strict=True))


def _number(pair: tuple[bytes, bytes]) -> int:
    return int(pair[0])
