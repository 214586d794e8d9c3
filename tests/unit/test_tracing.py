"""Tracing is asked for by OpenTelemetry's own variables; without them, or without its packages, nothing happens."""

import subprocess
import sys

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from structlog.testing import capture_logs

from kvpool.ops.otel import OtelTracer
from kvpool.ops.tracing import Tracer, carried, is_asked_for, open_tracer, parse_trace

TRACE = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"
ASKING = {"OTEL_TRACES_EXPORTER": "console"}


@pytest.fixture
def exporter():
    return InMemorySpanExporter()


@pytest.fixture
def tracer(exporter):
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield OtelTracer("kvpool-test", {}, provider)
    provider.shutdown()


@pytest.mark.parametrize(
    ("environ", "asked"),
    [
        ({}, False),
        ({"OTEL_SERVICE_NAME": "engine"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://collector:4318/v1/traces"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}, False),
        ({"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}, False),
    ],
)
def test_the_standard_variables_ask_for_traces(environ, asked):
    assert is_asked_for(environ) is asked


def test_without_them_a_span_is_nothing_and_nothing_is_imported():
    tracer = open_tracer("client", {})

    begun = tracer.begin("step", blocks=1)
    with tracer.span("step", blocks=1) as span, tracer.serve("step", TRACE) as same, begun.at_hand() as too:
        span.set(loaded=1)
        assert span is too
        assert span is same
        assert carried() == ""
    begun.end()
    program = "import sys, kvpool; kvpool.Client; assert not [n for n in sys.modules if n.startswith('opentelemetry')]"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_missing_package_is_one_line_that_says_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "kvpool.ops.otel")
    monkeypatch.setitem(sys.modules, "opentelemetry", None)

    with capture_logs() as logs:
        tracer = open_tracer("node", ASKING)

    assert type(tracer) is Tracer
    [line] = logs
    assert line["event"] == "tracing_off"
    assert "pip install 'kvpool[otel]'" in line["reason"]


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "'zipkin'"),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, "otlp over http/json"),
    ],
)
def test_an_exporter_that_is_not_there_is_one_line_that_names_it(environ, named):
    with capture_logs() as logs:
        tracer = open_tracer("node", environ)

    assert type(tracer) is Tracer
    assert named in logs[0]["reason"]


def test_spans_nest_and_are_carried_while_they_last(tracer, exporter):
    with tracer.span("outer"):
        outer = carried()
        with tracer.span("inner", blocks=3) as span:
            span.set(reason="cold")
            assert parse_trace(carried()) == carried() != outer
        assert carried() == outer
    inner, whole = exporter.get_finished_spans()

    assert carried() == ""
    assert inner.parent.span_id == whole.context.span_id
    assert inner.attributes == {"kvpool.blocks": 3, "kvpool.reason": "cold"}


def test_steps_that_overlap_are_at_hand_only_while_they_are_worked_on(tracer, exporter):
    with tracer.span("whole"):
        whole = carried()
        first, second = tracer.begin("first", blocks=1), tracer.begin("second", blocks=2)
        assert carried() == whole
        with first.at_hand():
            carried_first = carried()
        with second.at_hand(), tracer.span("inner"):
            pass
        with first.at_hand() as span:
            assert carried() == carried_first != whole
            span.set(reason="cold")
        for step in (first, second, first):
            step.end()
        assert carried() == whole
    ended = {span.name: span for span in exporter.get_finished_spans()}

    assert {name: span.parent and span.parent.span_id for name, span in ended.items()} == {
        "whole": None,
        "first": ended["whole"].context.span_id,
        "second": ended["whole"].context.span_id,
        "inner": ended["second"].context.span_id,
    }
    assert ended["first"].attributes == {"kvpool.blocks": 1, "kvpool.reason": "cold"}


def test_a_step_on_another_thread_can_follow(tracer, exporter):
    from concurrent.futures import ThreadPoolExecutor

    def step():
        with tracer.span("far"):
            pass

    with ThreadPoolExecutor(1) as threads, tracer.span("near"):
        threads.submit(tracer.follow(step)).result()
    far, near = exporter.get_finished_spans()

    assert far.parent.span_id == near.context.span_id


def test_what_is_served_is_part_of_the_callers_trace(tracer, exporter):
    with tracer.serve("kvpool.serve.match", TRACE):
        pass
    [served] = exporter.get_finished_spans()

    assert f"{served.context.trace_id:032x}" == TRACE.split("-")[1]
    assert f"{served.parent.span_id:016x}" == TRACE.split("-")[2]


@pytest.mark.parametrize("trace", ["", "x" * 55, TRACE.upper(), TRACE[:-1], TRACE + "0", "01" + TRACE[2:]])
def test_what_is_no_trace_context_is_not_followed(tracer, exporter, trace):
    with tracer.serve("kvpool.serve.match", trace):
        pass

    assert exporter.get_finished_spans() == ()
