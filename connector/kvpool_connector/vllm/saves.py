"""Saves on their way: reserved, written by every rank, and only then let go. No I/O, no vLLM.

The blocks of a save are referenced from its plan until the last rank has reported, so that what is read is what was
computed (V2); jobs have numbers of their own, because request ids come back after a preemption (V3).
"""

from collections.abc import Callable, Container
from dataclasses import dataclass

from kvpool import Reservation, Want
from kvpool_connector.vllm.jobs import SaveJob, SaveReport

ORPHANED_TIMEOUTS = 3
"""A save that no rank reports for so many time-outs no longer keeps an idle engine awake. It stays referenced."""


@dataclass(slots=True)
class Saving:
    """One save.

    Attributes:
        number: Of the job.
        request_id: Whose blocks they are.
        hashes: The chain from its root to the last block, packed.
        first: Index in the chain of the first block.
        blocks: The engine's block ids.
        started_s: When it was planned.
        tries: How many saves it replaces: ones that lacked an ancestor, or met a crowded node.
        reservation: Places for it, once there are.
        report: Of the ranks so far.
    """

    number: int
    request_id: str
    hashes: bytes
    first: int
    blocks: list[int]
    started_s: float
    tries: int = 0
    reservation: Reservation | None = None
    report: SaveReport | None = None

    @property
    def end(self) -> int:
        """Index in the chain after the last block."""
        return self.first + len(self.blocks)


class SaveBook:
    """All saves of an engine that have not ended.

    Args:
        clock: Monotonic seconds.
        pinned_max: Engine blocks that they may reference at a time.
        timeout_s: After this a rank gives a save up.
    """

    def __init__(self, clock: Callable[[], float], pinned_max: int, timeout_s: float) -> None:
        self._clock = clock
        self._pinned_max = pinned_max
        self._timeout_s = timeout_s
        self._saves: dict[int, Saving] = {}
        self.pinned_blocks = 0

    def __len__(self) -> int:
        return len(self._saves)

    def room(self) -> int:
        """Further blocks that may be referenced."""
        return max(0, self._pinned_max - self.pinned_blocks)

    def planned(
        self, number: int, request_id: str, hashes: bytes, first: int, blocks: list[int], *, tries: int = 0
    ) -> Saving:
        """A save begins; its blocks are referenced from now on."""
        saving = Saving(number, request_id, hashes, first, blocks, self._clock(), tries)
        self._saves[number] = saving
        self.pinned_blocks += len(blocks)
        return saving

    def find(self, number: int) -> Saving | None:
        """The save, unless it has ended."""
        return self._saves.get(number)

    def reserved(self, saving: Saving, reservation: Reservation) -> SaveJob:
        """It has its places; the job for the ranks."""
        saving.reservation = reservation
        return SaveJob(saving.number, reservation, saving.blocks)

    def reported(self, number: int, report: SaveReport, ranks: int) -> Saving | None:
        """Some ranks have ended; the save, when these were the last."""
        saving = self._saves.get(number)
        if saving is None:
            return None
        if saving.report is not None and report.ranks <= saving.report.ranks:
            return None
        saving.report = report if saving.report is None else saving.report.merge(report)
        return saving if len(saving.report.ranks) >= ranks else None

    def unsent(self, ready: Container[int]) -> list[Saving]:
        """Saves without places, and those of the numbers ``ready``, whose jobs wait for the next step."""
        return [s for s in self._saves.values() if s.reservation is None or s.number in ready]

    def ended(self, number: int) -> list[int]:
        """A save is over, whatever came of it; the block ids to let go."""
        saving = self._saves.pop(number)
        self.pinned_blocks -= len(saving.blocks)
        return saving.blocks

    def younger_than(self, age_s: float) -> bool:
        """Whether any save is younger: its blocks will be free soon."""
        oldest_s = self._clock() - age_s
        return any(saving.started_s > oldest_s for saving in self._saves.values())

    def pending(self) -> bool:
        """Whether steps must go on for saves to end."""
        return self.younger_than(self._timeout_s * ORPHANED_TIMEOUTS)

    def check_integrity(self) -> None:
        """Assert the sum of references; for tests."""
        assert self.pinned_blocks == sum(len(saving.blocks) for saving in self._saves.values())


def wanted_blocks(reservation: Reservation) -> int:
    """Blocks of the slice that are to be written."""
    return reservation.wants.count(Want.WANTED)
