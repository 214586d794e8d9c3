"""What simulated clients do: they put and get chains of a small tree, in three namespaces, through the real client."""

from itertools import product

import numpy as np

from kvpool.core.directory import MissReason
from kvpool.core.errors import KvpoolError, UnavailableError
from kvpool.core.keys import chain_hashes
from kvpool.core.namespace import Namespace
from kvpool.testing.history import Call, Get, Put, find_attempt, make_payload

from .scheduler import current
from .shims import COPY_BYTES

SMALL = Namespace(model="small", block_tokens=1, block_bytes=3 * COPY_BYTES)
LARGE = Namespace(model="large", block_tokens=1, block_bytes=4 * COPY_BYTES)
SHARDED = Namespace(model="sharded", block_tokens=1, block_bytes=2 * COPY_BYTES, shards=2)
NAMESPACES = (SMALL, LARGE, SHARDED)
"""Blocks of one page, of two, and of two shards."""

THINK_S = 0.7
DEPTH = 3
CHAINS = {
    namespace.id: [
        chain_hashes(tokens, 1, parent=namespace.id)
        for depth in range(1, DEPTH + 1)
        for tokens in product((0, 1), repeat=depth)
    ]
    for namespace in NAMESPACES
}
"""Chains by namespace id: any two of one namespace share the blocks of their common prefix."""

NAMESPACE_OF = {
    block_hash: namespace for namespace in NAMESPACES for hashes in CHAINS[namespace.id] for block_hash in hashes
}
SLACK_S = 0.05
"""By how much a call may miss its deadline: the last piece of a copy that was under way."""


def key_of(block_hash, shard):
    """A block's shard as histories name it."""
    return f"{block_hash.hex()}/{shard}"


def identify(block_hash, shard, payload):
    """The put whose bytes these are, or None."""
    return find_attempt(key_of(block_hash, shard), bytes(payload), COPY_BYTES)


class Engine:
    """One client's program: ``calls`` calls, each recorded in the history.

    Args:
        history: Where to.
        rng: Its choices.
        process: Its process, whose pauses extend deadlines.
        calls: How many.
        attempts: Numbers for puts, unique in the schedule.
        put_share: Part of its calls that put.
        until_s: When it makes no more calls.
    """

    def __init__(self, history, rng, process, calls, attempts, put_share, until_s):
        self.history = history
        self.rng = rng
        self.process = process
        self.calls = calls
        self.attempts = attempts
        self.put_share = put_share
        self.until_s = until_s
        self.hits = 0
        self.loaded = 0
        self.missed_in_lease = []
        self.client = None

    def run(self, client):
        """All calls, one after the other."""
        self.client = client
        keyspaces = {}
        scheduler = current()
        for _ in range(self.calls):
            scheduler.sleep(self.rng.random() * THINK_S)
            if scheduler.now_s >= self.until_s:
                return
            namespace = self.rng.choices(NAMESPACES, (6, 2, 2))[0]
            if namespace.id not in keyspaces:
                try:
                    keyspaces[namespace.id] = self._timed("namespace", client.namespace, namespace)
                except UnavailableError:
                    continue
            self._one_call(keyspaces[namespace.id], self.rng.choice(CHAINS[namespace.id]))

    def _one_call(self, keyspace, hashes):
        chance = self.rng.random()
        if chance < self.put_share:
            self._put(keyspace, hashes)
        elif chance < 0.95:
            self._get(keyspace, hashes)
        else:
            self._load(keyspace, hashes, 0, self.rng.randrange(keyspace.namespace.shards))

    def _timed(self, what, call, *args, **options):
        """Make the call, and record when it began and ended."""
        timeout_s = options.setdefault("timeout_s", self.rng.choice((0.3, 1.0, 3.0, 6.0)))
        began_s, paused_s, record = current().now_s, self.process.paused_s, None
        try:
            return call(*args, **options)
        finally:
            deadline_s = began_s + timeout_s + self.process.paused_s - paused_s + SLACK_S
            record = Call(f"{self.process} {what}", began_s, deadline_s, current().now_s)
            self.history.add(record)

    def _payloads(self, keyspace, hashes, shard, attempt):
        size_bytes, now_s = keyspace.namespace.block_bytes, current().now_s
        for block_hash in hashes:
            self.history.add(Put(key_of(block_hash, shard), attempt, now_s))
        payloads = [make_payload(key_of(h, shard), attempt, size_bytes, COPY_BYTES) for h in hashes]
        if self.rng.random() < 0.2:
            return [bytearray(payload) for payload in payloads]
        return np.frombuffer(b"".join(payloads), np.uint8)

    def _put(self, keyspace, hashes):
        attempt = next(self.attempts)
        if keyspace.namespace.shards == 1 and self.rng.random() < 0.8:
            self._timed("store", keyspace.store, hashes, self._payloads(keyspace, hashes, 0, attempt))
            return
        try:
            reservation = self._timed("reserve", keyspace.reserve, hashes)
        except KvpoolError:
            return
        failed = set()
        shards = list(range(keyspace.namespace.shards))
        self.rng.shuffle(shards)
        for shard in shards:
            if self.rng.random() < 0.05:
                continue  # a rank that never comes
            sources = self._payloads(keyspace, hashes, shard, attempt)
            written = self._timed("write", keyspace.write, reservation, sources, shard=shard)
            failed.update(written.failed)
        if failed:
            self._timed("abort", keyspace.abort, reservation, sorted(failed))

    def _get(self, keyspace, hashes):
        lease_s = self.rng.choice((0.0, 1.0, 3.0))
        matched = self._timed("match", keyspace.match, hashes, lease_s=lease_s)
        if not matched.blocks:
            return
        self.hits += matched.blocks
        until_s = current().now_s + lease_s
        shard = self.rng.randrange(keyspace.namespace.shards)
        current().sleep(self.rng.random() * 0.8 * lease_s)
        reasons = self._load(keyspace, hashes[: matched.blocks], 0, shard)
        missed = [reason for reason in reasons if reason not in {None, MissReason.OVER_DEADLINE}]
        if matched.lease and current().now_s < until_s and missed:
            self.missed_in_lease.append((current().now_s, missed))
        if matched.lease and self.rng.random() < 0.7:
            self._timed("release", keyspace.release, matched)

    def _load(self, keyspace, hashes, first, shard):
        size_bytes, began_s = keyspace.namespace.block_bytes, current().now_s
        if self.rng.random() < 0.2:
            buffers = [np.empty(size_bytes, np.uint8) for _ in hashes]
        else:
            buffers = np.empty((len(hashes), size_bytes), np.uint8)
        result = self._timed("load", keyspace.load, b"".join(hashes), buffers, first=first, shard=shard)
        for block_hash, reason, payload in zip(hashes, result.reasons, buffers, strict=True):
            if reason is None:
                attempt = identify(block_hash, shard, payload)
                self.history.add(Get(key_of(block_hash, shard), attempt, began_s, current().now_s))
                self.loaded += 1
        return result.reasons
