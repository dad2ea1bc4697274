"""What `GET /metrics` tells, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """The counters of one server. `queue_length` tells how many takes it holds."""

    def __init__(self, queue_length: Callable[[], float]) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("scorer_requests", "Requests answered, by endpoint and status",
                                ["endpoint", "status"], registry=self.registry)
        self.failures = Counter("scorer_failures", "Takes that got no score, by kind", ["kind"], registry=self.registry)
        self.audio_s = Counter("scorer_audio_seconds", "Seconds of audio scored", registry=self.registry)
        self.latency_s = Histogram("scorer_latency_seconds", "Seconds from a request's head to its reply",
                                   ["endpoint"], buckets=_SECONDS, registry=self.registry)
        queue = Gauge("scorer_queue_length", "Takes that are read, waiting or in the model", registry=self.registry)
        queue.set_function(queue_length)

    def text(self) -> bytes:
        """All of them as `GET /metrics` replies."""
        return generate_latest(self.registry)
