"""What the server counts, for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

__all__ = ["Metrics"]

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)


class Metrics:
    """Counters of one server, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)  # memory, CPU seconds, open files
        self.queue_seconds = Histogram(
            "fsdfm_queue_seconds", "From a text's arrival to its start", buckets=_SECONDS, registry=registry
        )
        self.call_seconds = Histogram(
            "fsdfm_call_seconds", "A network call, for all texts in it", buckets=_SECONDS, registry=registry
        )
        self.step_seconds = Histogram(
            "fsdfm_step_seconds", "A text's step once the network has spoken", buckets=_SECONDS, registry=registry
        )
        self.request_seconds = Histogram(
            "fsdfm_request_seconds", "A request, first byte to last", ["path"], buckets=_SECONDS, registry=registry
        )
        self.batch_size = Histogram(
            "fsdfm_batch_size", "Texts in a network call", buckets=(1, 2, 4, 8, 16, 32), registry=registry
        )
        self.calls = Counter("fsdfm_calls", "Network calls", registry=registry)
        self.tokens = Counter("fsdfm_tokens", "Tokens", ["kind"], registry=registry)
        self.requests = Counter("fsdfm_requests", "Requests", ["path", "status"], registry=registry)
        self.cancelled = Counter("fsdfm_cancelled", "Texts given up", ["reason"], registry=registry)
        self.errors = Counter("fsdfm_errors", "Texts that failed by a fault of the server", registry=registry)
        self.running = Gauge("fsdfm_running", "Texts on their way", registry=registry)
        self.waiting = Gauge("fsdfm_waiting", "Texts that wait", registry=registry)

    def text(self) -> bytes:
        """All of it, as Prometheus reads it."""
        return generate_latest(self.registry)
