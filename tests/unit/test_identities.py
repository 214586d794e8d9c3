"""Who a certificate or a token says its holder is."""

import pytest

from kvpool.core.errors import AuthenticationError, ForbiddenError
from kvpool.core.identities import META, client_identity, node_identity, operator_identity, principal_of_identity
from kvpool.core.principals import Principal, Role, anyone, require_node
from kvpool.ops.grpc_tls import server_name


@pytest.mark.parametrize(
    ("identity", "principal"),
    [
        (node_identity("n-1.a_b"), Principal("n-1.a_b", frozenset({Role.NODE}), None)),
        (client_identity("acme", "e1"), Principal("e1", frozenset({Role.CLIENT}), "acme")),
        (client_identity("a/b ä", "%2F"), Principal("%2F", frozenset({Role.CLIENT}), "a/b ä")),
        (operator_identity(Role.ADMIN, "jo"), Principal("jo", frozenset({Role.ADMIN, Role.OBSERVER}), None)),
        (operator_identity(Role.OBSERVER, "prom"), Principal("prom", frozenset({Role.OBSERVER}), None)),
    ],
)
def test_an_identity_makes_a_principal_with_its_role_and_tenant(identity, principal):
    assert principal_of_identity(identity) == principal
    assert identity.isascii()


@pytest.mark.parametrize(
    "identity",
    [
        META,
        "",
        "kvpool://",
        "kvpool://node",
        "kvpool://node/",
        "kvpool://node/a/b",
        "kvpool://client/acme",
        "kvpool://client//e1",
        "kvpool://client/acme/e1/more",
        "kvpool://root/me",
        "https://node/n0",
        "node/n0",
        "kvpool://node/" + "n" * 2000,
    ],
)
def test_whatever_else_is_nobody(identity):
    with pytest.raises(AuthenticationError, match="is no identity of a caller"):
        principal_of_identity(identity)


def test_servers_have_a_name_for_dns():
    assert [server_name(META), server_name(node_identity("n0"))] == ["meta.kvpool", "n0.node.kvpool"]


def test_a_node_is_itself_or_nobody_is_told_from_anybody():
    require_node(principal_of_identity(node_identity("n0")), "n0")
    require_node(anyone("whoever"), "n0")


@pytest.mark.parametrize(
    "identity", [node_identity("n1"), client_identity("t", "n0"), operator_identity(Role.ADMIN, "n0")]
)
def test_nobody_else_is_that_node(identity):
    with pytest.raises(ForbiddenError, match="this is for node 'n0' alone"):
        require_node(principal_of_identity(identity), "n0")
