"""The exceptions kvpool raises. Misses, time-outs and partial loads are values, not exceptions.

KvpoolError
├── UsageError              the caller's mistake; retrying cannot help
│   ├── InvalidHashError        a hash of the wrong length, or an empty or oversized batch
│   ├── InvalidBufferError      too small, read-only, not contiguous
│   ├── InvalidNamespaceError   a document that cannot name a namespace
│   ├── NamespaceMismatchError  a block size, shard or chain that is not the namespace's
│   ├── ClosedError             use after close()
│   ├── ForbiddenError          the caller is known, and may not do that
│   └── SettingsError           a setting that cannot be: names the key, the value and the fix
├── UnavailableError        the pool cannot be reached now; retrying may help
│   ├── AuthenticationError     somebody does not prove who it is, or is not who it should be
│   ├── DeadlineError           the call's deadline ran out
│   ├── OverloadedError         the peer is there, and has too much to do: try later
│   └── StaleGrantError         a read grant that has run out, or is of an older session: locate again
├── ProtocolError           the peer sent what the wire contract does not allow; the connection is closed
├── UnknownNamespaceError   the service does not know the namespace (it restarted): open it again
└── CapacityError           memory that cannot be had: segment too large, limits reached
    └── QuotaError              a tenant has all that it may have; names the quota and who raises it
"""

__all__ = [
    "AuthenticationError",
    "CapacityError",
    "ClosedError",
    "DeadlineError",
    "ForbiddenError",
    "InvalidBufferError",
    "InvalidHashError",
    "InvalidNamespaceError",
    "KvpoolError",
    "NamespaceMismatchError",
    "OverloadedError",
    "ProtocolError",
    "QuotaError",
    "SettingsError",
    "StaleGrantError",
    "UnavailableError",
    "UnknownNamespaceError",
    "UsageError",
]


class KvpoolError(Exception):
    """Root of everything kvpool raises on purpose."""


class UsageError(KvpoolError, ValueError):
    """The call itself is wrong; the message names the value and the fix."""


class InvalidHashError(UsageError):
    """Block hashes that cannot be looked up."""


class InvalidBufferError(UsageError):
    """A buffer that cannot hold, or cannot give, a block's bytes."""


class InvalidNamespaceError(UsageError):
    """A namespace document with a missing or impossible field."""


class NamespaceMismatchError(UsageError):
    """The call does not fit the namespace it names."""


class ClosedError(UsageError):
    """The client, node or service was closed before the call."""


class ForbiddenError(UsageError):
    """The caller's role, or its tenant, may not do what it asked for; another certificate or token may."""


class SettingsError(UsageError):
    """A setting that cannot be used; raised before anything starts."""


class UnavailableError(KvpoolError):
    """A peer cannot be reached; the data path turns this into misses."""


class AuthenticationError(UnavailableError):
    """A caller or a server whose certificate or token is missing, not believed, or another's; renewed ones may help."""


class DeadlineError(UnavailableError):
    """The call did not end within its deadline."""


class OverloadedError(UnavailableError):
    """The peer refuses calls beyond its limit; it did nothing, and may do it later."""


class StaleGrantError(UnavailableError):
    """A read grant that opens nothing any more: the client locates the blocks again; its caller sees a miss at most."""


class StateAwayError(UnavailableError):
    """The state that several services share cannot be asked now, or is not the one that was asked."""


class StateFaultError(UnavailableError):
    """A function of the shared state failed, which none should."""


class ProtocolError(KvpoolError):
    """A peer broke the wire contract; its connection must not be used again."""


class UnknownNamespaceError(KvpoolError):
    """The service has not seen this namespace's document since it started."""


class CapacityError(KvpoolError):
    """Memory or a table limit that cannot be provided; the message names the limit and how to raise it."""


class QuotaError(CapacityError):
    """A tenant's quota is used up; the message names it and the fix."""
