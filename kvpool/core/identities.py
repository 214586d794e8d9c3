"""Identities: who a certificate or a token says its holder is, as a URI.

    kvpool://meta                   the metadata service: a server alone, it calls nobody
    kvpool://node/NODE_ID           a store node; a server and a caller
    kvpool://client/TENANT/NAME     an engine, or whatever else stores and loads blocks of one tenant
    kvpool://admin/NAME             an operator
    kvpool://observer/NAME          monitoring

Names are percent-encoded, so that any text can be one.
"""

from urllib.parse import quote, unquote

from kvpool.core.errors import AuthenticationError
from kvpool.core.principals import Principal, Role

SCHEME = "kvpool://"
META = f"{SCHEME}meta"
IDENTITY_CHARS_MAX = 1024

CALLERS = "kvpool://node/ID, kvpool://client/TENANT/NAME, kvpool://admin/NAME or kvpool://observer/NAME"

_ROLES = {
    Role.NODE: frozenset({Role.NODE}),
    Role.CLIENT: frozenset({Role.CLIENT}),
    Role.ADMIN: frozenset({Role.ADMIN, Role.OBSERVER}),
    Role.OBSERVER: frozenset({Role.OBSERVER}),
}
"""What the holder of each kind of identity may be."""


def node_identity(node_id: str) -> str:
    """The identity of a store node."""
    return f"{SCHEME}{Role.NODE}/{_encoded(node_id)}"


def client_identity(tenant: str, name: str) -> str:
    """The identity of a client of ``tenant``."""
    return f"{SCHEME}{Role.CLIENT}/{_encoded(tenant)}/{_encoded(name)}"


def operator_identity(role: Role, name: str) -> str:
    """The identity of an admin or an observer."""
    return f"{SCHEME}{role}/{_encoded(name)}"


def principal_of_identity(identity: str) -> Principal:
    """The caller who holds ``identity``.

    Raises:
        AuthenticationError: It is none, or that of the metadata service, which calls nobody.
    """
    kind, _, rest = identity.removeprefix(SCHEME).partition("/")
    names = [unquote(name, errors="replace") for name in rest.split("/")]
    wanted = 2 if kind == Role.CLIENT else 1
    known = identity.startswith(SCHEME) and len(identity) <= IDENTITY_CHARS_MAX and kind in _ROLES
    if not known or len(names) != wanted or not all(names):
        raise AuthenticationError(f"{identity[:80]!r} is no identity of a caller; those are {CALLERS}")
    return Principal(names[-1], _ROLES[Role(kind)], names[0] if kind == Role.CLIENT else None)


def _encoded(name: str) -> str:
    return quote(name, safe="")
