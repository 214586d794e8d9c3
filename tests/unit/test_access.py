"""Who may call what: every method and every request has a line, and the lines say what they should."""

import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

import kvpool.transport.cuda  # noqa: F401 - brings its messages
from kvpool.core.access import METHODS, OPEN_METHODS, REQUESTS, require_method, require_request, require_tenant
from kvpool.core.errors import ForbiddenError
from kvpool.core.principals import Principal, Role, anyone
from kvpool.transport.ucx import messages as ucx
from kvpool.transport.wire.messages import KINDS, Hello
from kvpool.v1 import admin_pb2, directory_pb2, membership_pb2, store_node_pb2

OWN_PROCESS = {
    message.__name__
    for message in vars(ucx).values()
    if isinstance(message, type) and message.__module__ == ucx.__name__
} - {"OfferRequest", "RegisterRequest", "PullRequest"}
"""What a process asks its own UCX process: no server of ours is asked that."""

NODES_ALONE = {"/kvpool.v1.Membership/Control", "/kvpool.v1.Membership/Commit", "CommitRequest", "GoneRequest"}
ADMINS_ALONE = {
    "/kvpool.v1.Admin/Drain",
    "/kvpool.v1.Admin/CancelDrain",
    "/kvpool.v1.Admin/SetQuota",
    "/kvpool.v1.StoreNode/Drain",
    "/kvpool.v1.StoreNode/Verify",
}
OBSERVED = {
    "/kvpool.v1.Directory/GetPool",
    "/kvpool.v1.Admin/GetStatus",
    "/kvpool.v1.Admin/Explain",
    "/kvpool.v1.Admin/GetBlock",
    "/kvpool.v1.Admin/GetDrain",
    "/kvpool.v1.StoreNode/Stat",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    "Ping",
}
"""All that an observer may ask for."""

LINES = METHODS | REQUESTS


def principal(role):
    return Principal("somebody", frozenset({role}), "acme" if role == Role.CLIENT else None)


def may(role, line):
    require = require_method if line.startswith("/") else require_request
    try:
        require(principal(role), line)
    except ForbiddenError:
        return False
    return True


def test_every_grpc_method_has_a_line():
    modules = (admin_pb2, directory_pb2, membership_pb2, store_node_pb2, health_pb2, reflection_pb2)
    served = {
        f"/{service.full_name}/{method.name}"
        for module in modules
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }

    assert METHODS.keys() == {method for method in served if not method.startswith(OPEN_METHODS)}


def test_every_framed_request_has_a_line():
    requests = {kind.__name__ for number, kind in KINDS.items() if number % 2 == 0 and kind is not Hello}

    assert REQUESTS.keys() == requests - OWN_PROCESS


@pytest.mark.parametrize("role", Role)
def test_what_has_no_line_is_refused(role):
    for require in (require_method, require_request):
        with pytest.raises(ForbiddenError, match="that is for: nobody"):
            require(principal(role), "/kvpool.v1.Admin/Shutdown")


def test_the_lines_say_what_they_should():
    assert {line for line in LINES if may(Role.OBSERVER, line)} == OBSERVED
    assert {line for line in LINES if LINES[line] == {Role.NODE}} == NODES_ALONE
    assert {line for line in LINES if LINES[line] == {Role.ADMIN}} == ADMINS_ALONE
    assert not any(may(Role.CLIENT, line) for line in NODES_ALONE | ADMINS_ALONE)
    assert not any(may(Role.NODE, line) for line in METHODS if "/kvpool.v1.Admin/" in line or "StoreNode" in line)
    assert not any(may(Role.ADMIN, line) for line in REQUESTS if line != "Ping"), "operators move no blocks"


@pytest.mark.parametrize("line", LINES)
def test_nothing_is_refused_where_nobody_is_told_from_anybody(line):
    (require_method if line.startswith("/") else require_request)(anyone("me"), line)


def test_a_caller_names_its_own_tenant_alone():
    require_tenant(principal(Role.CLIENT), "acme")
    require_tenant(anyone("me"), "rival")
    with pytest.raises(ForbiddenError, match="is of tenant 'acme' and names another one, 'rival'"):
        require_tenant(principal(Role.CLIENT), "rival")
