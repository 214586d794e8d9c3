"""Whether the state that a service works with is still the one in Redis.

Behind a connection made anew may be another server, with other state: one that was restarted, or took over. So whenever
there is one the service looks, and what it was told meanwhile is passed on only if nothing has changed.
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from kvpool.core.clock import Clock
from kvpool.core.errors import SettingsError, StateAwayError
from kvpool.meta.shared.missing import refuse_missing
from kvpool.meta.shared.state import State
from kvpool.meta.store.link import POOL, RedisLink
from kvpool.meta.store.pool import current_epoch
from kvpool.ops.logging import get_logger
from kvpool.ops.settings import MetaSettings

AWAY_PAUSE_S = 0.5
"""A state that did not answer is asked again so often: else every call would wait its time out."""

Answer = TypeVar("Answer")

log = get_logger(__name__)


class Keeper:
    """The current `State`. Thread-safe.

    Args:
        settings: Of the service.
        clock: Monotonic seconds.
        random_bytes: Source of epochs, sessions and keys.

    Raises:
        SettingsError: It cannot work so, or Redis cannot.

    Attributes:
        latest: The state as it was known last; None before the first.
        away: Calls that found it away.
    """

    def __init__(self, settings: MetaSettings, clock: Clock, random_bytes: Callable[[int], bytes]) -> None:
        self.latest: State | None = None
        self.away = 0
        self._settings = settings
        self._clock = clock
        self._random_bytes = random_bytes
        self._link = _open_link(settings)
        self._lock = threading.Lock()
        self._connects_seen = -1
        self._away_until_s = 0.0
        self._ended: list[int] = []
        with suppress(StateAwayError):  # it may come later
            self.look()

    def ask(self, question: Callable[[State], Answer]) -> Answer:
        """What the state answers, if it still is the one that was asked; raises StateAwayError."""
        try:
            state = self.usable()
            answer = question(state)
            if self.usable() is not state:
                raise StateAwayError("the pool's state was replaced; what was asked of the old one means nothing")
        except StateAwayError:
            self.away += 1
            self._connects_seen = -1
            now_s = self._clock()
            if now_s >= self._away_until_s:
                self._away_until_s = now_s + AWAY_PAUSE_S
            raise
        return answer

    def usable(self) -> State:
        """The state, as far as anybody knows; raises StateAwayError."""
        if self.latest is None or self._link.connects != self._connects_seen:
            with self._lock:
                if self._clock() < self._away_until_s:
                    raise StateAwayError("the pool's state was away a moment ago; it is asked again within a second")
                self._look()
        assert self.latest is not None
        return self.latest

    def look(self) -> None:
        """See which state there is, however short ago it was away; raises StateAwayError."""
        with self._lock:
            self._look()
            self._away_until_s = 0.0

    def forget_ended(self) -> None:
        """Free what Redis holds of epochs that have ended; raises StateAwayError."""
        while self._ended:
            number = self._ended[-1]
            for prefix in (f"kvpool:{number:x}:", f"{POOL}{number:x}:"):
                for key in self._link.keys_of(f"{prefix}*"):
                    self._link.run([("UNLINK", key)])
            self._ended.pop()

    def close(self) -> None:
        """Close all connections."""
        self._link.close()

    def _look(self) -> None:
        connects = self._link.connects
        epoch = current_epoch(self._link, self._random_bytes)
        if self.latest is None or self.latest.epoch.number != epoch.number:
            if self.latest is not None:
                log.warning("epoch_ended", epoch=self.latest.epoch.number, next=epoch.number)
                self._ended.append(self.latest.epoch.number)
            self.latest = State.open(self._link, epoch, self._settings, self._clock, self._random_bytes)
        self._connects_seen = connects


def _open_link(settings: MetaSettings) -> RedisLink:
    refuse_missing(settings)
    password = settings.state_password_file
    assert settings.state is not None
    try:
        secret = None if password is None else password.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise SettingsError(f"meta.state_password_file cannot be read: {error}") from error
    return RedisLink(settings.state, settings.state_timeout_s, secret)
