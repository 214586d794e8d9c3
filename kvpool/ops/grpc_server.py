"""What every gRPC server of kvpool shares: limits, errors as statuses, health, opt-in reflection."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvpool.core import errors
from kvpool.core.errors import CapacityError, KvpoolError
from kvpool.core.limits import DEADLINE_S_MAX, FRAME_BODY_BYTES_MAX
from kvpool.ops.addresses import shown_host
from kvpool.ops.admission import Admission
from kvpool.ops.audit import Audit
from kvpool.ops.authentication import Authenticator
from kvpool.ops.grpc_tls import server_credentials
from kvpool.ops.identity import Authenticated
from kvpool.ops.logging import get_logger
from kvpool.ops.tracing import Tracer

MESSAGE_BYTES_MAX = FRAME_BODY_BYTES_MAX
CALLS_MAX = 128
"""Unary calls served at a time; the hot ones are not among them."""

SPARE_CALLS = 32
"""Beyond the limits, so that a refusal can be told; further calls are refused by gRPC itself."""

ERROR_KEY = "kvpool-error"
"""Trailing metadata that names the class of `kvpool.core.errors` a failed call stands for."""

TRACE_KEY = "traceparent"
"""Metadata of a call that is part of a step that its caller records."""

KEEPALIVE = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
RECONNECT = (
    # By default a channel waits a second before it dials again, then up to two minutes: a service that came back would
    # stay unfound. A dial that nobody answers costs next to nothing.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
)
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    *KEEPALIVE,
    *RECONNECT,
)
SERVER_OPTIONS = (
    *CHANNEL_OPTIONS,
    ("grpc.so_reuseport", 0),  # two servers must not share a port unnoticed
    ("grpc.max_concurrent_streams", CALLS_MAX),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),  # clients ping every 30 s
)

_CODES = {
    errors.UnknownNamespaceError: grpc.StatusCode.NOT_FOUND,
    errors.ForbiddenError: grpc.StatusCode.PERMISSION_DENIED,
    errors.UsageError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.AuthenticationError: grpc.StatusCode.UNAUTHENTICATED,
    errors.DeadlineError: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.OverloadedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.UnavailableError: grpc.StatusCode.UNAVAILABLE,
    errors.ProtocolError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.CapacityError: grpc.StatusCode.RESOURCE_EXHAUSTED,
}

log = get_logger(__name__)


class GrpcServer:
    """A gRPC server with health for each service.

    Args:
        services: Full names of the services.
        register: Adds the servicers to the server.
        streams_max: Calls that last, beside the others: each holds a thread for as long as it does.
        reflection_on: Whether to describe them to anyone who asks.
        authenticator: Who may call, over TLS; None: anybody, in plaintext.
        audit: Where refusals are told.
        tracer: Records calls of those who record their requests.

    Attributes:
        calls: Who is let in; counts those who were not.
    """

    def __init__(
        self,
        services: Iterable[str],
        register: Callable[[grpc.Server], None],
        *,
        streams_max: int = 0,
        reflection_on: bool = False,
        authenticator: Authenticator | None = None,
        audit: Audit | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self._authenticator = authenticator
        self._guards = [Authenticated(authenticator, _abort, audit or Audit())] if authenticator else []
        self._services = ["", *services]
        self.calls = Admission("calls", CALLS_MAX)
        threads = CALLS_MAX + streams_max + SPARE_CALLS
        self._server = grpc.server(
            ThreadPoolExecutor(threads, "kvpool-grpc"),
            options=SERVER_OPTIONS,
            maximum_concurrent_rpcs=threads,
            interceptors=[*self._guards, _Admitted(self.calls, tracer or Tracer())],
        )
        self._health = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        register(self._server)
        if reflection_on:
            names = [*self._services[1:], health.SERVICE_NAME, reflection.SERVICE_NAME]
            reflection.enable_server_reflection(names, self._server)

    def start(self, host: str, port: int) -> str:
        """Listen and serve; returns ``host:port``. Raises CapacityError when the address cannot be had."""
        address = self._listen(host, port, tokens=False)
        self._server.start()
        self.set_serving(serving=True)
        return address

    def listen_for_tokens(self, host: str, port: int) -> str:
        """Listen, before `start`, on a port for callers with tokens; as `start`.

        gRPC in Python asks either all callers of a port for a certificate, or none.
        """
        return self._listen(host, port, tokens=True)

    def _listen(self, host: str, port: int, *, tokens: bool) -> str:
        shown = shown_host(host)
        try:
            if self._authenticator is None:
                bound = self._server.add_insecure_port(f"{shown}:{port}")
            else:
                credentials = server_credentials(self._authenticator.credentials, tokens=tokens)
                bound = self._server.add_secure_port(f"{shown}:{port}", credentials)
        except RuntimeError as error:
            raise CapacityError(f"cannot listen on {shown}:{port}; choose another address or port") from error
        return f"{shown}:{bound}"

    @property
    def refused_callers(self) -> int:
        """Calls of nobody who is known; connections of such end in the handshake, which gRPC tells its log alone."""
        return sum(guard.refused for guard in self._guards)

    def set_serving(self, *, serving: bool, services: Iterable[str] | None = None) -> None:
        """Whether health says that ``services``, by default all and the server itself, are ready."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in self._services if services is None else services:
            self._health.set(service, status)

    def stop(self, grace_s: float) -> None:
        """Refuse new calls, give running ones ``grace_s``, and wait for the end."""
        self.set_serving(serving=False)
        self._server.stop(grace_s).wait()


