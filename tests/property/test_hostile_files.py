"""What may stand in a file or a variable: settings and namespace books that are noise, damaged, or far too deep."""

import tracemalloc
from contextlib import suppress

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.core.errors import SettingsError
from kvpool.node.namespaces import NamespaceBook
from kvpool.ops.sources import known_keys, load_settings, variable_name

from .hostile_values import NAMESPACE, SMALL, U64

GROWTH_BYTES_MAX = 1 << 20

texts = st.text(max_size=20) | st.sampled_from(
    ("-1", "0", "1e400", "nan", "0x10", "9" * 4000, "[", "{", "&a [*a]", "\0")
)
scalars = texts | st.none() | st.booleans() | st.integers(-2, U64) | st.floats() | st.binary(max_size=4) | st.dates()
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(scalars, inner, max_size=3))
sections = st.dictionaries(st.sampled_from([key.partition(".")[2] for key in known_keys()]) | texts, values, max_size=4)
documents = st.dictionaries(st.sampled_from(("meta", "node", "client", "log")) | texts, sections | values, max_size=4)


def refuses_or_reads(**sources: object) -> None:
    with suppress(SettingsError):
        load_settings(**{"environ": {}, **sources})


@given(documents.map(lambda document: yaml.dump(document).encode()) | st.binary(max_size=200))
def test_a_settings_file_is_read_or_refused(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "settings.yaml"
    path.write_bytes(content)
    refuses_or_reads(config=path)


@given(st.dictionaries(st.sampled_from([variable_name(key) for key in known_keys()]), texts, max_size=4))
def test_the_environment_is_read_or_refused(environ):
    refuses_or_reads(environ=environ)


@given(st.dictionaries(st.sampled_from(known_keys()), values, max_size=4))
def test_flags_are_read_or_refused(overrides):
    refuses_or_reads(overrides=overrides)


def test_a_settings_file_nested_without_end_is_refused(tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text("[" * 100_000)
    with pytest.raises(SettingsError, match=str(path)):
        load_settings(config=path, environ={})


lines = st.sampled_from((NAMESPACE.document, SMALL.document)) | st.binary(max_size=60) | st.just(b"[" * 20_000)


@settings(max_examples=200)
@given(st.lists(lines, max_size=6), st.integers(0, 200))
def test_a_namespace_book_has_what_is_whole_in_it_and_goes_on(tmp_path_factory, content, cut):
    path = tmp_path_factory.getbasetemp() / "book"
    data = b"".join(b"\n" + line for line in content)
    path.write_bytes(data[: len(data) - min(cut, len(data))])
    tracemalloc.start(1)
    try:
        book = NamespaceBook(path, lambda namespace_id: NAMESPACE.document)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < GROWTH_BYTES_MAX

    book.learn(NAMESPACE.id)

    again = NamespaceBook(path, lambda namespace_id: b"")
    assert again.get(NAMESPACE.id) == NAMESPACE.document
    assert again.get(SMALL.id) in (None, SMALL.document)
