"""Namespaces: which engines' blocks are interchangeable, and how a mismatch is explained."""

import msgspec
import pytest

from kvpool.core.errors import InvalidNamespaceError
from kvpool.core.limits import BLOCK_BYTES_MAX, NAMESPACE_DOCUMENT_BYTES_MAX, SHARDS_MAX
from kvpool.core.namespace import FieldDifference, Namespace, parse_namespace

BASE = {"model": "demo", "block_tokens": 16, "block_bytes": 65536}
OTHER_VALUES = {
    "model": "other",
    "block_tokens": 32,
    "block_bytes": 4096,
    "shards": 2,
    "revision": "v2",
    "quantization": "fp8",
    "kv_dtype": "bfloat16",
    "layout": "layer-first",
    "hash_algorithm": "sha256",
    "hash_seed": "7",
    "parallel": "tp2",
    "format_version": 2,
    "tenant": "acme",
    "epoch": 1,
    "extra": {"lora": "a"},
}


def test_the_document_is_canonical_json():
    document = Namespace(**BASE, extra={"b": "2", "a": "1"}).document

    assert document == msgspec.json.encode(msgspec.json.decode(document), order="sorted")
    assert b'"extra":{"a":"1","b":"2"}' in document
    assert b" " not in document


def test_the_id_does_not_depend_on_how_the_document_was_written():
    namespace = Namespace(**BASE)
    spread = b'{ "block_bytes": 65536,\n "model": "demo", "block_tokens": 16 }'

    assert parse_namespace(spread) == namespace
    assert parse_namespace(spread).id == parse_namespace(namespace.document).id == namespace.id
    assert len(namespace.id) == 32


def test_every_field_tells_namespaces_apart():
    base = Namespace(**BASE)

    assert set(OTHER_VALUES) == {field.name for field in msgspec.structs.fields(Namespace)}
    for field, value in OTHER_VALUES.items():
        other = Namespace(**BASE | {field: value})
        assert other.id != base.id, field
        assert other.seed != base.seed, field


def test_a_difference_names_the_field_and_both_values():
    left, right = Namespace(**BASE), Namespace(**BASE | {"kv_dtype": "fp8", "epoch": 3})

    assert left.difference(right) == [FieldDifference("kv_dtype", "", "fp8"), FieldDifference("epoch", 0, 3)]
    assert str(left.difference(right)[1]) == "epoch: 0 != 3"
    assert left.difference(left) == []


def test_extra_is_compared_key_by_key():
    left, right = Namespace(**BASE, extra={"a": "1", "b": "2"}), Namespace(**BASE, extra={"b": "3", "c": "4"})

    assert left.difference(right) == [
        FieldDifference("extra.a", "1", None),
        FieldDifference("extra.b", "2", "3"),
        FieldDifference("extra.c", None, "4"),
    ]


def test_namespaces_do_not_share_their_extra():
    assert Namespace(**BASE).extra is not Namespace(**BASE).extra


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_tokens", 0),
        ("block_tokens", -1),
        ("block_bytes", 0),
        ("block_bytes", BLOCK_BYTES_MAX + 1),
        ("block_bytes", "64KiB"),
        ("block_bytes", 4096.0),
        ("shards", 0),
        ("shards", SHARDS_MAX + 1),
    ],
)
def test_an_impossible_number_is_refused_with_field_value_and_range(field, value):
    with pytest.raises(InvalidNamespaceError, match=rf"namespace\.{field} is {value!r}; it must be an integer from 1"):
        Namespace(**BASE | {field: value})


def test_a_namespace_has_a_model():
    with pytest.raises(InvalidNamespaceError, match=r"namespace\.model is empty"):
        Namespace(**BASE | {"model": ""})


@pytest.mark.parametrize(
    "document",
    [
        b"",
        b"not json",
        b"[]",
        b"\xff\xfe",
        b'{"model":"demo","block_tokens":16}',
        b'{"model":"demo","block_tokens":16,"block_bytes":65536,"colour":"red"}',
        b'{"model":"demo","block_tokens":"16","block_bytes":65536}',
        b'{"model":"demo","block_tokens":16,"block_bytes":65536,"shards":0}',
        b'{"model":"","block_tokens":16,"block_bytes":65536}',
        b"[" * 10_000,
    ],
)
def test_a_document_that_is_no_namespace_is_refused(document):
    with pytest.raises(InvalidNamespaceError, match="cannot be read"):
        parse_namespace(document)


def test_an_oversized_document_is_refused_unread():
    document = b" " * (NAMESPACE_DOCUMENT_BYTES_MAX + 1)

    with pytest.raises(InvalidNamespaceError, match=f"{len(document)} bytes; the limit is"):
        parse_namespace(document)
