"""The connector's bookkeeping under any order of events: leases and loads end exactly once, offers are what is there."""

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, precondition, rule
from kvpool_connector.vllm.jobs import LoadJob, LoadReport
from kvpool_connector.vllm.requests import RequestBook, Wait

from kvpool.testing import ManualClock

RANKS = 2
CHAINS = [[bytes([family, block]) * 16 for block in range(8)] for family in range(2)]


class Requests(RuleBasedStateMachine):
    """Two prefix families, so that requests share blocks; leases are counted like money."""

    lookups = Bundle("lookups")
    jobs = Bundle("jobs")

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.book = RequestBook(self.clock, lookup_timeout_s=1.0, lease_s=4.0)
        self.chains: dict[str, list[bytes]] = {}
        self.loading: dict[str, LoadJob] = {}
        self.failed: set[str] = set()
        self.reports: dict[int, int] = {}
        self.leases: set[int] = set()
        self.last_lease = 0

    def release(self, lease: int) -> None:
        if lease:
            assert lease in self.leases, "released twice, or never granted"
            self.leases.remove(lease)

    @rule(name=st.sampled_from("abcd"), family=st.sampled_from([0, 1]), blocks=st.integers(1, 8))
    def add(self, name: str, family: int, blocks: int) -> None:
        if name not in self.chains and name not in self.loading:
            self.chains[name] = CHAINS[family][:blocks]
            self.book.added(name)

    @rule(target=lookups, name=st.sampled_from("abcd"))
    def look_up(self, name: str):
        if name not in self.chains or not self.book.wants_lookup(name, self.chains[name]):
            return multiple()
        lookup, superseded = self.book.asked_pool(name, self.chains[name])
        self.release(superseded)
        return name, lookup.number

    @rule(lookup=consumes(lookups), matched=st.integers(0, 8))
    def answer(self, lookup, matched: int) -> None:
        lease = 0
        if matched:
            self.last_lease += 1
            lease = self.last_lease
            self.leases.add(lease)
        self.release(self.book.pool_answered(*lookup, matched, lease))

    @rule(target=jobs, name=st.sampled_from("abcd"), local=st.integers(0, 8), chosen=st.booleans())
    def schedule(self, name: str, local: int, chosen: bool):
        if name not in self.chains or name in self.loading:
            return multiple()
        chain = self.chains[name]
        local = min(local, len(chain))
        offer = self.book.offer(name, chain, local)
        assert offer == self.book.offer(name, chain, local), "asking changes nothing"
        if isinstance(offer, Wait):
            return multiple()
        assert 0 <= offer <= len(chain) - local
        assert not (offer and name in self.failed)
        table = list(range(50, 50 + len(chain)))
        job = self.book.allocated(name, chain, table, offer if chosen else 0, RANKS)
        if job is None:
            self.release(self.book.take_lease(name))
            return multiple()
        assert job.blocks == table[local : local + offer]
        assert job.hashes == b"".join(chain[: local + offer])
        self.loading[name] = job
        return multiple(*[job] * RANKS)

    @rule(job=consumes(jobs), failed_from=st.none() | st.integers(0, 7))
    def report(self, job: LoadJob, failed_from: int | None) -> None:
        failed_from = None if failed_from is None else min(failed_from, len(job.blocks) - 1)
        if failed_from is not None and job.request_id in self.chains:
            self.failed.add(job.request_id)
        loading = self.book.load_reported(job.number, LoadReport(failed_from, "evicted", 0, 0.1))
        self.reports[job.number] = self.reports.get(job.number, 0) + 1
        assert (loading is not None) == (self.reports[job.number] == RANKS)
        if loading is not None:
            self.release(loading.lease)
            del self.loading[job.request_id]

    @rule(name=st.sampled_from("abcd"), full=st.integers(0, 8))
    def save(self, name: str, full: int) -> None:
        unsaved = self.book.unsaved(name, full)
        assert not (unsaved and name in self.loading)
        if unsaved:
            self.book.saving(name, unsaved.stop)
            assert not self.book.unsaved(name, full)

    @rule(name=st.sampled_from("abcd"))
    def finish(self, name: str) -> None:
        self.release(self.book.finished(name))
        self.chains.pop(name, None)
        self.failed.discard(name)

    @precondition(lambda self: self.chains)
    @rule()
    def reset(self) -> None:
        for name in self.chains:
            self.release(self.book.take_lease(name))
        self.book.forget_lookups()

    @rule(seconds=st.floats(0.1, 6))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @invariant()
    def agrees(self) -> None:
        self.book.check_integrity()
        assert self.book.loads == len(self.loading)
        assert len(self.book) == len(self.chains)

    def teardown(self) -> None:
        for name in list(self.chains):
            self.release(self.book.finished(name))
        for job in list(self.loading.values()):
            for _ in range(RANKS - self.reports.get(job.number, 0)):
                loading = self.book.load_reported(job.number, LoadReport(None, "", 0, 0.1))
            self.release(loading.lease)
        assert not self.leases, "a lease was lost"
        assert self.book.loads == 0


TestRequests = Requests.TestCase
