"""What a server measures, for Prometheus: the engine's own counts, and what clients waited for."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from nemotron.stack.serving.engine import Stats

# Seconds: from a tiny model's first token on a laptop to a long answer of a large one.
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKENS = tuple(4**power for power in range(11))  # up to a million


class EngineCounts:
    """A collector of `Stats`, read when Prometheus asks."""

    def __init__(self, stats: Callable[[], Stats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        """The engine's counts now."""
        stats = self._stats()
        for name, text, number in (
            ("requests_running", "Requests that are read or decoded.", stats.running),
            ("requests_waiting", "Requests that wait for a row.", stats.waiting),
            ("rows", "Rows that a step computes, idle ones included.", stats.rows),
            ("prompt_cache_bytes", "Memory of the states kept of prompts.", stats.prompt_cache_bytes),
        ):
            yield GaugeMetricFamily(f"nemotron_{name}", text, number)
        for name, text, number in (
            ("prompt_tokens", "Tokens of prompts that were begun.", stats.prompt_tokens),
            ("cached_prompt_tokens", "Tokens of prompts that the prompt cache spared.", stats.cached_prompt_tokens),
            ("generated_tokens", "Tokens of answers.", stats.generated_tokens),
            ("drafts_proposed", "Tokens that multi-token prediction drafted.", stats.drafts_proposed),
            ("drafts_accepted", "Drafts that the model accepted.", stats.drafts_accepted),
            ("steps", "Decoding steps.", stats.steps),
        ):
            yield CounterMetricFamily(f"nemotron_{name}", text, number)
        finished = CounterMetricFamily("nemotron_requests_finished", "Requests by how they ended.", labels=["reason"])
        for reason in ("stop", "length", "cancelled", "error"):
            finished.add_metric([reason], stats.finished.get(reason, 0))
        yield finished


class Metrics:
    """The metrics of one server; times in seconds."""

    def __init__(self, stats: Callable[[], Stats]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineCounts(stats))
        self.responses = Counter(
            "nemotron_http_responses", "Answers by path and status.", ["path", "status"], registry=self.registry
        )
        self.first_token = Histogram(
            "nemotron_time_to_first_token_seconds", "From a request to its first token.",
            buckets=_SECONDS, registry=self.registry,
        )  # fmt: skip
        self.duration = Histogram(
            "nemotron_request_seconds", "From a request to the end of its answers.",
            buckets=_SECONDS, registry=self.registry,
        )  # fmt: skip
        self.prompt_tokens = Histogram(
            "nemotron_request_prompt_tokens", "Tokens of a prompt.", buckets=_TOKENS, registry=self.registry
        )
        self.answer_tokens = Histogram(
            "nemotron_request_answer_tokens", "Tokens of an answer.", buckets=_TOKENS, registry=self.registry
        )

    def page(self) -> bytes:
        """All of them in Prometheus' text format."""
        return generate_latest(self.registry)
