"""Who calls a gRPC method."""

import grpc

from kvpool.core.principals import Principal, anyone


def principal_of(context: grpc.ServicerContext) -> Principal:
    """The caller."""
    return anyone(context.peer())
