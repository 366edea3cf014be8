"""Measurements before the choice: passes, look-ups on the prompts, and each kind's speed of training and drafting."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from math import exp, log
from operator import truediv
from pathlib import Path
from statistics import fmean, median
from time import monotonic
from typing import Any

from ..api.config import TARGET_OPTIONS
from ..api.llm import LLM
from ..bench.calibrate import measure
from ..core.errors import ConfigError, StorageError
from ..core.outputs import RequestOutput
from ..core.sampling import SamplingParams
from ..core.stats import SpecStats
from ..plan.models import shape_of
from ..train.recipes.heads import HeadOptions
from .training import Making, probe

REPEATS, ROWS, BATCHES, CONTEXTS = 5, (1, 2, 3, 4, 6, 8, 16), (1, 4, 8), (128, 512)
LOOKED, LOOKED_LEAST = 40, 4  # prompts that look-ups are tried on: so many where there is time, and so many in any case
TIMED, TIMED_TOKENS = 8, 32  # prompts that a drafter is timed on
LOOKUP = "suffix"


def costs(llm: LLM, repeats: int) -> dict[str, Any]:
    """Return times of passes, as `Survey` has them."""
    table = measure(llm.decoder, repeats=repeats, rows=ROWS, batches=BATCHES, contexts=CONTEXTS)
    sizes = shape_of(llm.decoder.config)
    heads = 1 if llm.decoder.config.tied else 2
    return {
        "chain": table.chain,
        "plain": table.plain,
        "context": table.context,
        "context_ms": table.context_ms,
        "parameters": int(sizes.body_parameters + heads * sizes.head_parameters),
    }


def look_ups(
    llm: LLM, prompts: Sequence[Sequence[int]], most: int, seconds: float, tell: Callable[[], None]
) -> dict[str, float]:
    """Return the value of look-ups on some prompts, compared with plain decoding, one after the other.

    Args:
        prompts: in any order, since the time may end before the last one.
        most: tokens of an answer. The longer it is, the more of it look-ups know.
        seconds: after which no further prompt is answered.
    """
    other = beside(llm, LOOKUP)
    ratios: list[float] = []
    all_passes, until = SpecStats(), monotonic() + seconds
    for each in (llm, other):  # the cost of drafts is learned in the first answers
        ask(each, prompts[-1], most)
    for ids in prompts[:LOOKED]:
        if len(ratios) >= LOOKED_LEAST and monotonic() > until:
            break
        plain, looked = (ask(each, ids, most) for each in (llm, other))
        ratios.append(log(max(1e-6, plain.stats.elapsed_ms) / max(1e-6, looked.stats.elapsed_ms)))
        all_passes = all_passes.merge(looked.stats)
        tell()
    right = all_passes.accepted_histogram[1:]
    tokens = sum(count * (accepted + 1) for accepted, count in enumerate(right, 1))
    return {
        "lookup_speed": exp(fmean(ratios)),
        "lookup_tokens": max(1.0, all_passes.emitted / max(1, all_passes.passes)),
        "copied": min(1.0, tokens / max(1, all_passes.emitted)),
        "copied_tokens": tokens / max(1, sum(right)) if tokens else 1.0,
    }


def beside(llm: LLM, drafter: str, **options: Any) -> LLM:
    """Return another engine on the same target, for one request at a time."""
    same = {name: getattr(llm.config, name) for name in TARGET_OPTIONS}
    return LLM(**same, share=llm, drafter=drafter, max_sequences=1, **options)


def ask(llm: LLM, ids: Sequence[int], most: int, **options: Any) -> RequestOutput:
    """Return one greedy answer, generated without anything cached from an earlier one."""
    llm.forget()
    return llm.generate({"prompt_token_ids": list(ids)}, SamplingParams(temperature=0, max_tokens=most, **options))[0]


def steps(llm: LLM, drafter: str, prompts: Sequence[Sequence[int]]) -> list[tuple[float, float]]:
    """Return times of steps that draft so many nodes, in plain steps of the same turn: drafts, passes and overhead.

    Trees are timed of as many nodes as the drafter drafts tokens ahead, and of more.
    """
    depth = HeadOptions.depth
    engines = [llm, *(beside(llm, drafter, budget=nodes) for nodes in (1, depth, 2 * depth, 4 * depth))]
    times: list[list[float]] = [[] for _ in engines]
    nodes: list[list[float]] = [[] for _ in engines]
    for ids in prompts[: TIMED + 1]:
        for k, each in enumerate(engines):
            stats = ask(each, ids, TIMED_TOKENS, ignore_eos=True).stats
            passes = max(1, stats.passes - 1)  # the prompt's is not counted
            times[k].append((stats.elapsed_ms - (stats.ttft_ms or 0.0)) / passes)
            nodes[k].append(stats.drafted / passes)
    plain, *others = [own[1:] for own in times]  # the first one warms up
    ratios = [median(map(truediv, own, plain)) for own in others]
    found = sorted((fmean(own[1:]), took) for own, took in zip(nodes[1:], ratios, strict=True))
    least = [*accumulate([took for _, took in reversed(found)], min)]  # fewer nodes take no longer than more
    return [(count, took) for (count, _), took in zip(found, reversed(least), strict=True)]


def kinds(
    llm: LLM,
    names: Sequence[str],
    making: Making,
    folder: Path,
    prompts: Sequence[Sequence[int]],
    seconds: float,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """Return each kind's speeds, while time is left (one at least), and why others have none.

    Args:
        making: of the drafters, whatever their kind.
        folder: for what is tried.
    """
    found: dict[str, Any] = {}
    missing: dict[str, str] = {}
    longest, until = 0.0, monotonic() + seconds
    for name in names:
        began = monotonic()
        if found and began + longest > until:
            missing[name] = "there was no time to measure it"
            continue
        tell(name)
        try:
            found[name] = _kind(llm, replace(making, kind=name), folder / name, prompts)
        except StorageError:
            raise
        except ConfigError as error:
            missing[name] = f"{error.asked}: {error.wrong}"
            if len(names) == 1:
                raise
        longest = max(longest, monotonic() - began)
    return {"kinds": found, "missing": missing}


def _kind(llm: LLM, making: Making, place: Path, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return the `Speeds` of a kind: train a few steps, and draft with the result."""
    shutil.rmtree(place, ignore_errors=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        result, speeds = probe(making, place)
        return speeds | {"steps": steps(llm, f"{making.kind}:{result}", prompts)}
    finally:
        shutil.rmtree(place, ignore_errors=True)
