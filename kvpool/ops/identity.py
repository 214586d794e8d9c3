"""Who calls a gRPC method, and whether it may: an interceptor finds out before the method runs."""

import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, cast

import grpc

from kvpool.core.access import OPEN_METHODS, require_method
from kvpool.core.errors import AuthenticationError, ForbiddenError
from kvpool.core.principals import Principal, anyone
from kvpool.ops.audit import Audit
from kvpool.ops.authentication import Authenticator, bearer_token
from kvpool.ops.logging import get_logger

log = get_logger(__name__)

NOBODY = Principal("nobody", frozenset(), None)

_caller: ContextVar[Principal | None] = ContextVar("caller", default=None)


def principal_of(context: grpc.ServicerContext) -> Principal:
    """The caller."""
    return _caller.get() or anyone(context.peer())


class Authenticated(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """Makes the principal of each call; refuses those who are nobody, and those who may not call the method.

    Args:
        authenticator: Decides.
        abort: Ends a call with an error, as all of the server's calls end; does not return.
        audit: Where refusals are told.

    Attributes:
        refused: How many calls were refused.
    """

    def __init__(
        self,
        authenticator: Authenticator,
        abort: Callable[[grpc.ServicerContext, AuthenticationError | ForbiddenError], None],
        audit: Audit,
    ) -> None:
        self._audit = audit
        self._authenticator = authenticator
        self._abort = abort
        self.refused = 0
        self._lock = threading.Lock()

    def intercept_service(self, continuation: Any, details: grpc.HandlerCallDetails) -> Any:  # noqa: ANN401 - grpc's
        """See `grpc.ServerInterceptor`."""
        handler = continuation(details)
        if handler is None:
            return handler
        ways = (handler.request_streaming, handler.response_streaming)
        kind = "_".join("stream" if streams else "unary" for streams in ways)
        inner, is_open = getattr(handler, kind), details.method.startswith(OPEN_METHODS)

        def call(request: Any, context: grpc.ServicerContext) -> Any:  # noqa: ANN401 - any message, or stream of them
            if is_open:
                _caller.set(NOBODY)
            else:
                self._enter(context, details.method)
            return inner(request, context)

        wrap = getattr(grpc, f"{kind}_rpc_method_handler")
        return wrap(call, handler.request_deserializer, handler.response_serializer)

    def _enter(self, context: grpc.ServicerContext, method: str) -> None:
        """Set the caller for what follows on this thread: a call keeps its thread, and each sets its own first."""
        auth = cast("dict[str, list[bytes]]", context.auth_context())
        identities = [uri.decode(errors="replace") for uri in auth.get("peer_uri", ())]
        who: Principal | str = context.peer()
        try:
            who = principal = self._authenticator.caller(identities, _token(context))
            require_method(principal, method)
            _caller.set(principal)
        except (AuthenticationError, ForbiddenError) as error:
            with self._lock:
                self.refused += 1
            log.warning("caller_refused", peer=context.peer(), method=method, reason=str(error))
            self._audit.refused(who, method.rpartition("/")[2], error)
            self._abort(context, error)


def _token(context: grpc.ServicerContext) -> str:
    return bearer_token([str(value) for key, value in context.invocation_metadata() if key == "authorization"])
