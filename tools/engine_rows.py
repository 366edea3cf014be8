"""Time passes of 1 to 16 rows in the engine, as `paceline bench step` times them, and a prompt of 512 tokens.

    PACELINE_NATIVE=avx2 .venv/bin/python tools/engine_rows.py FILE.gguf --rounds 2

Passes inside the engine verify chains of wrong drafts in two requests of 96 prompt and 24 answer tokens. The table has
the lowest decile in ms, and the ratio to one row.
"""

from __future__ import annotations

import argparse
import random
from time import perf_counter
from typing import Any

import numpy as np

from paceline import LLM, SamplingParams, kernels
from paceline.api.assembly.memory import kv_layout
from paceline.core.tree import TokenTree
from paceline.engine.budget import FixedBudget
from paceline.engine.calibration import PassTimer

ROWS = (1, 2, 4, 5, 8, 16)


def main() -> None:
    """Print one line of figures for each way of timing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    llm = LLM(
        options.model, drafter="suffix", budget=8, max_model_len=2048, dtype=options.dtype, threads=options.threads
    )
    engine: Any = llm.engine
    stack, drafter = engine.round.target.stack, engine.round.drafter
    decide, passes = stack.decide, dict[int, list[float]]()

    def timed(rows: Any, *rest: Any, **named: Any) -> Any:
        began = perf_counter()
        result = decide(rows, *rest, **named)
        if len(rows.choice_rows) == len(rows.tokens):  # no rows of a prompt
            passes.setdefault(len(rows.tokens), []).append((perf_counter() - began) * 1e3)
        return result

    def wrong(request: Any) -> list[TokenTree]:
        limits = zip(request.budgets, request.max_depths, strict=True)
        return [TokenTree.chain([7 + i for i in range(min(limit))], 0.9) for limit in limits]

    drafter.draft = wrong
    rng, highest = random.Random(3), min(llm.decoder.config.vocab_size, 30_000)

    def prompt(length: int) -> dict[str, Any]:
        return {"prompt_token_ids": [rng.randrange(100, highest) for _ in range(length)]}

    prompts, answer = [prompt(96), prompt(96)], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    timer = PassTimer(llm.decoder, 1, 110, max(ROWS), kv_layout(llm.config, llm.decoder.local, llm.decoder.dtype))
    steps, long_prompts = {rows: list[float]() for rows in ROWS}, list[float]()
    for _ in range(options.rounds):
        stack.decide = timed
        for rows in ROWS:
            engine.budget = engine.scheduler.budget = FixedBudget(rows - 1)
            for each in prompts:
                llm.generate([each], answer)
        stack.decide = decide
        for rows in ROWS:
            timer.ms(1, rows)
            steps[rows] += [timer.ms(1, rows) for _ in range(12)]
        long, began = prompt(512), perf_counter()
        llm.generate([long], SamplingParams(temperature=0, max_tokens=1))
        long_prompts.append((perf_counter() - began) * 1e3)
    print(f"{kernels.describe()}; prompt of 512 tokens: {min(long_prompts):.0f} ms")
    for name, times in (("engine", passes), ("bench step", steps)):
        low = {rows: float(np.quantile(times[rows], 0.1)) for rows in ROWS}
        print(f"{name}: " + ", ".join(f"{rows} rows {ms:.2f} ({ms / low[1]:.2f})" for rows, ms in low.items()))


if __name__ == "__main__":
    main()
