"""A test's side of failpoints: arm one in a running process, see that it was reached, let a pause go on."""

from pathlib import Path

from kvpool.ops.failpoints import FAILPOINTS
from tests.waiting import eventually


class Points:
    """The directory that one process was told of with KVPOOL_FAILPOINTS."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def arm(self, name: str, action: str) -> None:
        """Whoever reaches ``name`` next does ``action``, once."""
        assert name in FAILPOINTS
        self.clear()
        new = self.directory / "new"
        new.write_text(action)
        new.rename(self.directory / f"{name}.armed")

    def was_hit(self, name: str) -> bool:
        return (self.directory / f"{name}.hit").exists()

    def wait_until_hit(self, name: str) -> None:
        eventually(lambda: self.was_hit(name))

    def release(self, name: str) -> None:
        """End a pause."""
        (self.directory / f"{name}.hit").unlink()

    def clear(self) -> None:
        for file in self.directory.iterdir():
            file.unlink()
