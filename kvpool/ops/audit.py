"""The audit trail: who opened, used, pinned, drained or changed what, and who was refused.

Changes are a line each. Uses, which come by the thousand, are summed up for each caller, and so are refusals after the
first of their kind. Blocks are named by the first digits of their hashes, and only where one was pinned; tokens, hashes
of prompts and bytes are in no line.
"""

import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import cast

import structlog
from structlog.typing import FilteringBoundLogger

from kvpool.core.clock import Clock
from kvpool.core.errors import SettingsError
from kvpool.core.principals import Principal, Role
from kvpool.ops.logging import get_logger

LOGGER = "kvpool.audit"
EVENT = "audit"

SUMMED_S = 10.0
"""How long uses, and refusals of one kind, are summed up before there is a line about them."""

SUMS_MAX = 4096
"""Callers, and kinds of refusals, summed up at a time; when there are more, the lines are written at once."""

HASH_DIGITS = 8
"""Of a block's hash in a line."""

Write = Callable[..., object]


class Audit:
    """Writes the lines. Thread-safe.

    Args:
        write: Takes a line's fields; None: nothing is written.
        clock: Monotonic seconds.
        close: Lets go of what is written to.
    """

    def __init__(
        self, write: Write | None = None, clock: Clock = time.monotonic, close: Callable[[], None] = lambda: None
    ) -> None:
        self._write = write
        self._clock = clock
        self._close = close
        self._lock = threading.Lock()
        self._uses: dict[Principal, Counter[str]] = {}
        self._refusals: dict[tuple[str, str], tuple[dict[str, object], int]] = {}
        self._summed_s = clock()

    @property
    def is_on(self) -> bool:
        """Whether lines are written."""
        return self._write is not None

    def record(self, action: str, principal: Principal, **what: object) -> None:
        """A line: the caller did ``action``, which changed something."""
        if self._write is not None:
            self._write(action=action, **_who(principal), **what)

    def used(self, principal: Principal, **counts: int) -> None:
        """Add to what the caller's next line about its uses says."""
        if self._write is None:
            return
        with self._lock:
            self._uses.setdefault(principal, Counter()).update(counts)
        self.flush(due=True)

    def refused(self, who: Principal | str, what: str, why: object) -> None:
        """The caller, or a peer that is nobody, was refused; a line for the first of its kind, then a sum."""
        if self._write is None:
            return
        by = _who(who) if isinstance(who, Principal) else {"peer": who}
        name = who.name if isinstance(who, Principal) else who.rpartition(":")[0]
        said: dict[str, object] = {**by, "what": what, "why": str(why)}
        with self._lock:
            known = self._refusals.get((name, what))
            self._refusals[name, what] = (said, 0 if known is None else known[1] + 1)
        if known is None:
            self._write(action="refused", **said)
        self.flush(due=True)

    def flush(self, *, due: bool = False) -> None:
        """Write the sums, or with ``due`` only when it is time."""
        with self._lock:
            full = len(self._uses) >= SUMS_MAX or len(self._refusals) >= SUMS_MAX
            if self._write is None or (due and not full and self._clock() - self._summed_s < SUMMED_S):
                return
            self._summed_s = self._clock()
            uses, self._uses = self._uses, {}
            refusals, self._refusals = self._refusals, {}
        for principal, counts in uses.items():
            self._write(action="used", **_who(principal), **counts)
        for said, times in refusals.values():
            if times:
                self._write(action="refused", **said, more=times)

    def close(self) -> None:
        """Write what is left, and no more after that."""
        self.flush()
        self._write = None
        self._close()


def open_audit(setting: str, *, authenticated: bool) -> Audit:
    """The trail that a setting asks for; see `ServerSettings.audit`. Raises SettingsError for an impossible path."""
    if setting == "off" or (setting == "auto" and not authenticated):
        return Audit()
    if setting in ("auto", "on"):
        log = get_logger(LOGGER)
        return Audit(lambda **fields: log.info(EVENT, **fields))
    try:
        descriptor = os.open(setting, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise SettingsError(f"audit = {setting!r}: {error}; name a file that can be appended to, on, or off") from error
    file = os.fdopen(descriptor, "a", encoding="utf-8")
    own = structlog.wrap_logger(
        structlog.WriteLogger(file),
        processors=[
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.JSONRenderer(default=repr),
        ],
    )
    to_file = cast("FilteringBoundLogger", own)
    return Audit(lambda **fields: to_file.info(EVENT, **fields), close=file.close)


def shown_block(block_hash: bytes) -> str:
    """What a line shows of a block's hash, and of a namespace's id."""
    return block_hash.hex()[:HASH_DIGITS]


def _who(principal: Principal) -> dict[str, object]:
    """The caller, as lines name it."""
    roles = "any" if principal.roles == frozenset(Role) else ",".join(sorted(principal.roles))
    return {"by": principal.name, "roles": roles, "tenant": principal.tenant}
