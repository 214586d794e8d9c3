"""The node's book of namespace documents: learnt once, found again after a restart, torn lines or not."""

import pytest

from kvpool.core.errors import UnknownNamespaceError
from kvpool.core.limits import NAMESPACE_DOCUMENT_BYTES_MAX
from kvpool.core.namespace import Namespace, parse_namespace
from kvpool.node.namespaces import NamespaceBook

FIRST = Namespace(model="first", block_tokens=16, block_bytes=4096)
SECOND = Namespace(model="second\n\r\u2028", block_tokens=16, block_bytes=4096, extra={"a": "\x00"})


class Service:
    """A metadata service that knows some namespaces and counts how often it is asked."""

    def __init__(self, *namespaces):
        self._documents = {namespace.id: namespace.document for namespace in namespaces}
        self.asked = 0

    def describe(self, namespace_id):
        self.asked += 1
        if namespace_id not in self._documents:
            raise UnknownNamespaceError("not open here")
        return self._documents[namespace_id]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "namespaces"


def silent_book(path):
    """A book whose service knows nothing."""
    return NamespaceBook(path, Service().describe)


def test_a_document_is_asked_for_once(path):
    service = Service(FIRST)
    book = NamespaceBook(path, service.describe)
    assert book.get(FIRST.id) is None

    book.learn(FIRST.id)
    book.learn(FIRST.id)

    assert book.get(FIRST.id) == FIRST.document
    assert service.asked == 1


def test_a_document_nobody_knows_is_not_kept(path):
    book = silent_book(path)

    with pytest.raises(UnknownNamespaceError):
        book.learn(FIRST.id)
    assert book.get(FIRST.id) is None
    assert not path.exists()


def test_a_restart_finds_every_document(path):
    book = NamespaceBook(path, Service(FIRST, SECOND).describe)
    book.learn(FIRST.id)
    book.learn(SECOND.id)

    found = silent_book(path)

    assert found.get(FIRST.id) == FIRST.document
    assert found.get(SECOND.id) == SECOND.document


@pytest.mark.parametrize("kept", [0, 1, 20, len(FIRST.document) - 1])
def test_a_line_cut_short_by_a_crash_costs_its_own_document_only(path, kept):
    service = Service(FIRST, SECOND)
    NamespaceBook(path, service.describe).learn(FIRST.id)
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.index(FIRST.document) + kept])

    NamespaceBook(path, service.describe).learn(SECOND.id)
    found = silent_book(path)

    assert found.get(FIRST.id) is None
    assert found.get(SECOND.id) == SECOND.document


@pytest.mark.parametrize("line", [b"", b"{}", b"null", b"\xff\xfe", b"[" * 5000, b'{"model": 1}', b"\0" * 4096])
def test_lines_that_are_no_documents_are_left_out(path, line):
    path.write_bytes(b"\n".join([line, FIRST.document, line, b""]))

    assert silent_book(path).get(FIRST.id) == FIRST.document


def test_the_longest_document_a_service_accepts_is_found_again(path):
    """What is learnt is the canonical document, longer than the one that was sent: both are within the limit."""
    namespace = Namespace(model="m", block_tokens=1, block_bytes=1)
    room = NAMESPACE_DOCUMENT_BYTES_MAX - len(namespace.document)
    longest = parse_namespace(
        b'{"model":"m' + b"m" * room + b'","block_tokens":1,"block_bytes":1}'
    )  # fmt: skip

    NamespaceBook(path, Service(longest).describe).learn(longest.id)

    assert len(longest.document) == NAMESPACE_DOCUMENT_BYTES_MAX
    assert silent_book(path).get(longest.id) == longest.document
