"""Who is calling: what services decide by. Whoever authenticates a connection makes it; a caller only claims a name."""

from dataclasses import dataclass
from enum import StrEnum

from kvpool.core.errors import ForbiddenError


class Role(StrEnum):
    """What a caller may ask for."""

    CLIENT = "client"
    NODE = "node"
    ADMIN = "admin"
    OBSERVER = "observer"


@dataclass(frozen=True, slots=True)
class Principal:
    """A caller.

    Attributes:
        name: For logs; of a node, its id.
        roles: What it may ask for.
        tenant: Whose blocks it may know of; None: of all tenants.
    """

    name: str
    roles: frozenset[Role]
    tenant: str | None


def anyone(name: str) -> Principal:
    """Who calls where nobody is authenticated, by the name it claims: on loopback, or with ``--insecure``."""
    return Principal(name, frozenset(Role), None)


def require_node(principal: Principal, node_id: str) -> None:
    """The caller must be the node ``node_id``, where anybody is told from anybody; raises ForbiddenError."""
    if principal.roles == frozenset(Role):  # `anyone`
        return
    if Role.NODE not in principal.roles or principal.name != node_id:
        roles = ", ".join(sorted(principal.roles))
        raise ForbiddenError(f"the caller is {principal.name!r} ({roles}); this is for node {node_id!r} alone")
