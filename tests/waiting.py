"""Waiting for what another thread or process does."""

import threading


def eventually(condition):
    """Poll what no event tells about; pytest's own time-out ends a wait that is in vain."""
    pause = threading.Event()
    while not condition():
        pause.wait(0.01)
