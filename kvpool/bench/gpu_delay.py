"""What transfers cost computing: matrix products beside them and alone."""

import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Self

import msgspec
import numpy as np

from kvpool.bench.measure import GB
from kvpool.core.errors import UnavailableError

PRODUCT_SIZE = 8192
PRODUCTS = 16
"""Matrix products of one sample: 8192 cubed in half precision, about 25 ms."""

WARM_UP_SAMPLES = 20
PAUSE_S = 0.02
END_S = 60.0
"""How long a transfer gets to end."""


class GpuDelayRow(msgspec.Struct, frozen=True, kw_only=True, tag_field="bench", tag="gpu_delay"):
    """What transfers cost computing.

    Attributes:
        what: The transfer that runs all the time.
        percent: By how much longer matrix products take beside it, median of pairs.
        error_percent: Standard error of that.
        gbps: GB/s of the transfers meanwhile.
        target: Most that is asked for.
    """

    what: str
    percent: float
    error_percent: float
    gbps: float
    target: float | None = None


def on_gpu_ms(cupy: Any, work: Callable[[], None]) -> float:  # noqa: ANN401 - a module
    """Milliseconds from the first to the last thing that ``work`` begins on the current stream."""
    before, after = cupy.cuda.Event(), cupy.cuda.Event()
    before.record()
    work()
    after.record()
    after.synchronize()
    return float(cupy.cuda.get_elapsed_time(before, after))


def measure_delay(
    products: "Products", what: str, transfer: tuple[Callable[[], None], int], pairs: int, target: float | None
) -> GpuDelayRow:
    """Samples alone and beside a transfer and its bytes, in the order A B B A, so that drifts cancel."""
    move, size_bytes = transfer
    percents: list[float] = []
    with _Repeated(move) as repeated:
        for i in range(pairs):
            times_ms = {beside: products.sample_ms(repeated, beside=beside) for beside in (i % 2 > 0, i % 2 == 0)}
            percents.append((times_ms[True] / times_ms[False] - 1) * 100)
    return GpuDelayRow(
        what=what,
        percent=statistics.median(percents),
        error_percent=1.25 * statistics.stdev(percents) / pairs**0.5,
        gbps=repeated.moves * size_bytes / GB / repeated.busy_s,
        target=target,
    )


class Products:
    """A large matrix product on a stream of its own: what an engine computes."""

    def __init__(self, cupy: Any) -> None:  # noqa: ANN401
        self._cupy = cupy
        generator = cupy.random.default_rng(3)
        self._factors = [
            generator.standard_normal((PRODUCT_SIZE, PRODUCT_SIZE), np.float32).astype(np.float16) for _ in range(2)
        ]
        self._product = cupy.empty((PRODUCT_SIZE, PRODUCT_SIZE), np.float16)
        self._stream = cupy.cuda.Stream(non_blocking=True)
        for _ in range(WARM_UP_SAMPLES):
            self._time_ms()  # until clocks and power have settled

    def sample_ms(self, repeated: "_Repeated", *, beside: bool) -> float:
        """Time of some products, ``beside`` what is repeated or alone, after the same pause."""
        time.sleep(PAUSE_S)
        if not beside:
            return self._time_ms()
        with repeated.running():
            return self._time_ms()

    def _time_ms(self) -> float:
        with self._stream:
            return on_gpu_ms(self._cupy, self._multiply)

    def _multiply(self) -> None:
        for _ in range(PRODUCTS):
            self._cupy.matmul(*self._factors, out=self._product)


class _Repeated:
    """Calls ``move`` again and again on a thread, while it is `running`."""

    def __init__(self, move: Callable[[], None]) -> None:
        self.moves = 0
        self.busy_s = 0.0
        self._move = move
        self._going = threading.Event()
        self._idle = threading.Event()
        self._idle.set()
        self._ended = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="bench-transfers", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        self._going.set()
        self._thread.join()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """While transfers are under way; the last one has ended afterwards."""
        self._idle.clear()
        self._going.set()
        try:
            yield
        finally:
            self._going.clear()
            if not self._idle.wait(END_S):
                raise UnavailableError(f"a transfer has not ended within {END_S:g} s")
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while self._going.wait() and not self._ended:
            began_s = time.perf_counter()
            try:
                while self._going.is_set() and not self._ended:
                    self._move()
                    self.moves += 1
            except Exception as error:  # noqa: BLE001 - raised where it is waited for
                self._error = error
                self._going.clear()
            self.busy_s += time.perf_counter() - began_s
            self._idle.set()
