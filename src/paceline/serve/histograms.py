"""Histograms of the times of requests, for `metrics`: cheap enough to be kept whether anybody reads them or not."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

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


class Times(dict[str, Histogram]):
    """What requests took and how long they were: the `HISTOGRAMS` by name."""

    def __init__(self) -> None:
        super().__init__({name: Histogram(bounds) for name, (bounds, _) in HISTOGRAMS.items()})

    def ended(self, stats: Mapping[str, Any], whole_s: float, prompt: int, tokens: int, samples: int) -> None:
        """Take in a request that has ended.

        Args:
            stats: `SpecStats.as_dict`, of the engine that ended it.
            whole_s: from its arrival to its end.
            prompt, tokens: of prompt and output.
            samples: among which the output's tokens are.
        """
        self["e2e_request_latency_seconds"].add(whole_s)
        self["request_prompt_tokens"].add(prompt)
        self["request_generation_tokens"].add(tokens)
        queue_ms, first_ms, elapsed_ms = stats["queue_ms"], stats["ttft_ms"], stats["elapsed_ms"]
        if queue_ms is None or first_ms is None or first_ms < queue_ms:  # ended before its first token
            return
        decode_s = max(0.0, elapsed_ms - first_ms) / 1e3
        self["request_queue_time_seconds"].add(queue_ms / 1e3)
        self["request_prefill_time_seconds"].add((first_ms - queue_ms) / 1e3)
        self["request_decode_time_seconds"].add(decode_s)
        self["request_inference_time_seconds"].add((elapsed_ms - queue_ms) / 1e3)
        if tokens > samples:
            self["request_time_per_output_token_seconds"].add(decode_s * samples / (tokens - samples))
