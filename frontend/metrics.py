"""Prometheus metrics of an API server: its own, and what the core's newest status says.

Several API servers share one port, so a scrape reaches any of them. With PROMETHEUS_MULTIPROC_DIR set (before this file
is imported: the library reads it then) they keep their own values in files there, and each answers for all.
"""

import os
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from frontend.timing import PHASES, Times
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
            if name.endswith("_total"):
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
        self._status = status

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

        self._phases = Histogram(
            f"{PREFIX}request_phase_seconds",
            "A choice's time from submission to last text, by phase",
            ["phase"],
            registry=own,
            buckets=_LATENCIES,
        )
        self._gap = Histogram(
            f"{PREFIX}longest_gap_seconds",
            "Longest time between two deltas of a choice",
            registry=own,
            buckets=_LATENCIES,
        )

    def count_answer(self, arrival: float, first: float, last: float, prompt_tokens: int, tokens: list[int]) -> None:
        """Record a finished request; times in seconds of one clock, `tokens` of each choice."""
        self._prompt_tokens.inc(prompt_tokens)
        self._answer_tokens.inc(sum(tokens))
        self._ttft.observe(first - arrival)
        self._duration.observe(last - arrival)
        if max(tokens) > 1:
            self._tpot.observe((last - first) / (max(tokens) - 1))

    def count_times(self, times: Iterable[Times], gaps: Iterable[float]) -> None:
        """Record where the time of finished choices went, as far as the core told, and their longest gaps."""
        for choice in times:
            for phase in PHASES:
                self._phases.labels(phase).observe(getattr(choice, phase))
        for gap in gaps:
            self._gap.observe(gap)

    def render(self) -> bytes:
        """Everything, in Prometheus's text format."""
        status = self._status()
        counters = status.counters.items() if status is not None else ()
        # The library can't leave `_total` out of a counter's name.
        plain = [(_prefixed(name), value) for name, value in counters if not name.endswith("_total")]
        lines = [f"# HELP {n} Reported by the engine core\n# TYPE {n} counter\n{n} {v}\n" for n, v in plain]
        return generate_latest(self._registry) + "".join(lines).encode()


def _prefixed(name: str) -> str:
    return name if name.startswith(PREFIX) else PREFIX + name
