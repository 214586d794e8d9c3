"""Who is calling: what services decide by. Whoever authenticates a connection makes it; a caller only claims a name."""

from dataclasses import dataclass
from enum import StrEnum


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
