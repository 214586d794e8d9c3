"""Waiting for what another process has done and tells only when it is asked."""

import threading
import time
from collections.abc import Callable

_STEP_S = 0.005


def wait_until(condition: Callable[[], bool], timeout_s: float, step_s: float = _STEP_S) -> bool:
    """Ask until ``condition`` holds; False when it does not within ``timeout_s``."""
    pause = threading.Event()
    end_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= end_s:
            return False
        pause.wait(step_s)
    return True
