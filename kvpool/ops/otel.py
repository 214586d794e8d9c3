"""Tracing by OpenTelemetry's SDK: loaded only where its variables ask for traces."""

import contextvars
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from importlib.metadata import entry_points
from typing import cast

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind

from kvpool.ops.tracing import OpenSpan, Result, Span, Tracer, Value, _current, parse_trace
from kvpool.ops.version import __version__

_UNNAMED = "unknown_service"
_PROTOCOLS = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}


class OtelTracer(Tracer):
    """Spans that go to the program's own tracer provider, else to an exporter that the environment names. Thread-safe.

    Args:
        service: Name of this process's service where the environment gives none.
        environ: The environment.
        provider: Where spans go; by default what was said above.

    Raises:
        ValueError: An exporter that is not installed.
    """

    def __init__(self, service: str, environ: Mapping[str, str], provider: TracerProvider | None = None) -> None:
        shared = provider or trace.get_tracer_provider()
        self._own: TracerProvider | None = None
        if not isinstance(shared, TracerProvider):
            shared = self._own = _new_provider(service, environ)
        self._tracer = shared.get_tracer("kvpool", __version__)

    def span(self, name: str, **attributes: Value) -> AbstractContextManager[Span]:
        """See `Tracer.span`."""
        return self._recorded(name, SpanKind.INTERNAL, None, attributes)

    def begin(self, name: str, **attributes: Value) -> OpenSpan:
        """See `Tracer.begin`."""
        return self._begin(name, SpanKind.INTERNAL, None, attributes)

    def serve(self, name: str, trace: str) -> AbstractContextManager[Span]:
        """See `Tracer.serve`."""
        if not parse_trace(trace):
            return super().serve(name, trace)
        return self._recorded(name, SpanKind.SERVER, _parent(trace), {})

    def follow(self, call: Callable[[], Result]) -> Callable[[], Result]:
        """See `Tracer.follow`."""
        return partial(contextvars.copy_context().run, call)

    def close(self) -> None:
        """See `Tracer.close`."""
        if self._own is not None:
            self._own.shutdown()

    @contextmanager
    def _recorded(
        self, name: str, kind: SpanKind, parent: otel_context.Context | None, attributes: Mapping[str, Value]
    ) -> Iterator[Span]:
        begun = self._begin(name, kind, parent, attributes)
        try:
            with begun.at_hand() as span:
                yield span
        finally:
            begun.end()

    def _begin(
        self, name: str, kind: SpanKind, parent: otel_context.Context | None, attributes: Mapping[str, Value]
    ) -> "_Open":
        span = self._tracer.start_span(name, context=parent, kind=kind)
        if span.is_recording():
            _Recorded(span).set(**attributes)
        return _Open(span)


class _Open(OpenSpan):
    def __init__(self, span: trace.Span) -> None:
        self._span = span

    @contextmanager
    def at_hand(self) -> Iterator[Span]:
        """See `OpenSpan.at_hand`."""
        with trace.use_span(self._span):
            if not self._span.is_recording():
                yield Span()
                return
            token = _current.set(_shown(self._span.get_span_context()))
            try:
                yield _Recorded(self._span)
            finally:
                _current.reset(token)

    def end(self) -> None:
        """See `OpenSpan.end`."""
        if self._span.is_recording():
            self._span.end()


class _Recorded(Span):
    def __init__(self, span: trace.Span) -> None:
        self._span = span

    def set(self, **attributes: Value) -> None:
        for name, value in attributes.items():
            self._span.set_attribute(f"kvpool.{name}", value)


def _shown(context: trace.SpanContext) -> str:
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def _parent(carried: str) -> otel_context.Context:
    _, trace_id, span_id, flags = carried.split("-")
    context = trace.SpanContext(
        int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=trace.TraceFlags(int(flags, 16))
    )
    return trace.set_span_in_context(trace.NonRecordingSpan(context))


def _new_provider(service: str, environ: Mapping[str, str]) -> TracerProvider:
    resource = Resource.create()
    if str(resource.attributes.get("service.name", _UNNAMED)).startswith(_UNNAMED):
        resource = resource.merge(Resource({"service.name": service}))
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(_new_exporter(environ)))
    return provider


def _new_exporter(environ: Mapping[str, str]) -> SpanExporter:
    wanted = name = environ.get("OTEL_TRACES_EXPORTER", "") or "otlp"
    if name == "otlp":
        protocol = environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
        name = _PROTOCOLS.get(protocol or "http/protobuf", "")
        wanted = f"otlp over {protocol}"
    for found in entry_points(group="opentelemetry_traces_exporter", name=name):
        return cast("SpanExporter", found.load()())
    raise ValueError(
        f"no exporter {wanted!r} is installed; `pip install 'kvpool[otel]'` brings otlp over http/protobuf, and console"
    )
