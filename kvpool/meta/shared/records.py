"""What is said of a shared state, and of the services that work with it."""

from dataclasses import dataclass

import msgspec


class ServerRecord(msgspec.Struct, array_like=True):
    """One service: ``ping_s`` is how long Redis takes to answer it, ``failures`` how often it did not."""

    incarnation: int
    address: str
    version: str
    ping_s: float = 0.0
    failures: int = 0


@dataclass(frozen=True, slots=True)
class StateHealth:
    """The shared state, now.

    Attributes:
        url: Where, without passwords.
        epoch: Its number.
        primaries: Servers that hold it.
        replicas: Servers that follow them.
        lag_bytes: How far the last of these is behind.
        used_bytes: Memory of all primaries.
    """

    url: str
    epoch: int
    primaries: int
    replicas: int
    lag_bytes: int
    used_bytes: int
