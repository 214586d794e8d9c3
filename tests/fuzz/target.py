"""What a fuzz target is: a function that takes any bytes, with seeds made of real messages.

Whatever it is given, it may raise nothing (refusals are for it to expect), and take little memory. Inputs that once
broke one are kept in ``found/TARGET/``, and tried first from then on.
"""

import hashlib
import threading
import tracemalloc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

FOUND = Path(__file__).parent / "found"
GROWTH_BYTES_MAX = 1 << 20
"""Memory that reading a few kilobytes may take, unless the target says otherwise."""

_TRACED_SHARE = 16
"""And for each byte of what is read so many more: small objects are larger in memory than on the wire."""

TARGETS: "dict[str, Target]" = {}


@dataclass(frozen=True, slots=True)
class Target:
    """Something that reads bytes from outside.

    Attributes:
        name: Of its function.
        read: Takes the bytes; raises for what must not be.
        seeds: Makes inputs that are right, to begin with.
        growth_bytes_max: Memory that one input may take at a time.
    """

    name: str
    read: Callable[[bytes], None]
    seeds: Callable[[], Iterable[bytes]]
    growth_bytes_max: int

    def __call__(self, data: bytes) -> None:
        """Read ``data``; what it took, and what threads died of, count too. `tracemalloc` must run."""
        died: list[BaseException | None] = []
        threading.excepthook = lambda arguments: died.append(arguments.exc_value)
        limit = self.growth_bytes_max + _TRACED_SHARE * len(data)
        # What is imported, or kept, the first time is not the input's: then the second time decides.
        took = self._measured(data)
        if took >= limit:
            took = self._measured(data)
        assert not died, died
        assert took < limit, f"{len(data)} bytes took {took}"

    def _measured(self, data: bytes) -> int:
        """Read ``data``; how much memory was in use meanwhile, at the most."""
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        self.read(data)
        _, peak = tracemalloc.get_traced_memory()
        return peak - before

    def found(self) -> list[Path]:
        """What once broke it."""
        return sorted((FOUND / self.name).glob("*"))

    def write_seeds(self, folder: Path) -> None:
        """Each seed as a file named by its digest."""
        folder.mkdir(parents=True, exist_ok=True)
        for seed in [*self.seeds(), *(path.read_bytes() for path in self.found())]:
            (folder / hashlib.sha256(seed).hexdigest()[:16]).write_bytes(seed)


def target(
    seeds: Callable[[], Iterable[bytes]], growth_bytes_max: int = GROWTH_BYTES_MAX
) -> Callable[[Callable[[bytes], None]], Callable[[bytes], None]]:
    """Registers the function below it as a target."""

    def register(read: Callable[[bytes], None]) -> Callable[[bytes], None]:
        TARGETS[read.__name__] = Target(read.__name__, read, seeds, growth_bytes_max)
        return read

    return register
