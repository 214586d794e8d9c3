"""Each role against each method of each server, over both protocols: what is not its own is refused, and counted."""

import typing

import grpc
import pytest

import kvpool
import kvpool.transport.cuda
import kvpool.transport.ucx.messages
from kvpool.core.access import METHODS, REQUESTS
from kvpool.core.principals import Role
from kvpool.transport.wire.messages import KINDS, Done, Ping
from tests.http_pages import Answer
from tests.pki import LONG_S

CALLERS = {
    "client": {Role.CLIENT},
    "node-n1": {Role.NODE},
    "admin": {Role.ADMIN, Role.OBSERVER},
    "observer": {Role.OBSERVER},
}
SERVICES = {"meta": ("Directory", "Membership", "Admin"), "n0": ("StoreNode",)}
LASTING = "/kvpool.v1.Membership/Control"
ZEROS = {int: 0, str: "", bytes: b"", bool: False}


def code_of(channel, method):
    """How a call with an empty message ends."""
    try:
        if method == LASTING:
            next(channel.stream_stream(method)(iter([b""]), timeout=LONG_S))
        else:
            channel.unary_unary(method)(b"", timeout=LONG_S)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def empty(kind):
    """The request with nothing in it."""
    hints = typing.get_type_hints(kind)
    return kind(**{field: ZEROS[hints[field]] for field in kind.__struct_fields__})


@pytest.mark.parametrize("server", SERVICES)
@pytest.mark.parametrize("name", CALLERS)
def test_a_role_calls_its_own_grpc_methods_alone(shared, server, name):
    served = [method for method in METHODS if method.split("/")[1].rpartition(".")[2] in SERVICES[server]]
    wanted = {method for method in served if METHODS[method] & CALLERS[name]}
    untried = {"/kvpool.v1.StoreNode/Drain"} & wanted  # it would

    with shared.grpc(server, name) as channel:
        ended = {method: code_of(channel, method) for method in served if method not in untried}

    assert grpc.StatusCode.UNAUTHENTICATED not in ended.values()
    assert {m for m, code in ended.items() if code != grpc.StatusCode.PERMISSION_DENIED} == wanted - untried


@pytest.mark.parametrize("server", SERVICES)
@pytest.mark.parametrize("name", CALLERS)
def test_a_role_sends_its_own_framed_requests_alone(shared, server, name):
    known = [kind for kind in KINDS.values() if server != "meta" or kind.__module__ == Ping.__module__]
    forbidden = [kind for kind in known if not REQUESTS.get(kind.__name__, CALLERS[name]) & CALLERS[name]]
    assert forbidden

    with shared.framed(server, name) as connection:
        for kind in forbidden:
            with pytest.raises(kvpool.ForbiddenError, match=f"may not call {kind.__name__}; that is for: "):
                connection.call(empty(kind), Done, LONG_S)
        assert connection.call(Ping(), Done, LONG_S) == Done(0), "the connection goes on"


def test_refusals_are_counted_and_told(shared):
    with shared.client("admin") as admin:
        before = admin.status().counters["refused_callers"]
        with shared.client("observer") as observer, pytest.raises(kvpool.ForbiddenError, match="may not call Drain"):
            observer.drain("n0")
        assert admin.status().counters["refused_callers"] == before + 1
    assert '"what":"Drain"' in shared.audit("meta").replace('": "', '":"')


@pytest.mark.parametrize("server", SERVICES)
def test_metrics_beyond_loopback_are_for_operators(shared, server):
    ready = shared.pool.meta_ready if server == "meta" else shared.pool.ready[server]

    def ask(path, name=None):
        with shared.pki.dial(ready["http"].replace("0.0.0.0", "127.0.0.1"), name) as secured:
            secured.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
            with secured.makefile("rb") as answer:
                status = int(answer.readline().split()[1])
                return Answer(status, answer.read().decode(), {})

    assert ready["http"].startswith("https://")
    for name in ("observer", "admin"):
        assert "kvpool_refused_total" in ask("/metrics", name).text
    for name in ("client", "node-n1"):
        answer = ask("/metrics", name)
        assert (answer.status, "may not call pages" in answer.text) == (403, True)
    assert ask("/metrics").status == 401
    assert ask("/nothing", "client").status == 403
    assert [ask(path).status for path in ("/healthz", "/readyz")] == [200, 200]
