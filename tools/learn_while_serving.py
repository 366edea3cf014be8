"""What learning while serving is worth: the same requests to an engine that learns and to one that does not, in turns.

    python tools/learn_while_serving.py --model paceline-small --drafter eagle --prompts FILE.jsonl --requests 2000
    .. --prompts FIRST.jsonl --prompts SECOND.jsonl     traffic that switches, and back
    .. --kills 20                                       the learner is killed meanwhile
    .. --no-learner                                     requests are kept alone: what that costs them

``--prompts`` are JSON lines with ``prompt`` or ``turns``. Each line of the table is a hundred requests: tokens a pass
of both, the 99th percentile of a request's ms a token, and the ratio of its means. Behind it stands the percentile over
all requests, with what it is between two halves of the fixed engine's own: so much it differs by chance. Ids of both
are compared, whatever happens.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import cycle, islice
from typing import Any

import numpy as np

from paceline import LLM, SamplingParams
from paceline.adapt.learning.serving import Learning
from paceline.api.config import TARGET_OPTIONS
from paceline.bench.encoding import Encoded
from paceline.bench.workloads import load

BLOCK = 100


def main() -> None:
    """Ask, and print a line for each hundred requests."""
    asked = arguments()
    if asked.no_learner:
        Learning._start = lambda self: None  # type: ignore[method-assign]
    folder = asked.learn or tempfile.mkdtemp(prefix="learned-")
    options: dict[str, Any] = {"dtype": asked.dtype, "threads": asked.threads, "drafter": asked.drafter}
    learns = LLM(asked.model, learn=folder, max_sequences=1, **options)
    same = {name: getattr(learns.config, name) for name in TARGET_OPTIONS}
    fixed = LLM(**same, share=learns, drafter=asked.drafter, threads=asked.threads, max_sequences=1)
    print(f"{asked.model}, {asked.drafter}, {asked.threads} threads, {os.cpu_count()} cores; {folder}")
    print("requests | tokens a pass: fixed | learning | ratio | p99 ms: both | ratio | mean ms: ratio | drafter, kills")
    differ = kills = 0
    rows: list[tuple[float, ...]] = []
    for number, ids in enumerate(islice(traffic(asked, learns), asked.requests), 1):
        params = SamplingParams(temperature=asked.temperature, max_tokens=asked.tokens, seed=number)
        pair = (fixed, learns) if number % 2 else (learns, fixed)
        found = {llm is learns: answer(llm, ids, params) for llm in pair}
        differ += found[True][0] != found[False][0]
        rows.append((*found[False][1:], *found[True][1:]))
        time.sleep(asked.pause_s)
        if asked.kills and number % max(1, asked.requests // asked.kills) == 0 and learns.learning._process:
            with suppress(ProcessLookupError):  # it had ended by itself
                os.kill(learns.learning._process.pid, signal.SIGKILL)
                kills += 1
        if number % BLOCK == 0:
            say(number, rows[-BLOCK:], learns.describe_learning(), kills)
    whole(rows)
    if asked.rows:
        np.savetxt(asked.rows, np.array(rows), fmt="%.4f")
    print(f"{differ} of {asked.requests} answers differ; {learns.describe_learning()}")
    learns.learning.close()


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="paceline-small")
    parser.add_argument("--drafter", default="eagle", help="with a head of states")
    parser.add_argument("--prompts", action="append", required=True, help="several: one behind the other")
    parser.add_argument("--learn", help="folder; default: a fresh one")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--pause-s", type=float, default=0.3, help="between two requests, in which the learner may run")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--rows", help="file for every request's figures: tokens a pass and ms a token of both")
    parser.add_argument("--no-learner", action="store_true")
    return parser.parse_args()


def traffic(asked: argparse.Namespace, llm: LLM) -> Iterator[list[int]]:
    """Prompts: all of one file, or of several in turns, the first one once more at the end."""
    sizes = {"max_model_len": llm.engine.limits.max_model_len, "max_new_tokens": asked.tokens}
    each = [cycle(Encoded(load(file), llm.tokenizer, **sizes).prompts) for file in asked.prompts]
    parts = each if len(each) == 1 else [*each, each[0]]
    for part in parts:
        for prompt in islice(part, -(-asked.requests // len(parts))):
            yield list(prompt.ids)


def answer(llm: LLM, ids: list[int], params: SamplingParams) -> tuple[list[int], float, float]:
    """Ids, tokens a pass, and ms a token."""
    llm.forget()
    began = time.perf_counter()
    output = llm.generate({"prompt_token_ids": ids}, params)[0]
    said = output.outputs[0].token_ids
    took = (time.perf_counter() - began) * 1e3
    return said, len(said) / max(1, output.stats.passes), took / max(1, len(said))


def say(number: int, rows: list[tuple[float, ...]], told: dict[str, Any], kills: int) -> None:
    """A line of the table."""
    fixed, fixed_ms, own, own_ms = np.array(rows).T
    slow, slow_own = np.percentile(fixed_ms, 99), np.percentile(own_ms, 99)
    times = f"{slow:.2f} | {slow_own:.2f} | {slow_own / slow:.2f} | {own_ms.mean() / fixed_ms.mean():.2f}"
    means = f"{fixed.mean():.2f} | {own.mean():.2f} | {own.mean() / fixed.mean():.2f}"
    print(f"{number} | {means} | {times} | {told['drafter']}, {kills}", flush=True)


def whole(rows: list[tuple[float, ...]]) -> None:
    """The percentile over all requests, its interval (requests drawn again), and the same of two halves of the fixed
    engine's requests, taken at random."""
    _, fixed_ms, _, own_ms = np.array(rows).T
    draw = np.random.default_rng(1)
    places = draw.integers(len(rows), size=(2000, len(rows)))
    ratios = np.percentile(own_ms[places], 99, axis=1) / np.percentile(fixed_ms[places], 99, axis=1)
    half = len(rows) // 2
    orders = np.array([draw.permutation(fixed_ms) for _ in range(2000)])
    chance = np.percentile(orders[:, :half], 99, axis=1) / np.percentile(orders[:, half:], 99, axis=1)
    low, high, by_chance = *np.percentile(ratios, [2.5, 97.5]), np.percentile(chance, 97.5)
    fixed, own = np.percentile(fixed_ms, 99), np.percentile(own_ms, 99)
    print(f"p99 of all {len(rows)}: {fixed:.2f} and {own:.2f} ms, {own / fixed:.2f} [{low:.2f}, {high:.2f}]; ", end="")
    print(f"halves of the fixed engine's differ by up to {by_chance:.2f}; means {own_ms.mean() / fixed_ms.mean():.2f}")


if __name__ == "__main__":
    main()
