"""Sizes and durations as people write them."""

import pytest

from kvpool.core.errors import UsageError
from kvpool.core.units import format_size, parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("4096", 4096),
        (4096, 4096),
        ("1B", 1),
        ("1KiB", 1024),
        ("64GiB", 64 << 30),
        ("1.5GiB", 3 << 29),
        (" 2 TiB ", 2 << 40),
        ("1kB", 1000),
        ("1MB", 10**6),
        ("2.5GB", 2_500_000_000),
    ],
)
def test_sizes_have_binary_and_decimal_units(text, size_bytes):
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["64G", "64g", "64M", "1KB", "1gib", "5 parsecs"])
def test_an_ambiguous_or_unknown_size_unit_is_refused_with_the_known_ones(text):
    with pytest.raises(UsageError, match="use one of B, KiB"):
        parse_size(text)


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1e3", "0x10", "1 2GiB", "1,5GiB", True])
def test_a_size_that_is_no_number_is_refused_with_an_example(text):
    with pytest.raises(UsageError, match="64GiB"):
        parse_size(text)


def test_a_fraction_of_a_byte_is_refused():
    with pytest.raises(UsageError, match="fraction of a byte"):
        parse_size("1.5")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("250us", 250e-6), ("200ms", 0.2), ("5s", 5.0), ("5", 5.0), (5, 5.0), (0.5, 0.5), ("5m", 300.0), ("1.5h", 5400.0)],
)
def test_durations_are_seconds_unless_they_say_otherwise(text, seconds):
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["5 min", "1w", "5S"])
def test_an_unknown_duration_unit_is_refused_with_the_known_ones(text):
    with pytest.raises(UsageError, match="use one of us, ms, s"):
        parse_duration(text)


@pytest.mark.parametrize("text", ["", "ms", "-1s", "soon", False])
def test_a_duration_that_is_no_number_is_refused_with_an_example(text):
    with pytest.raises(UsageError, match="200ms"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (64 << 30, "64 GiB"),
        (3 << 40, "3 TiB"),
        (10 << 50, "10 PiB"),
    ],
)
def test_sizes_are_shown_in_the_largest_unit_that_fits(size_bytes, text):
    assert format_size(size_bytes) == text
