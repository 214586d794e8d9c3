"""The second half of the schedules; workers take a file each."""

import pytest

from .searching import CHUNKS, try_chunk


@pytest.mark.parametrize("chunk", range(1 * CHUNKS // 2, 2 * CHUNKS // 2))
def test_promises_are_kept(chunk, tmp_path):
    try_chunk(chunk, tmp_path)
