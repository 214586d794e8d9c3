"""An OTLP receiver: what an observability back end is to kvpool's processes."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Received:
    """One span."""

    service: str
    name: str
    trace_id: bytes
    span_id: bytes
    parent_id: bytes
    attributes: Mapping[str, object]


class Receiver:
    """Takes spans over HTTP at ``endpoint``; `spans` is what has come."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_BSP_SCHEDULE_DELAY": "50"}
        self.spans: list[Received] = []

    def named(self, name: str) -> list[Received]:
        return [span for span in self.spans if span.name == name]

    def take(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            [service] = [a.value.string_value for a in resource.resource.attributes if a.key == "service.name"]
            for scope in resource.scope_spans:
                for span in scope.spans:
                    attributes = {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}
                    ids = (span.trace_id, span.span_id, span.parent_span_id)
                    self.spans.append(Received(service, span.name, *ids, attributes))


@contextmanager
def receiver() -> Iterator[Receiver]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            received.take(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        received = Receiver(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield received
        finally:
            server.shutdown()
            thread.join()
