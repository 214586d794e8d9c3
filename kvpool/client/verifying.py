"""Asking nodes to check all that they hold, in short calls: whoever stops asking has stopped the check."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace

import grpc

from kvpool.client.results import NodeStatus
from kvpool.core.errors import KvpoolError, UnavailableError, UsageError
from kvpool.core.identities import node_identity
from kvpool.core.members import MemberState
from kvpool.ops.channels import Channels
from kvpool.ops.credentials import Credentials
from kvpool.ops.grpc_server import raised_by
from kvpool.v1 import store_node_pb2, store_node_pb2_grpc

CALL_MS = 250
"""Work that one call asks for."""

NODES_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class NodeVerified:
    """What a node found when it checked its blocks.

    Attributes:
        node_id: The node.
        blocks: Blocks compared with their checksums.
        size_bytes: Their bytes.
        bad: Blocks that were not as they were written; they are no longer served.
        took_s: Seconds of the node's work.
        error: Why it could not check them all, if so.
    """

    node_id: str
    blocks: int = 0
    size_bytes: int = 0
    bad: int = 0
    took_s: float = 0.0
    error: str | None = None


def choose_nodes(nodes: Sequence[NodeStatus], names: Sequence[str]) -> list[NodeStatus]:
    """The nodes called ``names``, or all of them; raises UsageError for a name that no node has."""
    known = {node.node_id: node for node in nodes}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UsageError(f"no node is called {', '.join(unknown)}; the pool has {', '.join(known) or 'none'}")
    return [known[name] for name in dict.fromkeys(names)] if names else list(nodes)


def verify_nodes(
    nodes: Sequence[NodeStatus],
    timeout_s: float,
    credentials: Credentials | None = None,
    on_blocks: Callable[[int], None] = lambda _: None,
) -> list[NodeVerified]:
    """Let nodes check all they hold, side by side; a call without an answer in ``timeout_s`` ends its node's check.

    ``credentials`` prove who asks, over TLS. ``on_blocks`` is told of each part, in threads of this function's own.
    """
    if not nodes:
        return []
    with ThreadPoolExecutor(min(len(nodes), NODES_AT_ONCE), "kvpool-verify") as threads:
        return list(threads.map(lambda node: _verify(node, timeout_s, credentials, on_blocks), nodes))


def _verify(
    node: NodeStatus, timeout_s: float, credentials: Credentials | None, on_blocks: Callable[[int], None]
) -> NodeVerified:
    found = NodeVerified(node.node_id)
    try:
        peer = None if credentials is None else credentials.toward(node_identity(node.node_id))
        with closing(Channels(_address(node), peer)) as channels:
            stub = store_node_pb2_grpc.StoreNodeStub(channels.current())
            page, pages = 0, 1
            while page < pages:
                part = _ask(stub, page, timeout_s)
                page, pages = part.next_page, part.pages
                found = NodeVerified(
                    node.node_id,
                    found.blocks + part.blocks,
                    found.size_bytes + part.bytes,
                    found.bad + part.bad,
                    found.took_s + part.took_us / 1e6,
                )
                on_blocks(part.blocks)
    except KvpoolError as error:
        return replace(found, error=str(error))
    return found


def _address(node: NodeStatus) -> str:
    if node.state == MemberState.LOST:
        raise UnavailableError("the node is lost")
    uris = [uri for uri in node.endpoints if uri.startswith("grpc://")]
    if not uris:
        raise UnavailableError("the node names no grpc:// endpoint; it is of an older version")
    return uris[0].removeprefix("grpc://")


def _ask(stub: store_node_pb2_grpc.StoreNodeStub, page: int, timeout_s: float) -> store_node_pb2.VerifyResponse:
    request = store_node_pb2.VerifyRequest(page=page, limit_ms=CALL_MS)
    try:
        part = stub.Verify(request, timeout=timeout_s)
    except grpc.RpcError as error:
        raise raised_by(error) from error
    if part.next_page <= page:
        raise UnavailableError(f"the node checked nothing from page {page} on in {CALL_MS} ms")
    return part
