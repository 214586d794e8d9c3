"""Failpoints: named steps of writes and reads at which a test lets a process die, stop, wait or fail.

They do nothing unless the environment variable ``KVPOOL_FAILPOINTS`` is set when the process starts. It holds entries
separated by commas:

    NAME=ACTION    do ACTION each time NAME is reached
    /A/DIRECTORY   while the process runs, a file NAME.armed there, which holds an action, arms NAME for one time.
                   Whoever reaches it renames the file to NAME.hit first, so that there is one who did

    kill           SIGKILL this process
    stop           SIGSTOP this process, until somebody sends SIGCONT
    sleep:SECONDS  stay here so long
    raise:ERROR    raise ERROR: MemoryError, an errno (ENOSPC: an OSError), or one of `kvpool.core.errors`
    pause          stay here until NAME.hit is removed, for at most `PAUSE_S`; needs a directory
"""

import errno
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args

from kvpool.core import errors
from kvpool.core.errors import SettingsError
from kvpool.ops.logging import get_logger

VARIABLE = "KVPOOL_FAILPOINTS"

PAUSE_S = 60.0
"""A pause that nobody ends is over then."""

POLL_S = 0.002

Failpoint = Literal[
    "client.match.after_answer",
    "client.read.before_copy",
    "client.read.before_verify",
    "client.copy.mid_block",
    "client.put.after_reserve",
    "client.put.after_prepare",
    "client.put.before_commit",
    "client.put.after_commit",
    "wire.send.mid_payload",
    "node.put.before_prepare",
    "node.put.before_describe",
    "node.put.after_prepare",
    "node.put.mid_bytes",
    "node.put.before_header",
    "node.put.mid_header",
    "node.put.after_header",
    "node.put.after_report",
    "node.get.after_pin",
    "node.get.before_unpin",
    "node.owner.after_drop",
    "node.inventory.before_scan",
    "node.inventory.mid_parts",
    "node.orders.before_apply",
    "node.orders.after_apply",
    "meta.match.before_answer",
    "meta.locate.before_answer",
    "meta.reserve.before_place",
    "meta.reserve.before_answer",
    "meta.commit.before_take",
    "meta.commit.before_answer",
    "meta.abort.before_answer",
    "meta.inventory.before_take",
    "meta.inventory.after_take",
    "meta.ready.before_admit",
    "meta.tick.begin",
]
"""Every failpoint there is: whose step, which operation, and where in it."""

FAILPOINTS: tuple[str, ...] = get_args(Failpoint)

log = get_logger(__name__)


class _Armed:
    """What the variable says."""

    def __init__(self, text: str) -> None:
        entries = [entry.strip() for entry in text.split(",") if entry.strip()]
        self._directory = next((Path(entry) for entry in entries if entry.startswith("/")), None)
        self._actions = dict(_entry(entry) for entry in entries if not entry.startswith("/"))
        if self._directory is not None and not self._directory.is_dir():
            raise SettingsError(f"{VARIABLE}: {self._directory} is no directory; make it first")
        if self._directory is None and "pause" in self._actions.values():
            raise SettingsError(f"{VARIABLE}: a pause ends when a file goes: add a directory, e.g. {text},/run/points")

    def reach(self, name: str) -> None:
        action = self._claim(name)
        if action is None:
            return
        log.warning("failpoint", name=name, action=action)
        verb, _, argument = action.partition(":")
        if verb in _SIGNALS:
            os.kill(os.getpid(), _SIGNALS[verb])
        elif verb == "sleep":
            time.sleep(float(argument))
        elif verb == "raise":
            error = _error(argument, name)
            assert error is not None, "looked at when it was armed"
            raise error
        else:
            self._pause(name)

    def _claim(self, name: str) -> str | None:
        """What to do at ``name``, if anything; what a file has armed it with is for the first who asks."""
        if self._directory is None:
            return self._actions.get(name)
        hit = self._directory / f"{name}.hit"
        if name in self._actions:
            hit.touch()
            return self._actions[name]
        try:
            (self._directory / f"{name}.armed").rename(hit)
        except FileNotFoundError:
            return None
        return _action(hit.read_text(), str(hit))

    def _pause(self, name: str) -> None:
        assert self._directory is not None
        hit, until_s = self._directory / f"{name}.hit", time.monotonic() + PAUSE_S
        while hit.exists():
            if time.monotonic() > until_s:
                log.error("failpoint_not_released", name=name, after_s=PAUSE_S)
                return
            time.sleep(POLL_S)


_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
_armed: _Armed | None = None
"""None: off. It is the process that dies or stops, so the process has one."""


def failpoint(name: Failpoint) -> None:
    """This step is reached: do what it is armed with, which is nothing outside tests."""
    if _armed is not None:
        _armed.reach(name)


def arm(environ: Mapping[str, str]) -> None:
    """Arm what ``KVPOOL_FAILPOINTS`` in ``environ`` says; each process's start calls it.

    Raises:
        SettingsError: An unknown name or action, or a directory that is not there.
    """
    global _armed  # noqa: PLW0603 - a process has one
    text = environ.get(VARIABLE, "")
    _armed = _Armed(text) if text else None
    if text:
        log.warning("failpoints_active", value=text, fix=f"this process fails on purpose; unset {VARIABLE}")


def _entry(entry: str) -> tuple[str, str]:
    name, sign, action = entry.partition("=")
    if name not in FAILPOINTS:
        raise SettingsError(f"{VARIABLE}: {name!r} is no failpoint; there are {', '.join(FAILPOINTS)}")
    if not sign:
        raise SettingsError(f"{VARIABLE}: {name} has no action; write e.g. {name}=kill")
    return name, _action(action, VARIABLE)


def _action(action: str, source: str) -> str:
    """``action``, if there is such a one; raises SettingsError."""
    verb, _, argument = action.partition(":")
    if action in (*_SIGNALS, "pause") or (verb == "raise" and _error(argument, "") is not None):
        return action
    if verb == "sleep" and argument.replace(".", "", 1).isdecimal():
        return action
    raise SettingsError(f"{source}: {action!r} is no action; use kill, stop, pause, sleep:SECONDS or raise:ERROR")


def _error(kind: str, name: str) -> BaseException | None:
    """The error called ``kind``, if there is one."""
    text = f"failpoint {name}"
    if kind == "MemoryError":
        return MemoryError(text)
    if kind in errors.__all__:
        error: BaseException = getattr(errors, kind)(text)
        return error
    number = getattr(errno, kind, None)
    return OSError(number, text) if isinstance(number, int) else None
