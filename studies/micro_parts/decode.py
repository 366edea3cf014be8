"""Plain decoding, one request and many at once, beside transformers on the same weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import permutations
from statistics import geometric_mean, median
from time import perf_counter
from typing import Any

import torch

from paceline.api.llm import LLM
from paceline.core.sampling import SamplingParams

Runner = Callable[[list[list[int]], int], int]  # prompts, new tokens each -> tokens that came out


@dataclass(frozen=True, kw_only=True)
class DecodeRate:
    """One engine at one batch size."""

    engine: str
    batch: int
    tokens_per_s: float  # median over the repeats
    low: float  # slowest repeat
    high: float  # fastest repeat
    repeats: int


def measure(
    engines: dict[str, Runner],
    batches: Sequence[int],
    prompt_tokens: int,
    new_tokens: int,
    vocab_size: int,
    repeats: int,
) -> tuple[list[DecodeRate], dict[tuple[str, str, int], float]]:
    """Every engine in turn on the same prompts, so that a slow moment hits all alike.

    Returns:
        Rates, and for each (engine, other engine, batch) the geometric mean of the paired ratios of speed.
    """
    generator = torch.Generator().manual_seed(1)
    rates: dict[tuple[str, int], list[float]] = {(name, b): [] for name in engines for b in batches}
    for repeat in range(repeats + 1):  # the first one warms up
        for batch in batches:
            # Fresh prompts in every repeat: nothing may be found in a prefix cache.
            prompts = torch.randint(8, vocab_size, (batch, prompt_tokens), generator=generator).tolist()
            for name, run in engines.items():
                began = perf_counter()
                tokens = run(prompts, new_tokens)
                rate = tokens / (perf_counter() - began)
                if repeat:
                    rates[name, batch].append(rate)
    rows = [
        DecodeRate(engine=name, batch=b, tokens_per_s=median(r), low=min(r), high=max(r), repeats=len(r))
        for (name, b), r in rates.items()
    ]
    ratios = {
        (a, c, b): geometric_mean(x / y for x, y in zip(rates[a, b], rates[c, b], strict=True))
        for a, c in permutations(engines, 2)
        for b in batches
    }
    return rows, ratios


def paceline_runner(llm: LLM) -> Runner:
    """Greedy decoding with Paceline, EOS ignored."""

    def run(prompts: list[list[int]], new_tokens: int) -> int:
        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
        llm.forget()
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return run


def transformers_runner(folder: str, dtype: torch.dtype, device: str) -> Runner:
    """Greedy decoding with transformers' ``generate``, EOS ignored."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model = model.to(device).eval()

    @torch.inference_mode()
    def run(prompts: list[list[int]], new_tokens: int) -> int:
        ids = torch.tensor(prompts, device=device)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            pad_token_id=0,
        )
        return int(out.shape[0] * (out.shape[1] - ids.shape[1]))

    return run
