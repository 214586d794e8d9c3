"""Copies in a small pool: what is ordered, fetched and drained, as the service and its nodes would do it."""

from fake_node import chain

from kvpool.core.directory import CommitStatus, DirectoryConfig, Drain, HotRun

TTL_S = 30.0
GENEROUS = DirectoryConfig(age_slack=0.0, replica_budget=1.0, replicas_max=3)


def rows(pool, hashes, namespace=0):
    return tuple(pool.directory._state.chains.indexes[namespace][h] for h in hashes)


def replicate(pool, hashes, copies=2):
    """Order one copy; the blocks that it is of."""
    return pool.directory.replicate(HotRun(rows(pool, hashes), copies), TTL_S)


def store_on_first(pool, *tokens):
    """Store a chain on the first segment alone."""
    for segment in pool.segments[1:]:
        pool.directory.set_accepting(segment.segment_id, accepting=False)
    pool.store(chain(*tokens))
    for segment in pool.segments[1:]:
        pool.directory.set_accepting(segment.segment_id, accepting=True)
    return chain(*tokens)


def store_with_copy(pool, *tokens):
    """Store a chain on the first segment, with a copy of it elsewhere."""
    hashes = store_on_first(pool, *tokens)
    assert replicate(pool, hashes) == len(hashes)
    [copy] = pool.copies()
    assert pool.fetch(copy) == [CommitStatus.COMMITTED] * len(hashes)
    pool.directory.check_integrity()
    return hashes


def places(pool, hashes):
    """Numbers of the segments that hold each block."""
    found = pool.directory.locate(pool.namespace.id, b"".join(hashes))
    held = [set() for _ in hashes]
    for block, segment in zip(found.block, found.segment, strict=True):
        held[block].add(segment)
    return held


def drain(pool, node_id, passes=1):
    """Copy what can be copied off a node; the drain."""
    for segment in pool.segments:
        if segment.node_id == node_id:
            pool.directory.set_accepting(segment.segment_id, accepting=False)
    job = Drain(node_id)
    for _ in range(passes):
        job.begin(pool.directory.survey(node_id).in_order())
        while not pool.directory.is_idle(job):
            while pool.directory.advance(job, TTL_S):
                pass
            for copy in pool.copies():
                pool.fetch(copy)
            pool.directory.check_integrity()
    return job
