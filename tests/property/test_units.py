"""Sizes survive being shown and read again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.core.units import format_size, parse_size


@given(st.integers(0, 1 << 60))
def test_a_shown_size_reads_as_itself_to_four_digits(size_bytes):
    assert parse_size(format_size(size_bytes)) == pytest.approx(size_bytes, rel=1e-3)


@given(st.integers(0, 1 << 50), st.sampled_from([("KiB", 10), ("MiB", 20), ("GiB", 30), ("TiB", 40)]))
def test_a_whole_number_of_units_is_exact(count, unit):
    name, shift = unit

    assert parse_size(f"{count}{name}") == count << shift
