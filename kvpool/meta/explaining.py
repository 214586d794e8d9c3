"""Why look-ups missed, over all namespaces and nodes: what one directory entry cannot say by itself."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

from kvpool.core.directory import Explanation, Memory, MissReason
from kvpool.core.errors import UnknownNamespaceError
from kvpool.core.members import Member, MemberState
from kvpool.core.namespace import Namespace
from kvpool.meta.serving import Serving
from kvpool.meta.store.base import Store

ELSEWHERE_MAX = 8
"""Other namespaces named for one block."""

_UNKNOWN = frozenset({MissReason.COLD, MissReason.RECOVERING})
_RANKS: dict[MissReason | None, int] = {
    None: 3,
    MissReason.IN_FLIGHT: 2,
    MissReason.PARENT_MISSING: 2,
    MissReason.COLD: 0,
    MissReason.RECOVERING: 0,
}
_LEFT = 1
"""Which of a model's namespaces an answer is about: where the block is, else where it was."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where a block is looked for.

    Attributes:
        namespaces: Ids of the open namespaces, in which it may be.
        wanted: The namespace asked for, to compare others with; None when none was described.
        tenant: Whose namespaces the caller may know of; None: all.
    """

    namespaces: tuple[bytes, ...]
    wanted: Namespace | None = None
    tenant: str | None = None


@dataclass(frozen=True, slots=True)
class BlockExplained:
    """What is known of one block, in the namespace that knows it best; ``elsewhere``: others that know its hash."""

    namespace: bytes
    explanation: Explanation
    elsewhere: tuple[tuple[bytes, tuple[str, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class Explained:
    """The blocks, and how much the service can know at all; see admin.proto."""

    blocks: list[BlockExplained]
    memory: Memory
    uptime_s: float
    joining: list[str] = field(default_factory=list)


def find_target(
    service: Serving, namespace_id: bytes, wanted: Namespace | None, model: str, tenant: str | None = None
) -> Target:
    """Where to look: by id, else by document, else by model, else everywhere; among ``tenant``'s, if it is given."""
    namespaces = [n for n in service.ask(lambda directory, _: directory.namespaces()) if _is_of(n, tenant)]
    if namespace_id:
        wanted = next((namespace for namespace in namespaces if namespace.id == namespace_id), None)
        if wanted is None:
            raise UnknownNamespaceError(
                f"namespace {namespace_id.hex()[:16]} is not open here: nobody has used it since this service started. "
                "Give its document, or the model, to see in which fields it differs from those that are open"
            )
    if wanted is not None:
        return Target(tuple(n.id for n in namespaces if n.id == wanted.id), wanted, tenant)
    return Target(tuple(n.id for n in namespaces if not model or n.model == model), tenant=tenant)


def explain_blocks(service: Serving, target: Target, hashes: Iterable[bytes]) -> Explained:
    """Why each of the blocks can or cannot be matched; the service is held for one block at a time."""
    blocks = [service.ask(partial(_explain, target, block_hash)) for block_hash in hashes]
    memory, joining = service.ask(lambda directory, members: (directory.memory(), _joining(members)))
    return Explained(blocks, memory, service.clock() - service.started_s, joining)


def _explain(target: Target, block_hash: bytes, directory: Store, members: Iterable[Member]) -> BlockExplained:
    best = max(
        ((n, directory.explain_block(n, block_hash)) for n in target.namespaces),
        key=lambda found: _RANKS.get(found[1].reason, _LEFT),
        default=(target.wanted.id if target.wanted is not None else b"", Explanation(MissReason.COLD)),
    )
    if best[1].reason not in _UNKNOWN:
        return BlockExplained(*best)
    elsewhere = _elsewhere(directory, target, block_hash)
    if elsewhere:
        return BlockExplained(best[0], Explanation(MissReason.WRONG_NAMESPACE), elsewhere)
    joining = _joining(members)
    if joining:
        return BlockExplained(best[0], Explanation(MissReason.RECOVERING, nodes=tuple(joining)))
    return BlockExplained(*best)


def _elsewhere(directory: Store, target: Target, block_hash: bytes) -> tuple[tuple[bytes, tuple[str, ...]], ...]:
    found: list[tuple[bytes, tuple[str, ...]]] = []
    for namespace in directory.namespaces():
        if not _is_of(namespace, target.tenant):
            continue
        if namespace.id in target.namespaces or directory.explain(namespace.id, block_hash) in _UNKNOWN:
            continue
        differences = target.wanted.difference(namespace) if target.wanted is not None else ()
        found.append((namespace.id, tuple(str(difference) for difference in differences)))
        if len(found) == ELSEWHERE_MAX:
            break
    return tuple(found)


def _is_of(namespace: Namespace, tenant: str | None) -> bool:
    return tenant is None or namespace.tenant == tenant


def _joining(members: Iterable[Member]) -> list[str]:
    return [member.node_id for member in members if member.state == MemberState.JOINING]
