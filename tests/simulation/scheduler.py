"""One thread that plays many: processes with tasks, simulated time, and one random number generator for every choice.

Tasks are greenlets: ordinary blocking code, the real one, runs in them and stops only where a shim (`shims`, `network`)
makes it wait. Which task goes on next follows from the seed alone, so a schedule can be repeated to the byte.
"""

from collections import deque
from contextlib import suppress
from heapq import heappop, heappush
from random import Random

from greenlet import GreenletExit, getcurrent, greenlet

STALL_S = 6.0
"""A task is now and then kept off the processor for up to so long, in the middle of what it does."""

_current: "Scheduler | None" = None


def current() -> "Scheduler":
    """The scheduler whose schedule runs now."""
    assert _current is not None, "no schedule runs"
    return _current


class Process:
    """Tasks that share a fate: crash together, stop and continue together."""

    def __init__(self, name, host):
        self.name = name
        self.host = host
        self.alive = True
        self.paused = False
        self.backlog = deque()
        self.paused_s = 0.0
        self.paused_at_s = 0.0
        self.sockets = set()

    def __repr__(self):
        return self.name


class Task:
    """A greenlet of a process. ``ticket`` tells the wake-up it waits for from earlier ones."""

    __slots__ = ("done", "greenlet", "process", "ticket", "value", "waiters")

    def __init__(self, process, hub, target, args):
        self.process = process
        self.greenlet = greenlet(lambda: self._run(target, args), parent=hub)
        self.ticket = 0
        self.value = None
        self.done = False
        self.waiters = []

    def _run(self, target, args):
        try:
            target(*args)
        except GreenletExit:
            return
        self.done = True
        for waiter in self.waiters:
            current().wake(waiter)


class Scheduler:
    """Runs what is due, in the order of simulated time; equal times in random order."""

    def __init__(self, seed):
        self.seed = seed
        self.rng = Random(seed)
        self.now_s = 1_000.0
        self.steps = 0
        self.over = False
        self.stall_rate = 0.0
        self.task = None
        self._due = []
        self._count = 0
        self._tasks = []
        self._hub = getcurrent()

    def __enter__(self):
        global _current  # noqa: PLW0603 - shims are reached from code that knows nothing of schedulers
        _current = self
        return self

    def __exit__(self, *_):
        global _current  # noqa: PLW0603
        self.over = True
        for task in self._tasks:
            if task.greenlet and not task.greenlet.dead:
                with suppress(Exception):  # what cleaning up finds is of no schedule any more
                    task.greenlet.throw()
        _current = None

    # For tasks

    def spawn(self, process, target, *args):
        """A new task of ``process``."""
        task = Task(process, self._hub, target, args)
        self._tasks.append(task)
        self.wake(task)
        return task

    def block(self, timeout_s=None):
        """Wait until woken, or for ``timeout_s``; what `wake` gave, None after the time."""
        if self.over:
            raise GreenletExit
        task = self.task
        task.ticket += 1
        if timeout_s is not None:
            self._push(self.now_s + max(0.0, timeout_s), task.process, task, task.ticket, None)
        self._hub.switch()
        if self.over:
            raise GreenletExit
        value, task.value = task.value, None
        return value

    def wake(self, task, value=True):
        """Let ``task`` go on, if it still waits for what it waits for now."""
        self._push(self.now_s, task.process, task, task.ticket, value)

    def sleep(self, seconds):
        self.block(seconds)

    def step(self):
        """A place where another task may come in between."""
        chance = self.rng.random()
        if self.over:
            raise GreenletExit
        if chance < self.stall_rate:
            began_s = self.now_s
            self.block(self.rng.random() ** 3 * STALL_S)
            self.task.process.paused_s += self.now_s - began_s
        elif chance < 0.5:
            self.block(self.rng.random() * 0.002)

    # For the world

    def at(self, delay_s, callback, *args):
        """Call ``callback`` in ``delay_s``, outside of every process: the network and the fates."""
        self._push(self.now_s + delay_s, None, None, 0, (callback, args))

    def run(self, until_s, stop=lambda: False):
        """Let everything happen up to ``until_s``, or until ``stop`` says so."""
        due = self._due
        while due and due[0][0] <= until_s and not stop():
            item = heappop(due)
            self.now_s = max(self.now_s, item[0])
            self.steps += 1
            self._do(item)
        if not stop():
            self.now_s = max(self.now_s, until_s)

    def kill(self, process):
        """SIGKILL: its tasks never run again, not even to clean up."""
        process.alive = False
        process.backlog.clear()

    def pause(self, process):
        """SIGSTOP: what becomes due for it waits."""
        process.paused, process.paused_at_s = True, self.now_s

    def resume(self, process):
        """SIGCONT."""
        if process.paused:
            process.paused = False
            process.paused_s += self.now_s - process.paused_at_s
            for item in process.backlog:
                self._push(self.now_s, *item[3:])
            process.backlog.clear()

    def _push(self, time_s, process, task, ticket, value):
        self._count += 1
        heappush(self._due, (time_s, self.rng.random(), self._count, process, task, ticket, value))

    def _do(self, item):
        _, _, _, process, task, ticket, value = item
        if process is None:
            callback, args = value
            callback(*args)
        elif not process.alive:
            return
        elif process.paused:
            process.backlog.append(item)
        elif ticket == task.ticket and not task.greenlet.dead:
            task.ticket += 1
            task.value = value
            self.task = task
            task.greenlet.switch()
            self.task = None
