"""The server's own metrics, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from orbit_runtime.serve.answers import ChoicePart

SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class ServeMetrics:
    """Labels hold only names that the server knows, so clients cannot create new series."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._answers = Counter(
            "orbit_serve_requests", "HTTP requests answered.", ["route", "status"], registry=self._registry
        )
        self._tokens = Counter("orbit_serve_tokens", "Tokens.", ["model", "kind"], registry=self._registry)
        self._ended = Counter(
            "orbit_serve_completions", "Completions ended.", ["model", "reason"], registry=self._registry
        )
        self._seconds = Histogram(
            "orbit_serve_request_seconds", "From a request to its last byte.", registry=self._registry, buckets=SECONDS
        )
        self._updates = Counter("orbit_serve_updates", "Changes of weights.", ["result"], registry=self._registry)
        self._under_way = Gauge(
            "orbit_serve_completions_under_way", "Completions that are sampled or wait.", registry=self._registry
        )

    def watch(self, under_way: Callable[[], float]) -> None:
        self._under_way.set_function(under_way)

    def answered(self, route: str, status: int, seconds: float) -> None:
        self._answers.labels(route, str(status)).inc()
        self._seconds.observe(seconds)

    def asked(self, model: str, prompt_tokens: int) -> None:
        self._tokens.labels(model, "prompt").inc(prompt_tokens)

    def ended(self, model: str, part: ChoicePart) -> None:
        self._tokens.labels(model, "completion").inc(len(part.token_ids_T))
        self._ended.labels(model, str(part.finish_reason)).inc()

    def updated(self, result: str) -> None:
        self._updates.labels(result).inc()

    def render(self) -> bytes:
        return generate_latest(self._registry)
