"""A timing probe: can a client of one tenant tell by time what another tenant has, where the answers are the same?

A client asks about another tenant's blocks and about nobody's, in turns, in a random order, over one connection. It is
told how often a look at the clock alone would say which was which: half the time, if there is nothing to see.
"""

import os
import random
import time
from collections.abc import Iterator
from contextlib import closing

import msgspec
import numpy as np

import kvpool
from kvpool.bench.measure import percentile, pool_processes, rounded
from kvpool.core.errors import KvpoolError, UnknownNamespaceError
from kvpool.core.identities import META, client_identity
from kvpool.core.limits import HASH_BYTES, PAGE_BYTES
from kvpool.ops.credentials import CredentialFiles, Credentials
from kvpool.ops.issuing import Authority
from kvpool.transport.wire.connection import Connection
from kvpool.transport.wire.messages import MatchReply, MatchRequest

BLOCKS = 64
DAYS = 30
_NODE_BYTES = 4 * BLOCKS * PAGE_BYTES
_TIMEOUT_S = 20.0
_NAMESPACE = kvpool.Namespace(model="kvpool-probe", block_tokens=16, block_bytes=PAGE_BYTES)


class ProbeRow(msgspec.Struct, frozen=True, kw_only=True, tag_field="bench", tag="probe"):
    """Look-ups about ``what``, of another tenant's and of nobody's.

    ``told_apart`` is how probable it is that the slower of two answers is the one about the other tenant's: 0.5 tells
    nothing, 0 and 1 everything.
    """

    what: str
    theirs_p50_us: float
    nobodys_p50_us: float
    told_apart: float
    samples: int


def measure_probe(samples: int) -> Iterator[ProbeRow]:
    """Ask a pool of processes with TLS; raises KvpoolError when an answer gives away what it should not."""
    with pool_processes(_NODE_BYTES, tls=True) as pool:
        assert pool.tls is not None, "it was asked for"
        assert pool.tls.dir is not None, "it was asked for"
        with kvpool.connect(pool.uri, transports=["tcp"], timeout_s=_TIMEOUT_S, tls=pool.tls) as victim:
            theirs, chain = victim.namespace(_NAMESPACE), os.urandom(BLOCKS * HASH_BYTES)
            if theirs.store(chain, np.ones((BLOCKS, PAGE_BYTES), np.uint8)).stored != BLOCKS:
                raise KvpoolError("the probed blocks were not stored")
            Authority(pool.tls.dir, DAYS).issue("rival", client_identity("rival", "probe"), renew=True)
            pair = pool.tls.dir / "rival.pem", pool.tls.dir / "rival-key.pem"
            tls = kvpool.TlsSettings(ca=pool.tls.dir / "ca.pem", cert=pair[0], key=pair[1])
            with kvpool.connect(pool.uri, transports=["tcp"], timeout_s=_TIMEOUT_S, tls=tls) as rival:
                own = rival.namespace(_NAMESPACE).namespace.id
            peer = Credentials(CredentialFiles(pool.tls.dir / "ca.pem", *pair)).toward(META)
            nothing = os.urandom(BLOCKS * HASH_BYTES)
            with closing(Connection(pool.framed, "probe", _TIMEOUT_S, peer)) as connection:
                nobodys_id = os.urandom(len(own))
                yield _compare(
                    "a namespace's id", connection, (theirs.namespace.id, chain), (nobodys_id, chain), samples
                )
                yield _compare("a prompt's hashes", connection, (own, chain), (own, nothing), samples)


def _compare(
    what: str, connection: Connection, theirs: tuple[bytes, bytes], nobodys: tuple[bytes, bytes], samples: int
) -> ProbeRow:
    """Ask both questions in a random order."""
    order = [True, False] * (samples + samples // 10)
    random.shuffle(order)
    times_s: dict[bool, list[float]] = {True: [], False: []}
    answers = set()
    for is_theirs in order:
        namespace, hashes = theirs if is_theirs else nobodys
        began_ns = time.perf_counter_ns()
        answers.add(_answer(connection, MatchRequest(namespace, hashes, 0, 0)))
        times_s[is_theirs].append((time.perf_counter_ns() - began_ns) / 1e9)
    if len(answers) != 1:
        raise KvpoolError(f"the answers themselves tell {what} of another tenant from nobody's: {answers}")
    slow, fast = (times_s[is_theirs][-samples:] for is_theirs in (True, False))
    return ProbeRow(
        what=what,
        theirs_p50_us=rounded(percentile(slow, 50) * 1e6),
        nobodys_p50_us=rounded(percentile(fast, 50) * 1e6),
        told_apart=rounded(_slower(slow, fast)),
        samples=samples,
    )


def _answer(connection: Connection, request: MatchRequest) -> str:
    try:
        return repr(connection.call(request, MatchReply, _TIMEOUT_S))
    except UnknownNamespaceError as error:
        return str(error)


def _slower(times_s: list[float], others_s: list[float]) -> float:
    """How probable it is that one of ``times_s`` is longer than one of ``others_s``; of equal ones half are."""
    others = np.sort(others_s)
    below = np.searchsorted(others, times_s, "left") + np.searchsorted(others, times_s, "right")
    return float(below.mean() / (2 * len(others)))
