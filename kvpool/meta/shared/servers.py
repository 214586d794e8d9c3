"""The services of a pool, as each of them says every second that it is there; and how Redis is, as they see it."""

from time import perf_counter

import msgspec

from kvpool.meta.shared.records import ServerRecord, StateHealth
from kvpool.meta.store.link import RedisLink
from kvpool.meta.store.pool import Epoch

SEEN = "servers_seen"


def say_here(link: RedisLink, epoch: Epoch, record: ServerRecord) -> None:
    """Tell the others that this service is there."""
    began_s = perf_counter()
    name = f"{record.incarnation:x}"
    link.call(epoch.pool, "seen", SEEN, name)
    record.ping_s, record.failures = perf_counter() - began_s, link.failures
    link.run([("HSET", f"{epoch.pool}servers", name, msgspec.msgpack.encode(record))])


def drop_silent(link: RedisLink, epoch: Epoch, ttl_s: float) -> None:
    """Forget services that nobody has heard of for so long."""
    for name in link.call(epoch.pool, "silent", SEEN, int(ttl_s * 1e6)):
        link.run([("HDEL", f"{epoch.pool}servers", name), ("HDEL", f"{epoch.pool}{SEEN}", name)])


def say_gone(link: RedisLink, epoch: Epoch, incarnation: int) -> None:
    """This service ends."""
    name = f"{incarnation:x}"
    link.run([("HDEL", f"{epoch.pool}servers", name), ("HDEL", f"{epoch.pool}{SEEN}", name)])


def servers(link: RedisLink, epoch: Epoch) -> list[ServerRecord]:
    """All services of the pool."""
    (found,) = link.run([("HGETALL", f"{epoch.pool}servers")])
    return [msgspec.msgpack.decode(raw, type=ServerRecord) for _, raw in sorted(found.items())]


def health(link: RedisLink, epoch: Epoch) -> StateHealth:
    """How Redis is."""
    primaries = link.servers()
    lags = [lag for info in primaries for lag in _lags(info)]
    return StateHealth(
        url=link.url.rpartition("@")[2],
        epoch=epoch.number,
        primaries=len(primaries),
        replicas=len(lags),
        lag_bytes=max(lags, default=0),
        used_bytes=sum(int(info["used_memory"]) for info in primaries),
    )


def _lags(info: dict[str, object]) -> list[int]:
    """How many bytes each replica of a primary is behind."""
    offset = info.get("master_repl_offset", 0)
    replicas = [value for name, value in info.items() if name.startswith("slave") and isinstance(value, dict)]
    return [int(str(offset)) - int(replica.get("offset", 0)) for replica in replicas]
