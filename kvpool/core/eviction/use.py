"""What a block's past says of its future, packed into 13 bits of its row (`BlockTable.use`).

``kind`` (8 bits) is what blocks are compared by; from the highest bit: tier (3), gap (3), size (2).

- *tier*: 0 to 3: the end of a chain that was continued so many times, 3 or more; 4 to 7: a block below which chains
  branch, matched at least 1, 2, 4 or 8 times.
- *gap*: time between its last two uses, in steps of four, from under 0.25 s to 1,024 s and more; 0 in tier 0.
- *size*: blocks written together, in steps of four: under 3, 15, 63, and more.

Above them 4 bits count the matches of a branching block, and one says that the block was matched since it was written.
"""

from math import log2

KINDS = 256
TIERS, GAPS, SIZES = 8, 8, 4
BRANCHED = 4
"""The first tier of blocks below which chains branch."""

MATCHES_MAX = 15
_MATCHES_SHIFT = 8
_MATCHED = 1 << 12
_KIND_MASK = KINDS - 1
_GAP_UNIT_US = 62_500


def kind_of(use: int) -> int:
    """The block's kind."""
    return use & _KIND_MASK


def tier_of(use: int) -> int:
    """The block's tier."""
    return (use & _KIND_MASK) >> 5


def is_matched(use: int) -> bool:
    """Whether the block was matched since it was written."""
    return bool(use & _MATCHED)


def written(tier: int, gap_us: int, blocks: int) -> int:
    """The use of ``blocks`` new ones that end a chain, ``gap_us`` after it was last used."""
    gap = _gap(gap_us) if tier else 0
    return tier << 5 | gap << 2 | _size(blocks)


def continued(use: int, gap_us: int) -> int:
    """The use of the end of a chain that is matched again: it is about to be continued, or was asked for once more."""
    tier = min(tier_of(use) + 1, BRANCHED - 1)
    return _MATCHED | tier << 5 | _gap(gap_us) << 2 | use & (SIZES - 1)


def branched(use: int, gap_us: int) -> int:
    """The use of a block with other chains below it that is matched again."""
    matches = min((use >> _MATCHES_SHIFT & MATCHES_MAX) + 1, MATCHES_MAX) if tier_of(use) >= BRANCHED else 1
    tier = BRANCHED + min(3, matches.bit_length() - 1)
    return _MATCHED | matches << _MATCHES_SHIFT | tier << 5 | _gap(gap_us) << 2


def inherited(use: int, below: int) -> int:
    """The use of a block that becomes the end of its chain when the one below it goes: that of the end before."""
    return use if tier_of(use) >= BRANCHED else below


def _gap(gap_us: int) -> int:
    return min(GAPS - 1, int(log2(gap_us / _GAP_UNIT_US) / 2)) if gap_us > _GAP_UNIT_US else 0


def _size(blocks: int) -> int:
    return min(SIZES - 1, ((blocks + 1).bit_length() - 1) // 2)
