"""What real modules get in place of `threading`, `time` and `queue` while a schedule runs."""

import threading
from collections import deque
from contextlib import contextmanager

import numpy as np

import kvpool.client.client
import kvpool.client.meta
import kvpool.client.nodes
import kvpool.core.directory.heat
import kvpool.meta.losing
import kvpool.meta.membership
import kvpool.meta.moving
import kvpool.meta.server
import kvpool.meta.service
import kvpool.node.control
import kvpool.node.copier
import kvpool.node.link
import kvpool.node.server
import kvpool.transport.backoff
import kvpool.transport.copying
import kvpool.transport.deadline
import kvpool.transport.shm
import kvpool.transport.wire.connection
import kvpool.transport.wire.server

from .scheduler import current

COPY_BYTES = 1100
"""Copies stop after so many bytes, for others to come in between."""


class Event:
    def __init__(self):
        self._set = False
        self._waiters = []

    def is_set(self):
        return self._set

    def set(self):
        self._set = True
        for task in self._waiters:
            current().wake(task)

    def clear(self):
        self._set = False

    def wait(self, timeout=None):
        if not self._set:
            task = current().task
            self._waiters.append(task)
            current().block(timeout)
            self._waiters.remove(task)
        return self._set


class Condition:
    """Over a real lock: nobody stops while holding one, so it is always free."""

    def __init__(self, lock):
        self._lock = lock
        self._waiters = []

    def __enter__(self):
        return self._lock.__enter__()

    def __exit__(self, *error):
        return self._lock.__exit__(*error)

    def notify_all(self):
        for task in self._waiters:
            current().wake(task)

    def wait(self, timeout=None):
        task = current().task
        self._waiters.append(task)
        self._lock.release()
        try:
            current().block(timeout)
        finally:
            assert self._lock.acquire(blocking=False), "somebody stopped while holding a lock"
            self._waiters.remove(task)


class Thread:
    def __init__(self, target, args=(), name="", daemon=False):
        self._target = target
        self._args = args
        self._task = None
        self.ident = None

    def start(self):
        self.ident = 1
        self._task = current().spawn(current().task.process, self._target, *self._args)

    def join(self):
        if not self._task.done:
            self._task.waiters.append(current().task)
            current().block()


class SimpleQueue:
    def __init__(self):
        self._items = deque()
        self._waiters = []

    def put(self, item):
        self._items.append(item)
        for task in self._waiters:
            current().wake(task)

    def qsize(self):
        return len(self._items)

    def get(self):
        task = current().task
        while not self._items:
            self._waiters.append(task)
            current().block()
            self._waiters.remove(task)
        return self._items.popleft()


class Threading:
    Event = Event
    Condition = Condition
    Thread = Thread
    Lock = threading.Lock
    current_thread = threading.current_thread


class Queue:
    SimpleQueue = SimpleQueue


class Time:
    @staticmethod
    def monotonic():
        return current().now_s

    @staticmethod
    def sleep(seconds):
        current().sleep(seconds)


class Random:
    @staticmethod
    def random():
        return current().rng.random()


class SteppingNumpy:
    """numpy for `copying`: before and after each piece that is copied others may come in between."""

    def __getattr__(self, name):
        return getattr(np, name)

    @staticmethod
    def copyto(destination, source):
        scheduler = current()
        scheduler.step()
        np.copyto(destination, source)
        scheduler.watch.copied(destination)
        scheduler.step()


class Silence:
    def info(self, *_args, **_fields):
        pass

    warning = info


def _replacements():
    service, losing, moving = kvpool.meta.service, kvpool.meta.losing, kvpool.meta.moving
    control, copier, wire = kvpool.node.control, kvpool.node.copier, kvpool.transport.wire
    logging = [
        service,
        kvpool.meta.membership,
        moving,
        control,
        copier,
        kvpool.node.link,
        kvpool.node.server,
        wire.server,
    ]
    timing = [
        losing,
        kvpool.meta.server,
        kvpool.client.meta,
        kvpool.client.nodes,
        kvpool.node.server,
        kvpool.transport.deadline,
        wire.server,
    ]
    threads = [service, losing, kvpool.meta.membership, control, copier]
    return [
        *((module, "log", Silence()) for module in logging),
        *((module, "time", Time) for module in [*timing, wire.connection]),
        *((module, "threading", Threading) for module in threads),
        (control, "queue", Queue),
        (copier, "queue", Queue),
        (losing, "LOSS_BLOCKS", 2),
        (kvpool.core.directory.heat, "SAMPLE_EVERY", 1),
        (kvpool.client.nodes, "random", Random),
        (kvpool.transport.backoff, "random", Random),
        (kvpool.transport.copying, "np", SteppingNumpy()),
        (kvpool.transport.copying, "CHUNK_BYTES", COPY_BYTES),
    ]


@contextmanager
def replaced(replacements):
    """Each (owner, name, value) in force; what was there comes back."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replacements]
    for owner, name, value in replacements:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in reversed(before):
            setattr(owner, name, value)


def simulated():
    """Simulated time and threads in every module that a schedule runs."""
    return replaced(_replacements())
