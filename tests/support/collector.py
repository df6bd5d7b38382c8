"""A collector of OpenTelemetry metrics over HTTP: what the exporter of the SDK sends, by name and attributes."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)

Attributes = frozenset[tuple[str, str]]


@dataclass
class Collector:
    """The newest figure of each metric and process, by the metric's name and attributes; of timers, their sum."""

    port: int = 0
    _found: dict[str, dict[Attributes, dict[str, float]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(dict))
    )

    def take(self, request: ExportMetricsServiceRequest) -> None:
        for resource in request.resource_metrics:
            process = resource.resource.SerializeToString(deterministic=True).hex()
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    points = getattr(metric, metric.WhichOneof("data")).data_points
                    for point in points:
                        attributes = frozenset((one.key, one.value.string_value) for one in point.attributes)
                        self._found[metric.name][attributes][f"{process}/{point.start_time_unix_nano}"] = _figure(point)

    def names(self) -> set[str]:
        return set(self._found)

    def sum(self, name: str, **attributes: str) -> float | None:
        """Add up a metric over processes, where it has these attributes; None if no process sent it."""
        found = [
            sum(by_process.values())
            for have, by_process in self._found.get(name, {}).items()
            if attributes.items() <= dict(have).items()
        ]
        return sum(found) if found else None


def _figure(point: Any) -> float:
    if hasattr(point, "sum"):
        return float(point.sum)
    return float(point.as_int if point.WhichOneof("value") == "as_int" else point.as_double)


@contextmanager
def collecting() -> Iterator[Collector]:
    """Run a collector on a free port of this machine."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = ExportMetricsServiceRequest()
            request.ParseFromString(self.rfile.read(int(self.headers["content-length"])))
            collector.take(request)
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.end_headers()
            self.wfile.write(ExportMetricsServiceResponse().SerializeToString())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()


def settings(collector: Collector) -> dict[str, str]:
    """Return the environment variables with which Airflow sends its metrics to the collector."""
    return {
        "AIRFLOW__METRICS__OTEL_ON": "True",
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.port}",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        "OTEL_SERVICE_NAME": "airflow",
        "OTEL_METRIC_EXPORT_INTERVAL": "60000",
    }
