"""Starts a command that is nobody's child, and holds a lock for as long as it lives.

Run as a script, with an interpreter that imports nothing else: an engine has threads and must not fork, and a child of
an engine dies with it, since vLLM ends by killing the whole tree of its processes. The command's parent, this script,
is gone at once, so that it is no part of that tree, and whoever ends is waited for by the system: no zombies.

Arguments: the lock file; a file whose lock says that somebody else runs the command; a note; the command. The lock
file then says ``PID NOTE``. The exit code says what happened.
"""

import ctypes
import fcntl
import os
import platform
import sys
from contextlib import suppress
from pathlib import Path

STARTED = 0
RUNNING = 75
"""The lock is held: the command runs, or is about to."""
RUNNING_ELSEWHERE = 76
"""The other lock is held."""

_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_MPOL_DEFAULT = 0


def is_held(path: Path) -> bool:
    """Whether a living process holds the lock of this file; one that cannot be opened is held by none."""
    with suppress(OSError):
        lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            return not _took(lock, fcntl.LOCK_SH)
        finally:
            # By name: had another thread forked meanwhile, its child would keep what is merely closed here.
            fcntl.flock(lock, fcntl.LOCK_UN)
            os.close(lock)
    return False


def start(lock_path: Path, other: Path, note: str, command: list[str]) -> int:
    """Start ``command`` unless it runs; returns what happened."""
    lock = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    if not _took(lock, fcntl.LOCK_EX):
        return RUNNING
    if is_held(other):
        return RUNNING_ELSEWHERE
    os.ftruncate(lock, 0)
    pid = os.fork()
    if pid == 0:
        os.set_inheritable(lock, True)  # noqa: FBT003 - takes no keyword
        _unbind()
        os.execv(command[0], command)  # noqa: S606 - arguments as a list
    os.pwrite(lock, f"{pid} {note}".encode(), 0)
    return STARTED


def _took(lock: int, kind: int) -> bool:
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _unbind() -> None:
    """Run on every CPU and on memory of every NUMA node that the container allows.

    A CPU worker of vLLM binds itself to a core and its node, and children inherit it.
    """
    with suppress(OSError):
        os.sched_setaffinity(0, range(os.sysconf("SC_NPROCESSORS_CONF")))
    call = _SET_MEMPOLICY.get(platform.machine())
    if call is not None:
        ctypes.CDLL(None).syscall(call, _MPOL_DEFAULT, None, 0)


if __name__ == "__main__":
    _lock, _other, _note, *_command = sys.argv[1:]
    sys.exit(start(Path(_lock), Path(_other), _note, _command))
