"""What ``GET /metrics`` says, in Prometheus' form.

What vLLM counts, too, has its name: ``paceline:time_to_first_token_seconds``, or with ``--metrics-names vllm``
``vllm:time_to_first_token_seconds``. What it does not count is always under ``paceline:``.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

OWN = "paceline"
BASE = "base"  # the application of requests that name none; Prometheus takes an empty label for none
NODES = (0, 1, 2, 4, 8, 16, 32, 64, 128)  # bounds of what is drafted in a step
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

# By name, in seconds or tokens: bounds, and what it is for a reader.
HISTOGRAMS = {
    "time_to_first_token_seconds": (FIRST_S, "From a request's arrival to its first token."),
    "inter_token_latency_seconds": (BETWEEN_S, "Between two chunks of a stream, of one token or several."),
    "request_time_per_output_token_seconds": (BETWEEN_S, "Time behind the first token, over the tokens behind it."),
    "e2e_request_latency_seconds": (REQUEST_S, "From a request's arrival to its end."),
    "request_queue_time_seconds": (REQUEST_S, "From a request's arrival at the engine to its first step."),
    "request_inference_time_seconds": (REQUEST_S, "From a request's first step to its end."),
    "request_prefill_time_seconds": (REQUEST_S, "From a request's first step to its first token."),
    "request_decode_time_seconds": (REQUEST_S, "From a request's first token to its end."),
    "request_prompt_tokens": (TOKENS, "Tokens of a prompt."),
    "request_generation_tokens": (TOKENS, "Tokens of an answer."),
}


class Histogram:
    """Counts values by upper bounds.

    Args:
        bounds: ascending; beyond the last one is room for the rest.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Prometheus' form: each bound with the count of what is not above it, the last of which is ``+Inf``."""
        names = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
        return [*zip(names, map(float, accumulate(self.counts)), strict=True)]


def gauges(engine: Mapping[str, Any]) -> Iterator[tuple[str, str, float]]:
    """How an engine is, from `Snapshot.as_dict`."""
    yield "num_requests_running", "Sequences that are running.", engine["running"]
    yield "num_requests_waiting", "Sequences that wait.", engine["waiting"]
    used = engine["kv_used"] / engine["kv_tokens"] if engine["kv_tokens"] else 0.0
    yield "kv_cache_usage_perc", "Share of the K/V pool that running sequences hold; 1 is all of it.", used


