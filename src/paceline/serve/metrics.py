"""The metrics of ``GET /metrics``, in Prometheus' form.

What vLLM counts, too, has its name: ``paceline:time_to_first_token_seconds``, or with ``--metrics-names vllm``
``vllm:time_to_first_token_seconds``. What it does not count is always under ``paceline:``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

disable_created_metrics()  # without a sample of the time at which each metric was made
OWN = "paceline"
BASE = "base"  # the application of requests that name none; Prometheus takes an empty label for none
GAUGES = {
    "num_requests_running": "Sequences that are running.",
    "num_requests_waiting": "Sequences that wait.",
    "kv_cache_usage_perc": "Share of the K/V pool that running sequences hold; 1 is all of it.",
}
Count = tuple[str, str, dict[str, str], float]  # name, help, labels besides the model's, value

# Upper bounds as vLLM has them, so that its dashboards show what they show there.
FIRST_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
BETWEEN_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_S = (
    *(0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
TOKENS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))

# By name, in seconds or tokens: upper bounds and help.
HISTOGRAMS = {
    "time_to_first_token_seconds": (FIRST_S, "From a request's arrival to its first token."),
    "inter_token_latency_seconds": (BETWEEN_S, "Between two chunks of a stream, of one token or several."),
    "request_time_per_output_token_seconds": (BETWEEN_S, "Time after the first token, over the tokens after it."),
    "e2e_request_latency_seconds": (REQUEST_S, "From a request's arrival to its end."),
    "request_queue_time_seconds": (REQUEST_S, "From a request's arrival at the engine to its first step."),
    "request_inference_time_seconds": (REQUEST_S, "From a request's first step to its end."),
    "request_prefill_time_seconds": (REQUEST_S, "From a request's first step to its first token."),
    "request_decode_time_seconds": (REQUEST_S, "From a request's first token to its end."),
    "request_prompt_tokens": (TOKENS, "Tokens of a prompt."),
    "request_generation_tokens": (TOKENS, "Tokens of an answer."),
}


def shared_counts(engine: Mapping[str, Any]) -> Iterator[Count]:
    """Yield the counters that vLLM has, too."""
    stats = engine["stats"]
    plain = {
        "num_preemptions": (stats["preemptions"], "Sequences that had to give way."),
        "prompt_tokens": (stats["prompt_tokens"], "Tokens of prompts."),
        "generation_tokens": (stats["emitted"], "Tokens of answers."),
        "prefix_cache_queries": (engine["prefix_queries"], "Prompt tokens that were looked for in the K/V pool."),
        "prefix_cache_hits": (engine["prefix_hits"], "Those of them that were found."),
        "spec_decode_num_drafts": (sum(stats["depth_offered"][:1]), "Steps of a sequence with drafts."),
        "spec_decode_num_draft_tokens": (stats["drafted"], "Tokens that were drafted and checked."),
        "spec_decode_num_accepted_tokens": (stats["accepted"], "Those of them that were accepted."),
    }
    for name, (value, words) in plain.items():
        yield name, words, {}, value
    for position, value in enumerate(stats["depth_accepted"]):
        words = "Accepted tokens by their depth in the draft."
        yield "spec_decode_num_accepted_tokens_per_pos", words, {"position": str(position)}, value
    for reason, value in engine["ended"].items():
        yield "request_success", "Samples that have ended.", {"finished_reason": reason}, value


def own_counts(engine: Mapping[str, Any]) -> Iterator[Count]:
    """Yield the counters that vLLM does not have."""
    for part in ("draft", "verify", "host", "idle"):
        words = "Time of the engine's steps by what it was for."
        yield "time_seconds", words, {"part": part}, engine["stats"][f"{part}_ms"] / 1e3
    yield "engine_steps", "Steps of the engine.", {}, engine["steps"]
    for name, stats in engine["by_application"].items():
        application = {"application": name or BASE}
        yield "passes", "Passes of the target that brought tokens.", application, stats["passes"]
        words = "Accepted tokens; 1 + accepted / passes is the mean accepted length."
        yield "accepted_tokens", words, application, stats["accepted"]
        for source, part in stats["sources"].items():
            labels = application | {"source": source}
            yield "source_draft_tokens", "Drafted tokens by who drafted them.", labels, part["drafted"]
            yield "source_accepted_tokens", "Accepted tokens by who drafted them.", labels, part["accepted"]
            for position, value in enumerate(part["accepted_at"]):
                words = "Accepted tokens by who drafted them and how deep."
                yield "source_accepted_tokens_per_pos", words, labels | {"position": str(position)}, value


class Metrics:
    """The metrics of a server.

    Its counters only grow, also when its engine is restarted.

    Args:
        model: its name for clients.
        names: prefix of the metrics that vLLM has, too.
        replica: the server's name among several.
    """

    def __init__(self, model: str, names: str, replica: str | None = None) -> None:
        self._labels = {"model_name": model, "engine": "0"} | ({"replica": replica} if replica else {})
        self._shared, self._registry = names, CollectorRegistry()
        common: Any = {"labelnames": [*self._labels], "registry": self._registry}
        self.times = {  # durations and lengths of requests
            name: Histogram(f"{names}:{name}", words, buckets=bounds, **common).labels(**self._labels)
            for name, (bounds, words) in HISTOGRAMS.items()
        }
        lost = Counter(f"{OWN}:engine_restarts", "Engines that were lost.", **common)
        self._restarts, self._num_restarts = lost.labels(**self._labels), 0
        self._gauges = {name: Gauge(f"{names}:{name}", words, **common) for name, words in GAUGES.items()}
        words = "1 while a drafter that failed is put aside."
        self._failed = Gauge(f"{OWN}:drafter_failed", words, **common)
        self._counters: dict[str, Counter] = {}  # each is made when an engine first reports it
        self._last: dict[tuple[str, tuple[str, ...]], float] = {}  # values of the present engine's counters

    def ended(self, stats: Mapping[str, Any], whole_s: float, prompt: int, tokens: int, samples: int) -> None:
        """Count a request that has ended.

        Args:
            stats: `SpecStats.as_dict`, of the engine that ended it.
            whole_s: from its arrival to its end.
            prompt, tokens: of prompt and output.
            samples: among which the output's tokens are.
        """
        self.times["e2e_request_latency_seconds"].observe(whole_s)
        self.times["request_prompt_tokens"].observe(prompt)
        self.times["request_generation_tokens"].observe(tokens)
        queue_ms, first_ms, elapsed_ms = stats["queue_ms"], stats["ttft_ms"], stats["elapsed_ms"]
        if queue_ms is None or first_ms is None or first_ms < queue_ms:  # ended before its first token
            return
        decode_s = max(0.0, elapsed_ms - first_ms) / 1e3
        self.times["request_queue_time_seconds"].observe(queue_ms / 1e3)
        self.times["request_prefill_time_seconds"].observe((first_ms - queue_ms) / 1e3)
        self.times["request_decode_time_seconds"].observe(decode_s)
        self.times["request_inference_time_seconds"].observe((elapsed_ms - queue_ms) / 1e3)
        if tokens > samples:
            self.times["request_time_per_output_token_seconds"].observe(decode_s * samples / (tokens - samples))

    def update(self, engine: Mapping[str, Any] | None, restarts: int) -> None:
        """Take over the engine's counters, `Snapshot.as_dict`; None: there is no engine at the moment."""
        if restarts != self._num_restarts:
            self._restarts.inc(restarts - self._num_restarts)
            self._num_restarts = restarts
            self._last.clear()  # a new engine counts from 0
        if engine is None:
            for gauge in self._gauges.values():
                gauge.clear()
            return
        used = engine["kv_used"] / engine["kv_tokens"] if engine["kv_tokens"] else 0.0
        for gauge, value in zip(self._gauges.values(), (engine["running"], engine["waiting"], used), strict=True):
            gauge.labels(**self._labels).set(value)
        self._failed.labels(**self._labels).set(engine["speculation"].get("failure") is not None)
        for prefix, counts in ((self._shared, shared_counts(engine)), (OWN, own_counts(engine))):
            for name, words, labels, value in counts:
                all_labels, key = self._labels | labels, (name, (*labels.values(),))
                if name not in self._counters:
                    self._counters[name] = Counter(f"{prefix}:{name}", words, [*all_labels], registry=self._registry)
                self._counters[name].labels(**all_labels).inc(value - self._last.get(key, 0.0))
                self._last[key] = value

    def text(self) -> str:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry).decode()


def merged(texts: Iterable[str]) -> str:
    """Return the metrics of several replicas as one text, in which all samples of a metric stand together."""
    families: dict[str, Metric] = {}
    for family in chain.from_iterable(map(text_string_to_metric_families, texts)):
        if family is not families.setdefault(family.name, family):
            families[family.name].samples += family.samples
    return generate_latest(SimpleNamespace(collect=families.values)).decode()
