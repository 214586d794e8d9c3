"""Targets that are one function: bytes or text in, a value that survives the way or an error of ours out."""

import base64
import hashlib
import tempfile
import warnings
from contextlib import suppress
from functools import cache
from pathlib import Path

import msgspec
from cryptography.utils import CryptographyDeprecationWarning

from kvpool.core.errors import (
    AuthenticationError,
    InvalidNamespaceError,
    ProtocolError,
    SettingsError,
    StaleGrantError,
    UsageError,
)
from kvpool.core.grants import TAG_BYTES, Grant, open_grant, seal
from kvpool.core.identities import client_identity, node_identity, operator_identity, principal_of_identity
from kvpool.core.limits import RESERVE_BLOCKS_MAX
from kvpool.core.namespace import parse_namespace
from kvpool.core.principals import Role
from kvpool.core.read_grants import ReadGrant, open_read_grant, seal_read_grant
from kvpool.core.units import parse_duration, parse_size
from kvpool.ops.addresses import split_address
from kvpool.ops.certificates import check_leaf, identity_in, parse_pem
from kvpool.ops.issuing import Authority
from kvpool.transport.ucx import messages as ucx_messages
from kvpool.transport.wire.frame import Header, pack_header, parse_header
from kvpool.transport.wire.messages import KINDS, NodeGrant, NodeInfo, ReadGrants, SegmentInfo, Topology, decode, encode
from tests.fuzz.target import target
from tests.property.hostile_values import NAMESPACE, SMALL, UNKNOWN
from tests.property.test_hostile_node import KEY, SOUND

assert ucx_messages  # its messages are in KINDS


@target(lambda: [pack_header(Header(kind, 7, 1000, 64, 4096)) for kind in (2, 10, 32, 39)])
def frame_header(data: bytes) -> None:
    with suppress(ProtocolError):
        assert pack_header(parse_header(data)) == data


def examples() -> list[bytes]:
    """A message of every kind, whose fields are the plainest ones, behind two bytes of its number."""
    node = NodeInfo("n0", 1, "ready", ["tcp://127.0.0.1:1"], [SegmentInfo(0, b"0" * 16, "shm", 4096)])
    plainest = {
        int: 1,
        bytes: bytes(32),
        str: "demo",
        bool: True,
        Topology | None: Topology(1, [node]),
        ReadGrants | None: ReadGrants(1, [NodeGrant(1, bytes(64))]),
    }
    made = []
    for kind in KINDS.values():
        values = [plainest.get(field.type, []) for field in msgspec.structs.fields(kind)]
        made.append(kind.kind.to_bytes(2, "little") + encode(kind(*values)))
    return made


@target(examples)
def message(data: bytes) -> None:
    kind, body = int.from_bytes(data[:2], "little"), data[2:]
    with suppress(ProtocolError):
        read = decode(kind, body)
        assert type(read) is KINDS[kind]
        assert decode(kind, encode(read)) == read


@target(lambda: [seal(Grant(**SOUND), KEY)[:-TAG_BYTES]])
def grant(data: bytes) -> None:
    with suppress(ProtocolError):
        open_grant(data, KEY)
        raise AssertionError("it opened what was not sealed")
    with suppress(ProtocolError):
        read = open_grant(data + hashlib.blake2b(data, key=KEY, digest_size=TAG_BYTES).digest(), KEY)
        assert 1 <= read.count <= RESERVE_BLOCKS_MAX
        assert all(slot >= 0 and generation >= 0 for slot, generation in read.victims())
        assert open_grant(seal(read, KEY), KEY) == read


@target(lambda: [seal_read_grant(ReadGrant(1, 2, bytes(32), 60_000), KEY)[:-TAG_BYTES]])
def read_grant(data: bytes) -> None:
    with suppress(StaleGrantError):
        open_read_grant(data, KEY)
        raise AssertionError("it opened what was not sealed")
    with suppress(StaleGrantError):
        tag = hashlib.blake2b(data, key=KEY, digest_size=TAG_BYTES, person=b"kvpool.read").digest()
        read = open_read_grant(data + tag, KEY)
        assert open_read_grant(seal_read_grant(read, KEY), KEY) == read


@target(lambda: [namespace.document for namespace in (NAMESPACE, SMALL, UNKNOWN)])
def namespace_document(data: bytes) -> None:
    with suppress(InvalidNamespaceError):
        read = parse_namespace(data)
        assert parse_namespace(read.document) == read
        assert parse_namespace(read.document).id == read.id


@target(
    lambda: [
        client_identity("acme", "engine/1").encode(),
        node_identity("node 1").encode(),
        operator_identity(Role.ADMIN, "é").encode(),
    ]
)
def identity(data: bytes) -> None:
    with suppress(AuthenticationError):
        holder = principal_of_identity(data.decode(errors="replace"))
        [role] = holder.roles - {Role.OBSERVER} or {Role.OBSERVER}
        if role == Role.CLIENT:
            again = client_identity(holder.tenant, holder.name)
        else:
            again = node_identity(holder.name) if role == Role.NODE else operator_identity(role, holder.name)
        with suppress(AuthenticationError):  # encoded it may be longer than any may be
            assert principal_of_identity(again) == holder


ELLIPTIC_CURVE = bytes.fromhex("2a8648ce3d0201")
"""The name of that kind of key, 1.2.840.10045.2.1."""

V3 = bytes.fromhex("a003020102")
"""How a certificate says of which version it is."""


@cache
def pki() -> tuple[bytes, bytes, bytes]:
    """A certificate as `kvpool certs` makes them, its key, and its CA."""
    with tempfile.TemporaryDirectory() as folder:
        Authority(Path(folder) / "ca", 1).issue("node", "kvpool://node/n0", renew=False)
        cert, key, ca = ((Path(folder) / "ca" / name).read_bytes() for name in ("node.pem", "node-key.pem", "ca.pem"))
        return cert, key, ca


def changed(pem: bytes, name: bytes) -> bytes:
    """The file with the last bit of ``name`` in it turned: a kind, or a version, that nobody knows."""
    head, *lines, foot = pem.splitlines()
    der = bytearray(base64.b64decode(b"".join(lines)))
    der[der.index(name) + len(name) - 1] ^= 1
    return b"\n".join((head, base64.encodebytes(der), foot))


@target(lambda: [*pki(), changed(pki()[1], ELLIPTIC_CURVE), *(changed(pki()[0], x) for x in (ELLIPTIC_CURVE, V3))])
def certificate(data: bytes) -> None:
    path = Path("file.pem")
    warnings.simplefilter("ignore", CryptographyDeprecationWarning)  # it says what it will refuse some day
    with suppress(SettingsError):
        for read in parse_pem(path, data):
            with suppress(SettingsError):
                assert identity_in(path, read).startswith("kvpool://")
    for place in range(3):  # in the place of the certificate, of its key, and of the CA
        files = [(path, data if i == place else sound) for i, sound in enumerate(pki())]
        with suppress(SettingsError):
            assert check_leaf(*files).identity == "kvpool://node/n0"


@target(lambda: [b"127.0.0.1:7300", b"[::1]:0", b"4GiB", b"200ms", b"1.5m", b"0x10"])
def text(data: bytes) -> None:
    said = data.decode(errors="replace")
    with suppress(SettingsError):
        _, port = split_address(said)
        assert 0 <= port <= 65_535
    with suppress(UsageError):
        assert parse_size(said) >= 0
    with suppress(UsageError):
        assert parse_duration(said) >= 0
