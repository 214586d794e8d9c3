"""Callers' buffers: everything with contiguous bytes is taken as it is, everything else refused with its name."""

import array
import ctypes
import sys

import numpy as np
import pytest

from kvpool.client.buffers import PIECES_MAX, blocks_of
from kvpool.core.errors import InvalidBufferError

BLOCK_BYTES = 16

WRITABLE = {
    "bytearray": lambda: bytearray(BLOCK_BYTES),
    "memoryview": lambda: memoryview(bytearray(BLOCK_BYTES)),
    "array": lambda: array.array("d", [0, 0]),
    "ctypes bytes": ctypes.c_ubyte * BLOCK_BYTES,
    "ctypes structs": ctypes.c_int64 * 2,
    "numpy slice": lambda: np.zeros((4, BLOCK_BYTES), np.uint8)[2],
    "numpy 3-d": lambda: np.zeros((2, 2, 2), np.float16),
    "numpy 0-d": lambda: np.zeros((), np.complex128),
    "numpy big-endian": lambda: np.zeros(4, ">i4"),
    "numpy records": lambda: np.zeros(2, [("a", "i4"), ("b", "f4")]),
    "numpy dates": lambda: np.zeros(2, "M8[s]"),
}
DTYPES = ["uint8", "int8", "bool", "float16", "float32", "int64", "complex64", "S16", "U4", "V16", "M8[us]", "m8[s]"]


def pieces_of(buffers, *, writable):
    blocks = blocks_of(buffers, BLOCK_BYTES, writable=writable)
    return [blocks.pieces(i) for i in range(len(blocks))]


def type_name(value):
    return type(value).__name__


def loaded_into(*buffers):
    return pieces_of(buffers, writable=True)


def refusal(buffer, *, writable=True):
    """Of a buffer that is the second of a list."""
    with pytest.raises(InvalidBufferError) as caught:
        pieces_of([bytearray(BLOCK_BYTES), buffer], writable=writable)
    return str(caught.value)


def refusal_of_all(buffers, *, writable=True):
    """Of one buffer for all blocks."""
    with pytest.raises(InvalidBufferError) as caught:
        pieces_of(buffers, writable=writable)
    return str(caught.value)


@pytest.mark.parametrize("kind", WRITABLE)
def test_writing_the_piece_writes_the_callers_memory(kind):
    buffer = WRITABLE[kind]()

    [[piece]] = loaded_into(buffer)
    piece[:] = bytes(range(BLOCK_BYTES))

    assert (piece.format, piece.ndim, len(piece)) == ("B", 1, BLOCK_BYTES)
    copied = buffer.tobytes() if isinstance(buffer, np.ndarray) else bytes(memoryview(buffer).cast("B"))
    assert copied == bytes(range(BLOCK_BYTES))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bytes_of_every_dtype_can_be_stored(dtype):
    whole = np.frombuffer(bytes(range(BLOCK_BYTES)), np.uint8)
    buffer = whole.view(dtype)

    assert pieces_of([buffer], writable=False) == [[whole.tobytes()]]
    assert pieces_of(buffer, writable=False) == [[whole.tobytes()]]


@pytest.mark.parametrize("buffer", [bytes(BLOCK_BYTES), memoryview(bytes(BLOCK_BYTES))], ids=["bytes", "memoryview"])
def test_read_only_memory_can_be_stored_from_but_not_loaded_into(buffer):
    assert pieces_of([buffer], writable=False) == [[buffer]]
    assert pieces_of(buffer, writable=False) == [[buffer]]
    assert refusal_of_all(buffer) == "buffers is read-only; a load needs a writable buffer"
    assert refusal(buffer) == "buffers[1] is read-only; a load needs a writable buffer"


@pytest.mark.parametrize("dtype", ["uint8", "float32", "M8[s]"])
def test_a_read_only_array_cannot_be_loaded_into(dtype):
    buffer = np.zeros(BLOCK_BYTES, np.uint8).view(dtype)
    buffer.flags.writeable = False

    assert "buffers[1] is read-only" in refusal(buffer)


@pytest.mark.parametrize(
    "buffer",
    [
        np.zeros(2 * BLOCK_BYTES, np.uint8)[::2],
        np.zeros((4, 8), np.uint8)[:, :4],
        np.asfortranarray(np.zeros((4, 4), np.uint8)),
        np.zeros(8, np.float32)[::2],
        np.zeros(4, "M8[s]")[::2],
        memoryview(bytearray(2 * BLOCK_BYTES))[::2],
        np.zeros(BLOCK_BYTES, np.uint8)[::-1],
    ],
    ids=["every other", "columns", "Fortran order", "every other float", "every other date", "view", "backwards"],
)
def test_scattered_memory_is_refused_with_the_fix(buffer):
    assert refusal(buffer) == "buffers[1] is not contiguous; give its contiguous pieces as a list"
    assert refusal_of_all(buffer) == "buffers is not contiguous; give its contiguous pieces as a list"


@pytest.mark.parametrize("sequence", [list, tuple])
def test_a_block_may_lie_in_pieces(sequence):
    first, second = bytearray(5), np.zeros(11, np.uint8)

    [pieces] = loaded_into(sequence([first, second]))
    pieces[0][:], pieces[1][:] = b"first", b"second half"

    assert (first, second.tobytes()) == (b"first", b"second half")


