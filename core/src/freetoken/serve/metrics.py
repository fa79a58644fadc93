"""What ``/metrics`` says: counters and histograms of the HTTP process, gauges of the engine, in their own registry.

Every name is explained in ``docs/metrics.md``; a test compares the two.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from attrs import frozen
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from freetoken.serve.messages import EngineStats
from freetoken.serve.requestlog import RequestRecord

OUTCOMES = ("stop", "length", "deadline", "disconnected", "failed", "refused")

TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
GAP_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
DURATION_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Histogram:
    """Counts per bucket. All observing is done by one thread, so it needs no lock: 0.2 µs an observation where
    ``prometheus_client.Histogram`` takes 1.5, and there is one for every token."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self, name: str, text: str) -> HistogramMetricFamily:
        labels = [*(str(bound) for bound in self._bounds), "+Inf"]
        buckets = list(zip(labels, map(float, accumulate(self._counts)), strict=True))
        return HistogramMetricFamily(name, text, buckets=buckets, sum_value=self._sum)


@frozen
class EngineView:
    """What the metrics need to know of the engine when they are read."""

    stats: EngineStats
    serving: bool
    restarts: int


class ServerMetrics(Collector):
    """Fed by the event loop only. ``engine`` is asked when the metrics are read."""

    def __init__(self, engine: Callable[[], EngineView]) -> None:
        self._engine = engine
        self.ttft = Histogram(TTFT_S)
        self.token_gap = Histogram(GAP_S)
        self._duration = Histogram(DURATION_S)
        self._outcomes: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        self._prompt_tokens = 0
        self._completion_tokens = 0
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def count(self, record: RequestRecord) -> None:
        """A request is over."""
        self._outcomes[record.finish] += 1
        self._prompt_tokens += record.prompt_tokens
        self._completion_tokens += record.completion_tokens
        self._duration.observe(record.total_ms / 1e3)

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        yield from self._requests()
        yield from self._engine_families()

    def _requests(self) -> Iterator[Metric]:
        yield self.ttft.family(
            "freetoken_time_to_first_token_seconds", "From the request's arrival to its first token leaving"
        )
        yield self.token_gap.family(
            "freetoken_inter_token_latency_seconds", "Between two successive tokens of one sequence"
        )
        yield self._duration.family("freetoken_request_duration_seconds", "From arrival to the end of the answer")
        outcomes = CounterMetricFamily("freetoken_requests", "Requests that are over, by outcome", labels=["outcome"])
        for outcome, number in self._outcomes.items():
            outcomes.add_metric([outcome], number)
        yield outcomes
        yield CounterMetricFamily("freetoken_prompt_tokens", "Prompt tokens taken", value=self._prompt_tokens)
        yield CounterMetricFamily("freetoken_completion_tokens", "Tokens generated", value=self._completion_tokens)

    def _engine_families(self) -> Iterator[Metric]:
        view = self._engine()
        for name, text, gauge in _gauges(view):
            yield GaugeMetricFamily(name, text, value=gauge)
        for name, text, counter in _counters(view):
            yield CounterMetricFamily(name, text, value=counter)
        plugin_counters = CounterMetricFamily(
            "freetoken_engine_events", "Counters that plugins of the engine keep, by name", labels=["name"]
        )
        for name, number in view.stats.counters:
            plugin_counters.add_metric([name], number)
        yield plugin_counters


def _gauges(view: EngineView) -> Iterator[tuple[str, str, float]]:
    stats = view.stats
    yield "freetoken_engine_up", "1 while the engine serves, else 0", float(view.serving)
    yield "freetoken_requests_running", "Sequences in the running batch", stats.running
    yield "freetoken_requests_waiting", "Sequences waiting for a place in the batch", stats.waiting
    yield "freetoken_kv_pages_used", "KV pages held by running sequences", stats.kv_pages_used
    yield "freetoken_kv_pages_cached", "KV pages kept for reuse only", stats.kv_pages_cached
    yield "freetoken_kv_pages_capacity", "KV pages there are", stats.kv_pages_total


def _counters(view: EngineView) -> Iterator[tuple[str, str, float]]:
    stats = view.stats
    yield "freetoken_engine_restarts", "Restarts after the engine process died", view.restarts
    yield "freetoken_engine_steps", "Steps of the engine since it started", stats.steps
    yield "freetoken_prefix_hit_tokens", "Prompt tokens found in the prefix cache", stats.prefix_hit_tokens
    yield "freetoken_prefix_query_tokens", "Prompt tokens looked up in the prefix cache", stats.prefix_query_tokens
    yield "freetoken_preemptions", "Sequences put back to wait for lack of pages", stats.preemptions
    yield "freetoken_late_compiles", "Kernels compiled after the warmup", stats.late_compiles
    yield "freetoken_late_loads", "Kernel modules loaded after the warmup", stats.late_loads
