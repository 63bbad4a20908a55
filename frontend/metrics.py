"""Prometheus metrics of an API server: its own, and what the core's newest status says.

Several API servers share one port, so a scrape reaches any of them. With PROMETHEUS_MULTIPROC_DIR set (before this file
is imported: the library reads it then) they keep their own values in files there, and each answers for all.
"""

import os
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from protocol.status import CoreStatus

__all__ = ["CONTENT_TYPE", "Metrics"]

PREFIX = "pagetide_"
disable_created_metrics()  # type: ignore[no-untyped-call]
_LATENCIES = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKEN_TIMES = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5)


class EngineCollector(Collector):
    """The core's gauges and counters under their own names, with our prefix if they lack it."""

    def __init__(self, status: Callable[[], CoreStatus | None], health: Callable[[], str | None]) -> None:
        self._status, self._health = status, health

    def collect(self) -> Iterator[Metric]:
        """Yield one family for each value."""
        yield GaugeMetricFamily(f"{PREFIX}healthy", "1 if requests can be served", float(self._health() is None))
        status = self._status()
        if status is None:
            return
        for name, value in status.gauges.items():
            yield GaugeMetricFamily(_prefixed(name), "Reported by the engine core", value)
        for name, value in status.counters.items():
            yield CounterMetricFamily(_prefixed(name), "Reported by the engine core", value)
        memory = GaugeMetricFamily(f"{PREFIX}memory_bytes", "The engine core's memory by use", labels=["use"])
        for use, size in status.memory.items():
            memory.add_metric([use], size)
        yield memory


class Metrics:
    """One API server's metrics; make it once per process."""

    def __init__(self, status: Callable[[], CoreStatus | None], health: Callable[[], str | None]) -> None:
        self._registry = CollectorRegistry()
        own: CollectorRegistry | None = self._registry
        if os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
            own = None  # the files hold them, and the collector below reads those of all processes
            MultiProcessCollector(self._registry)  # type: ignore[no-untyped-call]
        self._registry.register(EngineCollector(status, health))

        self.requests = Counter(f"{PREFIX}api_requests", "HTTP requests", ["route", "status"], registry=own)
        self.open_requests = Gauge(
            f"{PREFIX}api_open_requests", "Generations in progress", registry=own, multiprocess_mode="livesum"
        )
        self.disconnects = Counter(f"{PREFIX}api_disconnects", "Generations whose client left", registry=own)
        self._prompt_tokens = Counter(f"{PREFIX}api_prompt_tokens", "Prompt tokens of answers", registry=own)
        self._answer_tokens = Counter(f"{PREFIX}api_answer_tokens", "Tokens of answers", registry=own)
        self._ttft = Histogram(
            f"{PREFIX}time_to_first_token_seconds", "Arrival to first token", registry=own, buckets=_LATENCIES
        )
        self._tpot = Histogram(
            f"{PREFIX}time_per_output_token_seconds",
            "Mean time between a choice's tokens after the first",
            registry=own,
            buckets=_TOKEN_TIMES,
        )
        self._duration = Histogram(
            f"{PREFIX}request_seconds", "Arrival to last token", registry=own, buckets=_LATENCIES
        )

    def count_answer(self, arrival: float, first: float, last: float, prompt_tokens: int, tokens: list[int]) -> None:
        """Record a finished request; times in seconds of one clock, `tokens` of each choice."""
        self._prompt_tokens.inc(prompt_tokens)
        self._answer_tokens.inc(sum(tokens))
        self._ttft.observe(first - arrival)
        self._duration.observe(last - arrival)
        if max(tokens) > 1:
            self._tpot.observe((last - first) / (max(tokens) - 1))

    def render(self) -> bytes:
        """Everything, in Prometheus's text format."""
        return generate_latest(self._registry)


def _prefixed(name: str) -> str:
    return name if name.startswith(PREFIX) else PREFIX + name
