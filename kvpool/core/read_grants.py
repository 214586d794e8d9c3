"""Read grants: what the metadata service allows a client to read on one node, sealed for that node.

A grant is for all blocks of one namespace on one node, so that a client needs one for each of its nodes and not one for
each block. The client carries it as opaque bytes with every read; the node opens it with the key of its current
session. It runs out: its end is counted from the beginning of the session, on the clock of whoever looks, since both
sides saw that beginning and no clock has to agree with another. Format: msgpack array of the fields in order, then a
16-byte BLAKE2b tag keyed with the session's key, apart from that of write grants.
"""

import hashlib
import hmac

import msgspec

from kvpool.core.errors import StaleGrantError
from kvpool.core.grants import TAG_BYTES
from kvpool.core.limits import NAMESPACE_ID_BYTES

READ_GRANT_S = 60.0
"""How long a grant opens anything."""

RENEWED_S = 20.0
"""How often grants are made anew: whoever has just located blocks has one with so much less than its whole time."""

READ_GRANT_BYTES_MAX = 256
"""Longest grant that a node looks at."""

_PERSON = b"kvpool.read"


class ReadGrant(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a read grant says.

    Attributes:
        incarnation: The metadata service that gave it.
        session: The node session it was given for.
        namespace: Namespace id.
        until_ms: When it runs out, in milliseconds from the beginning of the session.
    """

    incarnation: int
    session: int
    namespace: bytes
    until_ms: int


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(ReadGrant)


def seal_read_grant(grant: ReadGrant, key: bytes) -> bytes:
    """The grant as bytes that only holders of ``key`` can make."""
    body = _ENCODER.encode(grant)
    return body + _tag(body, key)


def open_read_grant(sealed: bytes, key: bytes) -> ReadGrant:
    """The grant in ``sealed``; raises StaleGrantError for one not sealed with ``key``: an older one, or a forgery."""
    body, tag = sealed[:-TAG_BYTES], sealed[-TAG_BYTES:]
    if len(sealed) > READ_GRANT_BYTES_MAX or not hmac.compare_digest(_tag(body, key), tag):
        raise StaleGrantError("the read grant is not of this node's current session; locate again")
    try:
        grant = _DECODER.decode(body)
    except msgspec.DecodeError as error:
        raise StaleGrantError(f"the read grant cannot be read: {error}; locate again") from error
    if len(grant.namespace) != NAMESPACE_ID_BYTES:
        raise StaleGrantError("the read grant names no namespace; locate again")
    return grant


def _tag(body: bytes, key: bytes) -> bytes:
    return hashlib.blake2b(body, key=key, digest_size=TAG_BYTES, person=_PERSON).digest()
