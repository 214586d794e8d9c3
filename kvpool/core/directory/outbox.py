"""Orders from the directory to a node: free this slot, fetch these blocks. Numbered, so that none is lost.

Orders to free travel twice: in the write grant that needs the room, and in order on the node's control stream. Applying
one again is harmless, since it names the slot's generation. A returning node states the last number it applied; what it
still announces of the orders after that is ignored: a freed block is never resurrected. A later order for the same slot
takes an earlier one's place, so that a node that acknowledges nothing has no more of them than slots. An order to fetch
names a copy (`copies.py`), which ends with the node's session: brought again after that it means nothing.
"""

from collections import OrderedDict
from itertools import islice
from typing import NamedTuple


class FreeSlot(NamedTuple):
    """Order ``number``: free ``slot`` of ``segment_id`` if it still holds ``generation``.

    ``rest`` asks for quarantine first: the block was removed by force while a reader may hold a lease on it.
    """

    number: int
    segment_id: bytes
    slot: int
    generation: int
    rest: bool


class FetchBlocks(NamedTuple):
    """Order ``number``: fetch the blocks of the open copy ``copy``."""

    number: int
    copy: int


Order = FreeSlot | FetchBlocks


class Outbox:
    """Orders to one node that it has not acknowledged."""

    def __init__(self) -> None:
        self.last_number = 0
        self._pending: OrderedDict[int, Order] = OrderedDict()
        self._slots: dict[tuple[bytes, int], FreeSlot] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def push(self, segment_id: bytes, slot: int, generation: int, *, rest: bool) -> FreeSlot:
        """Queue an order and return it with its number."""
        self.last_number += 1
        order = FreeSlot(self.last_number, segment_id, slot, generation, rest)
        former = self._slots.get((segment_id, slot))
        if former is not None:
            del self._pending[former.number]  # the slot was used again since: whoever did freed it first
        self._pending[order.number] = order
        self._slots[segment_id, slot] = order
        return order

    def push_copy(self, copy: int) -> FetchBlocks:
        """Queue an order to fetch and return it with its number."""
        self.last_number += 1
        order = FetchBlocks(self.last_number, copy)
        self._pending[order.number] = order
        return order

    def acknowledge(self, number: int) -> None:
        """The node has applied all orders up to ``number``."""
        while self._pending and next(iter(self._pending)) <= number:
            _, order = self._pending.popitem(last=False)
            if isinstance(order, FreeSlot):
                del self._slots[order.segment_id, order.slot]

    def pending(self, after: int, most: int) -> list[Order]:
        """Up to ``most`` unacknowledged orders with numbers above ``after``, in order."""
        oldest = next(iter(self._pending), self.last_number + 1)
        start = max(after + 1, oldest)
        numbers = (number for number in range(start, self.last_number + 1) if number in self._pending)
        return [self._pending[number] for number in islice(numbers, most)]

    @property
    def frees_nothing(self) -> bool:
        """Whether every order to free a slot is acknowledged."""
        return not self._slots

    def has_freed(self, segment_id: bytes, slot: int, generation: int) -> bool:
        """Whether an unacknowledged order frees exactly this slot and generation."""
        order = self._slots.get((segment_id, slot))
        return order is not None and order.generation == generation