def shared_counts(engine: Mapping[str, Any]) -> Iterator[Count]:
    """What vLLM counts, too."""
    stats = engine["stats"]
    drafts = sum(map(sum, stats["accepted_by_drafted"].values()))
    plain = {
        "num_preemptions": (stats["preemptions"], "Sequences that had to give way."),
        "prompt_tokens": (stats["prompt_tokens"], "Tokens of prompts."),
        "generation_tokens": (stats["emitted"], "Tokens of answers."),
        "prefix_cache_queries": (engine["prefix_queries"], "Prompt tokens that were looked for in the K/V pool."),
        "prefix_cache_hits": (engine["prefix_hits"], "Those of them that were found."),
        "spec_decode_num_drafts": (drafts, "Steps of a sequence with drafts."),
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
    """What vLLM does not count."""
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


def nodes(engine: Mapping[str, Any]) -> Histogram:
    """Nodes that were drafted in the steps of a sequence."""
    stats, found = engine["stats"], Histogram(NODES)
    drafting = 0
    for drafted, row in stats["accepted_by_drafted"].items():
        found.add(float(drafted), sum(row))
        drafting += sum(row)
    found.add(0.0, stats["passes"] - drafting)
    return found


class Metrics:
    """The metrics of a server. Its counters only grow, whatever becomes of its engine; but ``draft_nodes`` begins anew
    with a new one.

    Args:
        model: its name for clients.
        names: whose names are used where there are two.
        replica: the server's name among several.
    """

    def __init__(self, model: str, names: str, replica: str | None = None) -> None:
        self._labels = {"model_name": model, "engine": "0"} | ({"replica": replica} if replica else {})
        self._shared = names
        # What requests took, and how long they were.
        self.times = {name: Histogram(bounds) for name, (bounds, _) in HISTOGRAMS.items()}
        self.engine: Mapping[str, Any] | None = None  # its counters at the last look
        self.restarts = 0
        self.up = False
        self._before: dict[tuple[str, tuple[str, ...]], float] = {}  # what engines counted that are gone

    def ended(self, stats: Mapping[str, Any], whole_s: float, prompt: int, tokens: int, samples: int) -> None:
        """Take in a request that has ended.

        Args:
            stats: `SpecStats.as_dict`, of the engine that ended it.
            whole_s: from its arrival to its end.
            prompt, tokens: of prompt and output.
            samples: among which the output's tokens are.
        """
        self.times["e2e_request_latency_seconds"].add(whole_s)
        self.times["request_prompt_tokens"].add(prompt)
        self.times["request_generation_tokens"].add(tokens)
        queue_ms, first_ms, elapsed_ms = stats["queue_ms"], stats["ttft_ms"], stats["elapsed_ms"]
        if queue_ms is None or first_ms is None or first_ms < queue_ms:  # ended before its first token
            return
        decode_s = max(0.0, elapsed_ms - first_ms) / 1e3
        self.times["request_queue_time_seconds"].add(queue_ms / 1e3)
        self.times["request_prefill_time_seconds"].add((first_ms - queue_ms) / 1e3)
        self.times["request_decode_time_seconds"].add(decode_s)
        self.times["request_inference_time_seconds"].add((elapsed_ms - queue_ms) / 1e3)
        if tokens > samples:
            self.times["request_time_per_output_token_seconds"].add(decode_s * samples / (tokens - samples))

    def looked(self, engine: Mapping[str, Any] | None, restarts: int) -> None:
        """Take in the engine's counters; None: there is no engine at the moment."""
        self.up = engine is not None
        if engine is None:
            return
        if self.engine is not None and restarts != self.restarts:
            for name, _, labels, value in self._counts(self.engine):
                key = name, (*labels.values(),)
                self._before[key] = self._before.get(key, 0.0) + value
        self.engine, self.restarts = engine, restarts

    def _counts(self, engine: Mapping[str, Any]) -> Iterator[Count]:
        for prefix, counts in ((self._shared, shared_counts(engine)), (OWN, own_counts(engine))):
            for name, words, labels, value in counts:
                yield f"{prefix}:{name}", words, labels, value

    def collect(self) -> Iterator[Metric]:
        """All of them, for prometheus_client."""
        for name, (_, words) in HISTOGRAMS.items():
            yield self._histogram(f"{self._shared}:{name}", words, self.times[name])
        restarts = CounterMetricFamily(f"{OWN}:engine_restarts", "Engines that were lost.", labels=[*self._labels])
        restarts.add_metric([*self._labels.values()], self.restarts)
        yield restarts
        if self.engine is None:
            return
        for name, words, value in gauges(self.engine) if self.up else ():
            gauge = GaugeMetricFamily(f"{self._shared}:{name}", words, labels=[*self._labels])
            gauge.add_metric([*self._labels.values()], value)
            yield gauge
        words = "1 while a drafter that failed is put aside."
        failed = GaugeMetricFamily(f"{OWN}:drafter_failed", words, labels=[*self._labels])
        failed.add_metric([*self._labels.values()], float(self.engine["speculation"].get("failure") is not None))
        yield failed
        yield self._histogram(f"{OWN}:draft_nodes", "Nodes drafted in a step of a sequence.", nodes(self.engine))
        families: dict[str, CounterMetricFamily] = {}
        for name, words, labels, value in self._counts(self.engine):
            all_labels = self._labels | labels
            family = families.setdefault(name, CounterMetricFamily(name, words, labels=[*all_labels]))
            family.add_metric([*all_labels.values()], value + self._before.get((name, (*labels.values(),)), 0.0))
        yield from families.values()

    def _histogram(self, name: str, words: str, found: Histogram) -> Metric:
        family = HistogramMetricFamily(name, words, labels=[*self._labels])
        family.add_metric([*self._labels.values()], found.buckets(), found.total)
        return family


def merged(texts: Iterable[str]) -> str:
    """What several replicas say as one text, in which all samples of a metric stand together."""
    families: dict[str, list[str]] = {}
    for text in texts:
        for block in re.split(r"(?m)^(?=# HELP )", text):
            if block:
                head, *samples = re.split(r"(?m)^(?!#)", block, maxsplit=1)
                families.setdefault(head, []).extend(samples)
    return "".join(head + "".join(samples) for head, samples in families.items())
