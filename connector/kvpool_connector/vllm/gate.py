"""Load or recompute: a load is offered only where it is expected to be faster than computing the same tokens."""

from collections import OrderedDict
from collections.abc import Callable

STALE_S = 60.0
"""Older measurements say nothing: a load is tried again, which measures anew."""

WEIGHT = 0.3
"""Share of a new measurement in the running mean: about the last five count."""

PREFILL_TOKENS_MIN = 256
"""Smaller steps spend their time on other things than tokens."""

STEPS_MAX = 64
"""Steps whose output has not come back; more than an engine keeps in flight."""

LOAD_BYTES_MIN = 1 << 20
"""Smaller loads spend their time on other things than bytes."""


class Rate:
    """A running mean of units a second, forgotten when it is old."""

    def __init__(self, clock: Callable[[], float], units_min: int) -> None:
        self._clock = clock
        self._units_min = units_min
        self._rate = 0.0
        self._measured_s = float("-inf")

    def measured(self, units: int, elapsed_s: float) -> None:
        """``units`` took ``elapsed_s``; too few of them are ignored."""
        if units < self._units_min or elapsed_s <= 0:
            return
        rate = units / elapsed_s
        known = self.now()
        self._rate = rate if known is None else known + WEIGHT * (rate - known)
        self._measured_s = self._clock()

    def now(self) -> float | None:
        """Units a second, or None where that is not known."""
        return self._rate if self._clock() - self._measured_s < STALE_S else None


class Gate:
    """Decides from the measured load bandwidth and prefill rate; offers every load until both are known."""

    def __init__(self, clock: Callable[[], float], block_bytes: int, block_tokens: int) -> None:
        self._block_bytes = block_bytes
        self._block_tokens = block_tokens
        self.load = Rate(clock, LOAD_BYTES_MIN)
        self.prefill = Rate(clock, PREFILL_TOKENS_MIN)

    def worth_loading(self, blocks: int) -> bool:
        """Whether loading ``blocks`` is expected to take less time than computing them."""
        bytes_a_second, tokens_a_second = self.load.now(), self.prefill.now()
        if bytes_a_second is None or tokens_a_second is None:
            return True
        return blocks * self._block_bytes / bytes_a_second < blocks * self._block_tokens / tokens_a_second


class StepTimer:
    """Prefill rate from what goes out and comes back: steps run one after the other, however many are in flight."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._out: OrderedDict[int, tuple[float, int]] = OrderedDict()
        self._last_step = 0
        self._last_back_s = float("-inf")

    def sent(self, tokens: int) -> int:
        """A step with ``tokens`` scheduled tokens goes out; its number, or 0 where it is too small to measure by."""
        if tokens < PREFILL_TOKENS_MIN:
            return 0
        self._last_step += 1
        self._out[self._last_step] = (self._clock(), tokens)
        if len(self._out) > STEPS_MAX:
            self._out.popitem(last=False)
        return self._last_step

    def came_back(self, step: int) -> tuple[int, float]:
        """A step's output is here; its tokens, and the seconds it had the engine for itself (0 tokens: not known)."""
        if step not in self._out:
            return 0, 0.0
        sent_s, tokens = self._out.pop(step)
        now_s = self._clock()
        elapsed_s = now_s - max(sent_s, self._last_back_s)
        self._last_back_s = now_s
        return tokens, elapsed_s
