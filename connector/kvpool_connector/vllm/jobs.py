"""What the scheduler's half and the workers' half tell each other, once a step.

vLLM's executor carries these records between its own processes; nothing here crosses a network.
"""

from dataclasses import dataclass, field

from kvpool import Reservation


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Blocks to load for one request.

    Attributes:
        number: Unique in the engine; a request that comes back gets another one.
        request_id: Reported back exactly once.
        hashes: The chain from its root to the last block wanted, packed.
        first: Index in the chain of the first block to load.
        blocks: The engine's block ids, one a block from ``first`` on.
    """

    number: int
    request_id: str
    hashes: bytes
    first: int
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Reserved blocks that each rank writes its shard of; the scheduler holds references to ``blocks`` meanwhile.

    Attributes:
        number: Unique in the engine.
        reservation: Where to.
        blocks: The engine's block ids, one a block of the reservation's slice.
    """

    number: int
    reservation: Reservation
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class StepJobs:
    """Work that goes out with one step.

    Attributes:
        namespace: The agreed namespace's document; empty where there is no work.
        loads: To begin.
        saves: To begin.
        timed_step: Number of the step, to be reported back where the prefill rate is measured by it; else 0.
        idle: Whether the step computes nothing: workers may wait a moment for what is under way.
    """

    namespace: bytes = b""
    loads: list[LoadJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)
    timed_step: int = 0
    idle: bool = False


@dataclass(frozen=True, slots=True)
class LoadReport:
    """How a load ended on one rank.

    Attributes:
        failed_from: Index in the job's blocks of the first that was not loaded; None when all were.
        reason: Why not.
        size_bytes: Verified bytes.
        elapsed_s: From the job's arrival to its end.
        rank: Whose report it is; one that comes again counts once.
    """

    failed_from: int | None
    reason: str
    size_bytes: int
    elapsed_s: float
    rank: int


@dataclass(frozen=True, slots=True)
class SaveReport:
    """How a save ended, on as many ranks as have reported.

    Attributes:
        ranks: Which these are; one that comes again counts once.
        failed: Indexes into the reservation's slice that some rank did not write.
        crowded: Whether a node had no extent long enough.
        size_bytes: Bytes committed.
        elapsed_s: Of the slowest rank.
    """

    ranks: frozenset[int]
    failed: frozenset[int]
    crowded: bool
    size_bytes: int
    elapsed_s: float

    def merge(self, other: "SaveReport") -> "SaveReport":
        """Both ranks' reports in one."""
        return SaveReport(
            self.ranks | other.ranks,
            self.failed | other.failed,
            self.crowded or other.crowded,
            self.size_bytes + other.size_bytes,
            max(self.elapsed_s, other.elapsed_s),
        )


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What ended since the last step, by job number; ``timed_step`` as in `StepJobs`."""

    loads: dict[int, list[LoadReport]] = field(default_factory=dict)
    saves: dict[int, SaveReport] = field(default_factory=dict)
    timed_step: int = 0

    def __bool__(self) -> bool:
        return bool(self.loads or self.saves or self.timed_step)

    def merge(self, other: "WorkerReport") -> "WorkerReport":
        """Two workers' reports, or two steps' reports, in one."""
        loads = {n: [*self.loads.get(n, ()), *other.loads.get(n, ())] for n in {**self.loads, **other.loads}}
        saves = dict(self.saves)
        for number, report in other.saves.items():
            saves[number] = saves[number].merge(report) if number in saves else report
        return WorkerReport(loads, saves, max(self.timed_step, other.timed_step))