class _Admitted(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses unary calls without a deadline, or with one above the limit, and those of too many at a time."""

    def __init__(self, calls: Admission, tracer: Tracer) -> None:
        self._calls = calls
        self._tracer = tracer

    def intercept_service(self, continuation: Any, details: grpc.HandlerCallDetails) -> Any:  # noqa: ANN401 - grpc's
        handler = continuation(details)
        if handler is None or handler.unary_unary is None or details.method.startswith("/grpc."):
            return handler
        inner = handler.unary_unary

        def checked(request: Any, context: grpc.ServicerContext) -> Any:  # noqa: ANN401 - any message
            left_s = context.time_remaining()
            if left_s is None or left_s > DEADLINE_S_MAX:
                context.abort(
                    grpc.StatusCode.INVALID_ARGUMENT,
                    f"the call needs a deadline of at most {DEADLINE_S_MAX:g} s; set a timeout",
                )
            try:
                with self._calls, self._tracer.serve(f"kvpool.serve.{details.method}", _trace_of(context)):
                    return inner(request, context)
            except KvpoolError as error:
                _abort(context, error)
            except MemoryError:
                log.warning("out_of_memory", method=details.method)
                context.set_trailing_metadata(((ERROR_KEY, CapacityError.__name__),))
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no memory for this call now")

        return grpc.unary_unary_rpc_method_handler(checked, handler.request_deserializer, handler.response_serializer)


def _trace_of(context: grpc.ServicerContext) -> str:
    return next((str(value) for key, value in context.invocation_metadata() if key == TRACE_KEY), "")


def _abort(context: grpc.ServicerContext, error: KvpoolError) -> None:
    """End a call; does not return."""
    context.set_trailing_metadata(((ERROR_KEY, type(error).__name__),))
    context.abort(code_of(error), str(error))


def raised_by(error: grpc.RpcError) -> KvpoolError:
    """The error of `kvpool.core.errors` that a failed call stands for; ``error`` comes from a stub."""
    call = cast("grpc.Call", error)
    details = call.details() or call.code().name
    name = next((value for key, value in call.trailing_metadata() or () if key == ERROR_KEY), "")
    kind = getattr(errors, str(name), None)
    if isinstance(kind, type) and issubclass(kind, KvpoolError):
        return kind(details)
    if call.code() == grpc.StatusCode.UNAUTHENTICATED:
        return errors.AuthenticationError(details)
    if call.code() == grpc.StatusCode.PERMISSION_DENIED:
        return errors.ForbiddenError(details)
    if call.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
        return errors.DeadlineError(details)
    if call.code() == grpc.StatusCode.RESOURCE_EXHAUSTED:
        return errors.OverloadedError(details)
    return errors.UnavailableError(details)


def code_of(error: KvpoolError) -> grpc.StatusCode:
    """The gRPC status that stands for ``error``."""
    return next((code for kind, code in _CODES.items() if isinstance(error, kind)), grpc.StatusCode.INTERNAL)
