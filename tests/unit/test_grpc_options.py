"""gRPC ignores options it does not know, so that a misspelt one does nothing: each must be a name in its library."""

from pathlib import Path

from grpc._cython import cygrpc

from kvpool.ops.grpc_server import CHANNEL_OPTIONS, SERVER_OPTIONS


def test_grpc_knows_every_option():
    library = Path(cygrpc.__file__).read_bytes()

    unknown = {name for name, _ in (*CHANNEL_OPTIONS, *SERVER_OPTIONS) if name.encode() not in library}

    assert unknown == set()
