"""Moving blocks between nodes: copies of what is hot, and drains. Shares the service's lock and never holds it long."""

import threading
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice

from kvpool.core.clock import Clock
from kvpool.core.directory import Directory, Drain
from kvpool.core.errors import UsageError
from kvpool.core.members import QUIET, Member, Members, MemberState
from kvpool.ops.logging import get_logger
from kvpool.ops.settings import MetaSettings

ORDERS_PER_TICK = 32
RUNS_PER_TICK = 64
"""Copies of hot blocks ordered in one tick, and runs of them looked at."""

PASSES_MAX = 3
"""Times that a drain looks through what is left: some copies fail, and blocks in flight arrive meanwhile."""

log = get_logger(__name__)


class DrainState(StrEnum):
    """State of a drain."""

    COPYING = "copying"
    DRAINED = "drained"
    """What could be copied was; the node stays, or is about to leave."""
    LEFT = "left"
    CANCELLED = "cancelled"
    LOST = "lost"
    """The node was lost before it was drained."""


@dataclass(frozen=True, slots=True)
class DrainProgress:
    """How far a drain has come: blocks without a copy elsewhere, when it began and now, and why some stayed behind."""

    node_id: str
    state: DrainState
    blocks: int
    size_bytes: int
    left_blocks: int
    left_bytes: int
    reason: str


@dataclass(slots=True)
class _Job:
    drain: Drain
    member: Member
    stay: bool = True
    deadline_s: float = 0.0
    blocks: int = 0
    size_bytes: int = 0
    left_blocks: int = 0
    left_bytes: int = 0
    state: DrainState = DrainState.COPYING
    passes: int = 0
    reason: str = ""


