"""Tracing: who began a request and where its time went, for whoever asks for it by OpenTelemetry's own variables.

Without them nothing is imported and a span is a call that returns. Spans are handed over to other processes as W3C
trace contexts; what is in them are counts, names of nodes and reasons: no tokens, no hashes, no bytes.
"""

import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import TypeVar

from kvpool.ops.logging import get_logger

TRACE_BYTES = 55
"""Of a trace context as it travels: version, trace, span and flags, in hexadecimal."""

ASKED_BY = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""Variables that ask for traces by saying where to; `OTEL_TRACES_EXPORTER` asks too, and can say none."""

Result = TypeVar("Result")
Value = str | int | float | bool

log = get_logger(__name__)

_CONTEXT = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")

_current: ContextVar[str] = ContextVar("trace", default="")


class Span:
    """A step of a request; this one is not recorded."""

    def set(self, **attributes: Value) -> None:
        """Say more of it; each name gets the prefix ``kvpool.``."""


_NOTHING = nullcontext(Span())


class OpenSpan:
    """A step that others may overlap, since it is at hand only now and then; this one is not recorded."""

    def at_hand(self) -> AbstractContextManager[Span]:
        """Work on it, as long as the ``with`` statement: what begins there is part of it."""
        return _NOTHING

    def end(self) -> None:
        """It is over; calling this again is harmless."""


_UNRECORDED = OpenSpan()


class Tracer:
    """Makes spans; this one makes none."""

    def span(self, name: str, **attributes: Value) -> AbstractContextManager[Span]:
        """A step that lasts as long as the ``with`` statement, part of the one around it."""
        return _NOTHING

    def begin(self, name: str, **attributes: Value) -> OpenSpan:
        """A step that lasts until the caller ends it, part of the one at hand."""
        return _UNRECORDED

    def serve(self, name: str, trace: str) -> AbstractContextManager[Span]:
        """The same, part of a caller's step in another process; nothing where ``trace`` is not one."""
        return _NOTHING

    def follow(self, call: Callable[[], Result]) -> Callable[[], Result]:
        """``call``, for another thread, whose spans are to be part of the step at hand."""
        return call

    def close(self) -> None:
        """Send what is left to be sent."""


def carried() -> str:
    """The trace context of the step at hand, for a call to another process; empty: none is recorded."""
    return _current.get()


def parse_trace(trace: str) -> str:
    """``trace`` if it is a trace context, else empty: it comes from others, and a call is no worse without."""
    return trace if _CONTEXT.fullmatch(trace) else ""


def is_asked_for(environ: Mapping[str, str]) -> bool:
    """Whether the environment asks for traces."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    exporter = environ.get("OTEL_TRACES_EXPORTER", "")
    return exporter != "none" and bool(exporter or any(environ.get(name) for name in ASKED_BY))


def open_tracer(role: str, environ: Mapping[str, str]) -> Tracer:
    """What the environment asks for; says in one line why, where that cannot be had.

    Args:
        role: What traces call this process, ``kvpool-ROLE``, unless ``OTEL_SERVICE_NAME`` does.
        environ: The environment.
    """
    if not is_asked_for(environ):
        return Tracer()
    try:
        from kvpool.ops.otel import OtelTracer  # noqa: PLC0415 - an extra, and a large one

        return OtelTracer(f"kvpool-{role}", environ)
    except ImportError as error:
        log.warning("tracing_off", reason=f"{error}; pip install 'kvpool[otel]', or unset the OTEL_ variables")
    except ValueError as error:
        log.warning("tracing_off", reason=str(error))
    return Tracer()
