"""Targets that read files: what an operator, a crash, or somebody with the same disk may have left in them."""

import gzip
import json
import os
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np
import xxhash
import yaml

from kvpool.bench.trace import read_trace
from kvpool.cli.asking import REQUEST_BYTES_MAX, find_where, read_hashes
from kvpool.core.errors import CapacityError, SettingsError, UsageError
from kvpool.core.limits import PAGE_BYTES
from kvpool.core.slots import SlotState
from kvpool.node.disk.headers import READ_BYTES, DiskHeaders
from kvpool.node.headers import (
    PROLOGUE_BYTES,
    RECORD_BYTES,
    HeaderFile,
    SlotHeaders,
    header_file_bytes,
    make_records,
    stored_segment_id,
)
from kvpool.node.namespaces import NamespaceBook
from kvpool.node.server import restore_slots
from kvpool.ops.pem import PEM_BYTES_MAX
from kvpool.ops.settings import Settings
from kvpool.ops.sources import effective, load_settings
from kvpool.ops.tokens import Tokens, new_token, token_digest
from tests.fuzz.target import GROWTH_BYTES_MAX, target
from tests.property.hostile_values import HASHES, NAMESPACE, SEGMENTS, SMALL

PAGES = 8
READ_WHOLE = GROWTH_BYTES_MAX + PEM_BYTES_MAX
"""For what asks a file for as much as it may have: Python takes so much memory first."""

TRACE = [
    {"timestamp": 0, "input_length": 40, "output_length": 1, "hash_ids": [1, 2, 3]},
    {"timestamp": 5.5, "input_length": 16, "output_length": 1, "hash_ids": [1]},
]


@cache
def folder(process: int) -> Path:
    """Of this process alone; whoever runs targets clears the folder for temporary ones away."""
    return Path(tempfile.mkdtemp(prefix="files-"))


def written(name: str, data: bytes) -> Path:
    path = folder(os.getpid()) / name
    path.write_bytes(data)
    path.chmod(0o600)
    return path


def header_files() -> list[bytes]:
    path = folder(os.getpid()) / "headers.seed"
    path.unlink(missing_ok=True)
    file = HeaderFile(path, SEGMENTS[0], PAGES)
    records = make_records(
        3, length=2 * PAGE_BYTES, generation=[1, 2, 3], namespace=NAMESPACE.id, hash=b"".join(HASHES[:3]), checksum=7
    )
    headers = SlotHeaders(np.array((0, 2, 4), np.uint32), records)
    file.write(headers.select(slice(2)), SlotState.COMMITTED)
    file.write(headers.select(slice(2, 3)), SlotState.WRITING)
    file.close()
    content = path.read_bytes()
    return [bytes([way]) + content for way in range(4)]


def sealed(content: bytes) -> bytes:
    """Headers whose checksums are right, whatever else they say: those of somebody who knows how they are made."""
    data = bytearray(content)
    for start in range(PROLOGUE_BYTES, len(data) - RECORD_BYTES + 1, RECORD_BYTES):
        digest = xxhash.xxh3_64_intdigest(bytes(data[start + 4 : start + RECORD_BYTES - 8]))
        data[start + RECORD_BYTES - 8 : start + RECORD_BYTES] = digest.to_bytes(8, "little")
    return bytes(data)


@target(header_files, GROWTH_BYTES_MAX + READ_BYTES)
def slot_headers(data: bytes) -> None:
    way, content = data[:1], data[1:]
    path = written("headers", sealed(content) if way and way[0] & 1 else content)
    on_disk = way and way[0] & 2
    segment_id = stored_segment_id(path, PAGES)
    assert segment_id is None or len(content) == header_file_bytes(PAGES)
    with suppress(CapacityError):
        if on_disk:
            file: HeaderFile = DiskHeaders(path, SEGMENTS[0], PAGES, lambda error: None)
        else:
            file = HeaderFile(path, SEGMENTS[0], PAGES)
        try:
            slots = restore_slots(file, PAGES)
            slots.check_integrity()
            described = file.scan(SlotState.COMMITTED)
            committed = [slot for slot in slots if slot.state == SlotState.COMMITTED]
            assert described.named() == sorted((slot.page, slot.generation) for slot in committed)
            assert sum(len(part) for part in described.by_namespace()) == len(described)
        finally:
            file.close()


@target(lambda: [b"\n" + NAMESPACE.document + b"\n" + SMALL.document, b"\n" + NAMESPACE.document[:-9]])
def namespace_book(data: bytes) -> None:
    path = written("namespaces", data)
    book = NamespaceBook(path, lambda namespace_id: NAMESPACE.document)
    book.learn(NAMESPACE.id)
    assert NamespaceBook(path, lambda namespace_id: b"").get(NAMESPACE.id) is not None


def settings_files() -> list[bytes]:
    whole = {}
    for key, value, _ in effective(Settings()):
        section, name = key.split(".")
        whole.setdefault(section, {})[name] = value
    return [yaml.safe_dump(whole).encode(), b"meta: {grpc_port: 7300}\nlog: {level: debug}\n"]


@target(settings_files)
def settings_file(data: bytes) -> None:
    with suppress(SettingsError):
        effective(load_settings(config=written("settings.yaml", data), environ={}))


def traces() -> list[bytes]:
    plain = b"".join(json.dumps(line).encode() + b"\n" for line in TRACE)
    return [plain, gzip.compress(plain, mtime=0)]


@target(traces)
def trace(data: bytes) -> None:
    with suppress(UsageError):
        workload = read_trace(written("trace", data))
        assert all(len(request.hashes) * workload.block_tokens <= request.input_tokens for request in workload.requests)


@target(lambda: [f"{token_digest(new_token())} kvpool://client/acme/engine # a comment\n\n".encode()], READ_WHOLE)
def tokens_file(data: bytes) -> None:
    with suppress(SettingsError):
        Tokens(written("tokens", data))


@target(
    lambda: [
        "\n".join(block_hash.hex() for block_hash in HASHES).encode(),
        json.dumps([block_hash.hex() for block_hash in HASHES]).encode(),
        NAMESPACE.document,
    ],
    READ_WHOLE + 4 * REQUEST_BYTES_MAX,
)
def explained_request(data: bytes) -> None:
    path = str(written("request", data))
    with suppress(UsageError):
        assert all(len(block_hash) == len(HASHES[0]) for block_hash in read_hashes(None, path))
    with suppress(UsageError):
        find_where(path, {})
