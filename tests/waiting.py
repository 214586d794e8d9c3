"""Waiting for what another thread or process does."""

import threading
from pathlib import Path


def eventually(condition):
    """Poll what no event tells about; pytest's own time-out ends a wait that is in vain."""
    pause = threading.Event()
    while not condition():
        pause.wait(0.01)


def is_frozen(pid):
    """Whether each thread of a process has stopped: kill() returns before they have."""
    stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)