@pytest.mark.parametrize("form", ["2-d", "list", "flat"])
def test_an_array_of_blocks_is_written_block_by_block(form):
    array = np.zeros((3, BLOCK_BYTES), np.uint8)
    buffers = {"2-d": array, "list": list(array), "flat": array.reshape(-1)}[form]

    for i, [piece] in enumerate(pieces_of(buffers, writable=True)):
        piece[:] = bytes([i]) * BLOCK_BYTES

    assert [[i] * BLOCK_BYTES for i in range(3)] == array.tolist()


def test_blocks_side_by_side_are_known_to_be():
    assert blocks_of(np.zeros((3, 4), np.float32), BLOCK_BYTES, writable=True).whole is not None
    assert blocks_of([bytearray(BLOCK_BYTES)], BLOCK_BYTES, writable=True).whole is None


@pytest.mark.parametrize("chosen", [[0], [1, 2], [0, 2], [0, 1, 2]], ids=str)
@pytest.mark.parametrize("in_list", [False, True])
def test_some_blocks_are_selected_in_their_order(in_list, chosen):
    whole = bytes(range(3 * BLOCK_BYTES))
    each = [whole[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES] for i in range(3)]

    blocks = blocks_of(each if in_list else whole, BLOCK_BYTES, writable=False).select(chosen)

    assert [b"".join(blocks.pieces(i)) for i in range(len(blocks))] == [each[i] for i in chosen]


def test_one_buffer_that_is_no_number_of_blocks_is_refused():
    shown = f"buffers has {3 * BLOCK_BYTES + 1} bytes, not a multiple of the namespace's {BLOCK_BYTES} (block_bytes)"

    assert refusal_of_all(bytearray(3 * BLOCK_BYTES + 1)) == shown


@pytest.mark.parametrize("buffers", [[], (), bytearray(), np.zeros((0, BLOCK_BYTES), np.uint8)], ids=type_name)
def test_no_buffers_are_no_blocks(buffers):
    assert len(blocks_of(buffers, BLOCK_BYTES, writable=True)) == 0


@pytest.mark.parametrize("size_bytes", [0, BLOCK_BYTES - 1, BLOCK_BYTES + 1])
def test_another_length_is_refused_with_both_lengths(size_bytes):
    shown = f"buffers[1] has {size_bytes} bytes; the namespace's blocks have {BLOCK_BYTES} (block_bytes)"

    assert refusal(bytearray(size_bytes)) == shown
    assert refusal([bytearray(size_bytes), b""], writable=False) == shown


def test_an_empty_array_of_many_dimensions_is_refused_like_an_empty_one():
    assert refusal(np.zeros((0, 4), np.float32)).startswith("buffers[1] has 0 bytes")


@pytest.mark.parametrize("count", [0, PIECES_MAX + 1])
def test_a_block_without_pieces_or_with_too_many_is_refused(count):
    assert refusal([b""] * count) == f"buffers[1] has {count} pieces; give from 1 to {PIECES_MAX}"


@pytest.mark.parametrize("buffer", [None, 1, "text", object(), [1, 2], [None], {"a": 1}], ids=type_name)
def test_what_has_no_bytes_is_refused_by_its_type(buffer):
    culprit = buffer[0] if isinstance(buffer, list) else buffer

    assert f"buffers[1] is {type(culprit).__name__}, which has no buffer" in refusal(buffer)
    if not isinstance(buffer, list):
        assert f"buffers is {type(culprit).__name__}, which has no buffer" in refusal_of_all(buffer)


@pytest.mark.parametrize("writable", [True, False])
@pytest.mark.parametrize("dtype", [object, [("a", object), ("b", "i8")]], ids=["objects", "records with objects"])
def test_arrays_of_objects_are_refused_since_their_bytes_are_addresses(writable, dtype):
    buffer = np.zeros(1 if isinstance(dtype, list) else 2, dtype)

    assert "Python objects" in refusal(buffer, writable=writable)
    assert "Python objects" in refusal_of_all(buffer, writable=writable)


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="torch is not installed: CPU tensors are tested where it is")


def test_a_tensor_of_any_dtype_shares_its_memory(torch):
    for dtype in (torch.bfloat16, torch.float32, torch.uint8):
        tensor = torch.zeros(BLOCK_BYTES // dtype.itemsize, dtype=dtype, requires_grad=dtype.is_floating_point)

        [[piece]] = loaded_into(tensor)
        piece[:] = bytes(range(BLOCK_BYTES))

        assert bytes(tensor.detach().view(torch.uint8).tolist()) == bytes(range(BLOCK_BYTES))


def test_a_tensor_that_is_scattered_or_elsewhere_is_refused(torch):
    assert "not contiguous" in refusal(torch.zeros(4, 4).t())
    assert "is on meta; only CPU tensors" in refusal(torch.zeros(4, device="meta"))


def test_torch_is_not_imported_for_those_who_do_not_have_it():
    before = "torch" in sys.modules
    refusal(object())

    assert ("torch" in sys.modules) == before