class Mover:
    """Orders copies. Thread-safe.

    Args:
        directory: Guarded by the lock of ``orders_changed``.
        members: The same.
        orders_changed: Told when there are new orders for nodes, or new modes.
        settings: Limits and times.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        directory: Directory,
        members: Members,
        orders_changed: threading.Condition,
        settings: MetaSettings,
        clock: Clock,
    ) -> None:
        self._directory = directory
        self._members = members
        self._changed = orders_changed
        self._settings = settings
        self._clock = clock
        self._jobs: dict[str, _Job] = {}

    def tick(self) -> None:
        """Copy what is hot, and see to the drains; called every heartbeat or so."""
        self._replicate()
        self.move_tiers()
        for job in list(self._jobs.values()):
            self._drive(job)
            self._end_pass(job)

    def settled(self) -> None:
        """Something was written or read, or a copy has come to an end: there may be room for the next one."""
        self.move_tiers()
        for job in list(self._jobs.values()):
            if job.state == DrainState.COPYING:
                self._drive(job)
                with self._changed:
                    if self._measure(job).left_blocks == 0 and self._directory.is_idle(job.drain):
                        self._finish(job, "")

    def drain(self, node_id: str, timeout_s: float, *, stay: bool) -> DrainProgress:
        """Begin to copy a node's blocks elsewhere, or go on with it under new terms.

        Raises:
            UsageError: No live node has this name.
        """
        with self._changed:
            member = self._live(node_id)
            member.drains = True
            self.admit(member)
            job = self._jobs.get(node_id)
            if job is None or job.state != DrainState.COPYING or job.member is not member:
                job = self._jobs[node_id] = _Job(Drain(node_id), member)
                self._measure(job)
                job.blocks, job.size_bytes = job.left_blocks, job.left_bytes
            job.stay, job.deadline_s, job.passes = stay, self._clock() + timeout_s, 0
            self._changed.notify_all()
        log.info("drain_began", node=node_id, blocks=job.left_blocks, stay=stay)
        self._begin_pass(job)
        self._drive(job)
        return self.progress(node_id)

    def progress(self, node_id: str) -> DrainProgress:
        """How far the latest drain of a node has come; raises UsageError when there was none."""
        with self._changed:
            job = self._job(node_id)
            if job.state in {DrainState.COPYING, DrainState.DRAINED}:
                self._measure(job)
            left = (job.left_blocks, job.left_bytes)
            return DrainProgress(node_id, job.state, job.blocks, job.size_bytes, *left, job.reason)

    def cancel(self, node_id: str) -> DrainProgress:
        """Place blocks on the node again; raises UsageError when it does not drain."""
        with self._changed:
            member = self._live(node_id)
            if not member.drains or member.leaves:
                raise UsageError(f"node {node_id!r} is not draining, or is about to leave: nothing to cancel")
            job = self._jobs.setdefault(node_id, _Job(Drain(node_id), member))
            job.state = DrainState.CANCELLED
            member.drains = False
            self.admit(member)
            self._changed.notify_all()
        log.info("drain_cancelled", node=node_id)
        return self.progress(node_id)

    def admit(self, member: Member) -> None:
        """Place blocks on a node that has reported, unless it drains or is quiet; the caller holds the lock."""
        for segment in member.segments:
            self._directory.set_accepting(segment.segment_id, accepting=not (member.drains or member.quiet))
        self._members.set_state(member, MemberState.DRAINING if member.drains else MemberState.READY)

    def heed_silence(self) -> None:
        """Place nothing on nodes that have been silent for a while, if others are not; the caller holds the lock.

        A node that hangs looks empty: whatever is evicted there makes room that nobody can write to.
        """
        silent = self._members.silent(QUIET)
        serving = [member for member in self._members if member.state in {MemberState.READY, MemberState.DRAINING}]
        some_speak = any(member not in silent and not member.drains for member in serving)
        for member in serving:
            quiet = some_speak and member in silent
            if quiet != member.quiet:
                member.quiet = quiet
                self.admit(member)
                log.info("node_quiet" if quiet else "node_speaks", node=member.node_id)

    def left(self, member: Member) -> None:
        """A node's session has ended; the caller holds the lock."""
        job = self._jobs.get(member.node_id)
        if job is None or job.member is not member or job.state not in {DrainState.COPYING, DrainState.DRAINED}:
            return
        job.state = DrainState.LEFT if job.state == DrainState.DRAINED else DrainState.LOST

    def _replicate(self) -> None:
        settings = self._settings
        if settings.replicas_max < 2:
            return
        with self._changed:
            if len({segment.node_id for segment in self._directory.segments() if segment.accepts}) < 2:
                return
            demand = self._directory.demand()
        orders_left = ORDERS_PER_TICK
        runs = demand.hot_runs(settings.replica_read_rate, settings.replicas_max)
        for run in islice(runs, RUNS_PER_TICK):
            while orders_left:
                with self._changed:
                    blocks = self._directory.replicate(run, settings.reservation_ttl_s)
                    if not blocks:
                        break
                    self._changed.notify_all()
                orders_left -= 1
                log.info("replica_ordered", blocks=blocks, copies=run.copies)

    def move_tiers(self) -> None:
        """Order copies between memory and disk while there may be more, letting others have the lock between two."""
        more = self._directory.tiers_wait  # nothing changes if this misses what comes now: it is asked again soon
        while more:
            with self._changed:
                more = self._directory.move_tiers(self._settings.reservation_ttl_s) > 0
                if more:
                    self._changed.notify_all()

    def _begin_pass(self, job: _Job) -> None:
        with self._changed:
            survey = self._directory.survey(job.drain.node_id)
        rows = survey.in_order()
        with self._changed:
            job.passes += 1
            job.drain.begin(rows)

    def _drive(self, job: _Job) -> None:
        """Order copies while there may be more, letting others have the lock between two."""
        more = True
        while more:
            with self._changed:
                if job.state != DrainState.COPYING:
                    return
                more = self._directory.advance(job.drain, self._settings.reservation_ttl_s)
                self._changed.notify_all()

    def _end_pass(self, job: _Job) -> None:
        """See whether a drain has come to its end, or should look again at what is left."""
        with self._changed:
            if job.state != DrainState.COPYING:
                return
            self._measure(job)
            if self._clock() >= job.deadline_s:
                self._finish(job, "timeout" if job.left_blocks else "")
                return
            if not self._directory.is_idle(job.drain):
                return
            if not job.left_blocks or not job.drain.has_room or job.passes >= PASSES_MAX:
                self._finish(job, "" if not job.left_blocks else "failed" if job.drain.has_room else "no_room")
                return
        self._begin_pass(job)
        self._drive(job)

    def _finish(self, job: _Job, reason: str) -> None:
        job.state, job.reason = DrainState.DRAINED, reason
        job.member.leaves = not job.stay
        self._changed.notify_all()
        log.info("drain_ended", node=job.drain.node_id, left_blocks=job.left_blocks, reason=reason, stay=job.stay)

    def _measure(self, job: _Job) -> _Job:
        """Count what only this node holds."""
        segments = [s for s in self._directory.segments() if s.node_id == job.drain.node_id]
        job.left_blocks = sum(segment.blocks - segment.surplus_blocks for segment in segments)
        job.left_bytes = sum(segment.used_bytes - segment.surplus_bytes for segment in segments)
        return job

    def _live(self, node_id: str) -> Member:
        member = self._members.get(node_id)
        if member is None or member.state not in {MemberState.READY, MemberState.DRAINING}:
            known = ", ".join(m.node_id for m in self._members if m.state != MemberState.LOST)
            raise UsageError(f"no node {node_id!r} is ready; the pool has {known or 'none'}")
        return member

    def _job(self, node_id: str) -> _Job:
        if node_id not in self._jobs:
            raise UsageError(f"node {node_id!r} was not drained since the metadata service started")
        return self._jobs[node_id]
