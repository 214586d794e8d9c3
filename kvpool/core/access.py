"""Who may ask for what: one table for every gRPC method and every framed request, and one rule for namespaces.

What has no line here is refused. A caller whom nobody has authenticated (`anyone`: on loopback, on a Unix socket, or
with ``--insecure``) has every role and no tenant of its own, so that nothing is refused to it.
"""

from collections.abc import Mapping

from kvpool.core.errors import ForbiddenError
from kvpool.core.principals import Principal, Role

_CLIENT = frozenset({Role.CLIENT})
_NODE = frozenset({Role.NODE})
_ADMIN = frozenset({Role.ADMIN})
_BLOCKS = frozenset({Role.CLIENT, Role.NODE})
"""Who reads blocks: engines, and nodes that copy them."""
_OPERATORS = frozenset({Role.ADMIN, Role.OBSERVER})
_WATCHERS = frozenset({Role.ADMIN, Role.OBSERVER, Role.CLIENT})
"""Who sees what is there: operators all of it, a client what is its tenant's."""
_OWNERS = frozenset({Role.ADMIN, Role.CLIENT})
_ALL = frozenset(Role)

OPEN_METHODS = "/grpc.health."
"""Open to everybody who ended the handshake: it tells nothing but whether a service is ready."""

METHODS: Mapping[str, frozenset[Role]] = {
    "/kvpool.v1.Directory/GetPool": _ALL,
    "/kvpool.v1.Directory/OpenNamespace": _CLIENT,
    "/kvpool.v1.Directory/DescribeNamespace": frozenset({Role.CLIENT, Role.NODE, Role.ADMIN}),
    "/kvpool.v1.Directory/Match": _CLIENT,
    "/kvpool.v1.Directory/Release": _CLIENT,
    "/kvpool.v1.Directory/Locate": _CLIENT,
    "/kvpool.v1.Directory/Reserve": _CLIENT,
    "/kvpool.v1.Directory/Abort": _BLOCKS,
    "/kvpool.v1.Directory/ReportBad": _CLIENT,
    "/kvpool.v1.Membership/Control": _NODE,
    "/kvpool.v1.Membership/Commit": _NODE,
    "/kvpool.v1.Admin/GetStatus": _WATCHERS,
    "/kvpool.v1.Admin/Explain": _WATCHERS,
    "/kvpool.v1.Admin/GetBlock": _WATCHERS,
    "/kvpool.v1.Admin/Pin": _OWNERS,
    "/kvpool.v1.Admin/Unpin": _OWNERS,
    "/kvpool.v1.Admin/Drain": _ADMIN,
    "/kvpool.v1.Admin/GetDrain": _OPERATORS,
    "/kvpool.v1.Admin/CancelDrain": _ADMIN,
    "/kvpool.v1.Admin/SetQuota": _ADMIN,
    "/kvpool.v1.StoreNode/Prepare": _CLIENT,
    "/kvpool.v1.StoreNode/Commit": _CLIENT,
    "/kvpool.v1.StoreNode/Abort": _CLIENT,
    "/kvpool.v1.StoreNode/Stat": _OPERATORS,
    "/kvpool.v1.StoreNode/Verify": _ADMIN,
    "/kvpool.v1.StoreNode/Drain": _ADMIN,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _OPERATORS,
}
"""gRPC methods, by full name."""

REQUESTS: Mapping[str, frozenset[Role]] = {
    "Ping": _ALL,
    "MatchRequest": _CLIENT,
    "ReleaseRequest": _CLIENT,
    "LocateRequest": _CLIENT,
    "ReserveRequest": _CLIENT,
    "AbortRequest": _BLOCKS,
    "ReportBadRequest": _CLIENT,
    "CommitRequest": _NODE,
    "GoneRequest": _NODE,
    "PrepareRequest": _CLIENT,
    "WriteRequest": _CLIENT,
    "CommitSlotsRequest": _CLIENT,
    "DiscardRequest": _CLIENT,
    "RegisterRequest": _CLIENT,
    "PullRequest": _CLIENT,
    "ReadRequest": _BLOCKS,
    "AttachRequest": _BLOCKS,
    "MapRequest": _BLOCKS,
    "OfferRequest": _BLOCKS,
}
"""Requests of the framed protocol, by message; a connection begins with Hello, which everybody may say."""

OPEN_PAGES = frozenset({"/healthz", "/readyz"})
"""HTTP pages for everybody: whether the process lives and is ready. Every other one is for operators."""

_NOBODY: frozenset[Role] = frozenset()


def require_method(principal: Principal, method: str) -> None:
    """Raise ForbiddenError unless the caller may call the gRPC ``method``, by its full name."""
    allowed = METHODS.get(method, _NOBODY)
    if principal.roles.isdisjoint(allowed) and not method.startswith(OPEN_METHODS):
        raise _forbidden(principal, method, allowed)


def require_request(principal: Principal, request: str) -> None:
    """Raise ForbiddenError unless the caller may send the framed ``request``."""
    allowed = REQUESTS.get(request, _NOBODY)
    if principal.roles.isdisjoint(allowed) and principal.roles != _ALL:
        raise _forbidden(principal, request, allowed)


def require_tenant(principal: Principal, tenant: str) -> None:
    """Raise ForbiddenError unless the caller may name ``tenant`` as the owner of blocks."""
    if principal.tenant not in (None, tenant):
        raise ForbiddenError(
            f"{principal.name!r} is of tenant {principal.tenant!r} and names another one, {tenant!r}; leave the tenant "
            "out, and it is the caller's own"
        )


def require_pages(principal: Principal) -> None:
    """Raise ForbiddenError unless the caller may see HTTP pages other than `OPEN_PAGES`."""
    if principal.roles.isdisjoint(_OPERATORS):
        raise _forbidden(principal, "pages", _OPERATORS)


def _forbidden(principal: Principal, what: str, allowed: frozenset[Role]) -> ForbiddenError:
    who = f"{principal.name!r} ({', '.join(sorted(principal.roles)) or 'no role'})"
    roles = ", ".join(sorted(allowed)) or "nobody"
    return ForbiddenError(f"{who} may not call {what.rpartition('/')[2]}; that is for: {roles}")
