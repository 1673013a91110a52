"""A collector of OpenTelemetry spans for tests: OTLP over HTTP as JSON, on a free port of this machine."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(frozen=True)
class Span:
    service: str
    name: str
    trace: str
    id: str
    parent: str
    attributes: dict[str, object]


@dataclass
class Collector:
    url: str
    spans: list[Span] = field(default_factory=list)

    def of_trace(self, trace: str) -> list[Span]:
        return [span for span in self.spans if span.trace == trace]

    def take(self, document: dict) -> None:
        for resource in document["resourceSpans"]:
            attributes = {each["key"]: each["value"] for each in resource["resource"]["attributes"]}
            service = attributes["service.name"]["stringValue"]
            for scope in resource["scopeSpans"]:
                for span in scope["spans"]:
                    ids = (span["traceId"].lower(), span["spanId"].lower(), span.get("parentSpanId", "").lower())
                    told = {each["key"]: each["value"] for each in span.get("attributes", ())}
                    self.spans.append(Span(service, span["name"], *ids, told))


@contextmanager
def collecting() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.take(json.loads(gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body))
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(f"http://127.0.0.1:{server.server_address[1]}")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
