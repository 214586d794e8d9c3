"""Who calls a gRPC method: an interceptor finds out before the method runs."""

from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, cast

import grpc

from kvpool.core.errors import AuthenticationError
from kvpool.core.principals import Principal, anyone
from kvpool.ops.authentication import Authenticator
from kvpool.ops.logging import get_logger

HEALTH = "/grpc.health."
"""Open to everybody who got as far as to ask: it tells nothing but whether the service is ready."""

log = get_logger(__name__)

_BEARER = "Bearer "

_caller: ContextVar[Principal | None] = ContextVar("caller", default=None)


def principal_of(context: grpc.ServicerContext) -> Principal:
    """The caller."""
    return _caller.get() or anyone(context.peer())


class Authenticated(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """Makes the principal of each call; refuses those who are nobody.

    Args:
        authenticator: Decides.
        abort: Ends a call with an error, as all of the server's calls end; does not return.

    Attributes:
        refused: How many calls were refused.
    """

    def __init__(
        self, authenticator: Authenticator, abort: Callable[[grpc.ServicerContext, AuthenticationError], None]
    ) -> None:
        self._authenticator = authenticator
        self._abort = abort
        self.refused = 0

    def intercept_service(self, continuation: Any, details: grpc.HandlerCallDetails) -> Any:  # noqa: ANN401 - grpc's
        """See `grpc.ServerInterceptor`."""
        handler = continuation(details)
        if handler is None or details.method.startswith(HEALTH):
            return handler
        codecs = (handler.request_deserializer, handler.response_serializer)
        if handler.response_streaming:
            wrap = (
                grpc.stream_stream_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_stream_rpc_method_handler
            )
            return wrap(self._streaming(handler.stream_stream or handler.unary_stream), *codecs)
        wrap = (
            grpc.stream_unary_rpc_method_handler if handler.request_streaming else grpc.unary_unary_rpc_method_handler
        )
        return wrap(self._single(handler.stream_unary or handler.unary_unary), *codecs)

    def _single(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(request: Any, context: grpc.ServicerContext) -> Any:  # noqa: ANN401 - any message
            self._enter(context)
            return inner(request, context)

        return call

    def _streaming(self, inner: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        def call(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:  # noqa: ANN401 - any message
            self._enter(context)
            yield from inner(request, context)

        return call

    def _enter(self, context: grpc.ServicerContext) -> None:
        """Set the caller for what follows on this thread: a call keeps its thread, and each sets its own first."""
        auth = cast("dict[str, list[bytes]]", context.auth_context())
        identities = [uri.decode(errors="replace") for uri in auth.get("peer_uri", ())]
        try:
            _caller.set(self._authenticator.caller(identities, _token(context)))
        except AuthenticationError as error:
            self.refused += 1
            log.warning("caller_refused", peer=context.peer(), reason=str(error))
            self._abort(context, error)


def _token(context: grpc.ServicerContext) -> str:
    values = [str(value) for key, value in context.invocation_metadata() if key == "authorization"]
    return values[0].removeprefix(_BEARER) if len(values) == 1 and values[0].startswith(_BEARER) else ""
