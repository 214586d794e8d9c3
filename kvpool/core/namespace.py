"""Namespaces: everything that decides whether two engines' KV bytes are interchangeable.

The canonical document is JSON with sorted keys and no white space; its SHA-256 digest is the namespace id.
The service keeps the document, so that a mismatch is explained field by field and not met as a silent 0 % hit rate.
"""

import functools
import hashlib
from typing import Any

import msgspec

from kvpool.core.errors import InvalidNamespaceError
from kvpool.core.limits import BLOCK_BYTES_MAX, NAMESPACE_DOCUMENT_BYTES_MAX, SHARDS_MAX

_DIGEST_DOMAIN = b"kvpool.namespace.v1\n"
BLOCK_TOKENS_MAX = 1 << 20
DEFAULT_TENANT = "default"
"""Of namespaces that name none; a client that has proven to be of a tenant uses that one instead."""


class FieldDifference(msgspec.Struct, frozen=True):
    """One field in which two namespaces differ; a missing ``extra`` key reads as ``None``."""

    field: str
    left: Any
    right: Any

    def __str__(self) -> str:
        return f"{self.field}: {self.left!r} != {self.right!r}"


class Namespace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """A namespace document; two engines share blocks exactly when all fields are equal.

    Attributes:
        model: Model name, e.g. ``meta-llama/Llama-3.1-8B``.
        block_tokens: Tokens a block covers.
        block_bytes: KV bytes of one shard of one block; every stored block has exactly this length.
        shards: Ranks that hold different bytes of one block. A block is visible when all are committed.
        revision: Model revision or weights digest.
        quantization: Weight quantisation, as far as it changes KV bytes.
        kv_dtype: Element type of the KV cache, e.g. ``bfloat16``.
        layout: Per-group layer spec and memory layout of a block, as the connector writes it.
        hash_algorithm: Algorithm of the engine's chained block hashes.
        hash_seed: Seed of that chain (vLLM: ``PYTHONHASHSEED``).
        parallel: Parallel layout, e.g. ``tp2``.
        format_version: Version of the connector's block format.
        tenant: Owner of the blocks. Left at its default it is the caller's own, where callers are authenticated.
        epoch: Raised by an operator to forget all older blocks of the namespace.
        extra: Anything else that tells bytes apart.
    """

    model: str
    block_tokens: int
    block_bytes: int
    shards: int = 1
    revision: str = ""
    quantization: str = ""
    kv_dtype: str = ""
    layout: str = ""
    hash_algorithm: str = "sha256_cbor"
    hash_seed: str = "0"
    parallel: str = ""
    format_version: int = 1
    tenant: str = DEFAULT_TENANT
    epoch: int = 0
    extra: dict[str, str] = {}

    def __post_init__(self) -> None:
        if not self.model:
            raise InvalidNamespaceError("namespace.model is empty; name the model, e.g. model='llama-3.1-8b'")
        _check_range("block_tokens", self.block_tokens, BLOCK_TOKENS_MAX)
        _check_range("block_bytes", self.block_bytes, BLOCK_BYTES_MAX)
        _check_range("shards", self.shards, SHARDS_MAX)

    @functools.cached_property
    def document(self) -> bytes:
        """The canonical JSON document."""
        return msgspec.json.encode(self, order="sorted")

    @functools.cached_property
    def id(self) -> bytes:
        """The 32-byte digest of the document: what calls and slots name the namespace by."""
        return hashlib.sha256(_DIGEST_DOMAIN + self.document).digest()

    @functools.cached_property
    def seed(self) -> int:
        """Seed of all this namespace's checksums, so that intact bytes of another namespace fail too."""
        return int.from_bytes(self.id[:8], "little")

    def difference(self, other: "Namespace") -> list[FieldDifference]:
        """The fields in which ``other`` differs, ``extra`` key by key, in document order."""
        left, right = _flat(self), _flat(other)
        names = list(left) + [name for name in right if name not in left]
        return [
            FieldDifference(name, left.get(name), right.get(name))
            for name in names
            if left.get(name) != right.get(name)
        ]


def parse_namespace(document: bytes) -> Namespace:
    """Read a document as sent by a client.

    Raises:
        InvalidNamespaceError: Not JSON, an unknown, missing or impossible field, or too long.
    """
    _check_length(document)
    try:
        namespace = msgspec.json.decode(document, type=Namespace)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidNamespaceError(f"namespace document cannot be read: {error}") from error
    _check_length(namespace.document)  # longer by the defaults, and what others will be sent
    return namespace


def _check_length(document: bytes) -> None:
    if len(document) > NAMESPACE_DOCUMENT_BYTES_MAX:
        raise InvalidNamespaceError(
            f"namespace document of {len(document)} bytes; the limit is {NAMESPACE_DOCUMENT_BYTES_MAX}"
        )


def _check_range(field: str, value: int, maximum: int) -> None:
    if not isinstance(value, int) or not 1 <= value <= maximum:
        raise InvalidNamespaceError(f"namespace.{field} is {value!r}; it must be an integer from 1 to {maximum}")


def _flat(namespace: Namespace) -> dict[str, Any]:
    fields = msgspec.structs.asdict(namespace)
    extra = fields.pop("extra")
    return fields | {f"extra.{key}": extra[key] for key in sorted(extra)}
