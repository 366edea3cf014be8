"""Answers behind long prompts: the time from the first token on, of every draft and of look-ups, over plain decoding.

Prompts are computed once (`lent`), so that what is timed are answers alone, with every sequence's K/V in a place of its
own. All methods give the same tokens, which is checked, and stand in turns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from kit.random_model import materialised
from kit.study import Table

from paceline.api.llm import LLM
from paceline.bench import machine
from paceline.bench.measure import Builder
from paceline.bench.methods import parse_method
from paceline.bench.records import PLAIN, Method
from paceline.core.errors import CapabilityError
from paceline.core.sampling import SamplingParams
from spire_parts.common import DEPTH, DOMAINS, SpireFlags, contestants, method_of, study
from spire_parts.lent import LentPrompts
from spire_parts.throughput import MOST_ROWS, SMALL_TURNS, lent_prompts, texts_at_once

LOOKUP = "look-ups"
HEAD = ("context", "batch", "method", "tokens/s", "times plain", "least and most of the turns", "tokens a pass")


@dataclass(frozen=True, kw_only=True)
class Answered:
    """A batch of answers."""

    method: str
    batch: int
    context: int
    seconds: float  # from the moment on in which the last sequence has its first token
    tokens: int  # of all sequences since
    passes: int  # of all sequences
    accepted: int  # drafted tokens
    ids: list[list[int]]

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


def methods_of(ask: SpireFlags) -> list[Method]:
    """Plain decoding, look-ups if they are asked for, and the drafts that are there."""
    made = [Method(name=PLAIN)]
    if ask.lookup:
        made.append(replace(parse_method(ask.lookup), name=LOOKUP))
    made += [method_of(ask, name, verifier="sample_and_match") for name in contestants(ask)]
    settings = {"max_batch_rows": MOST_ROWS, "kv_cache_dtype": ask.kv}
    return [replace(one, dtype=ask.dtype, settings={**one.settings, **settings}) for one in made]


def answer(llm: LLM, own: LentPrompts, name: str, context: int, params: Sequence[SamplingParams]) -> Answered:
    """Answer prompts whose K/V was lent."""
    engine = llm.engine
    names = [engine.submit(list(ids), one) for ids, one in zip(own.prompts, params, strict=True)]
    running = [engine.live[name].sequences[0] for name in names]
    while any(not sequence.output_ids for sequence in running):
        engine.step()
    before, began = sum(len(sequence.output_ids) for sequence in running), perf_counter()
    while engine.busy:
        engine.step()
    seconds, ids = perf_counter() - began, [list(sequence.output_ids) for sequence in running]
    return Answered(
        method=name,
        batch=len(running),
        context=context,
        seconds=seconds,
        tokens=sum(map(len, ids)) - before,
        passes=sum(sequence.stats.passes for sequence in running),
        accepted=sum(sequence.stats.accepted for sequence in running),
        ids=ids,
    )


@study.table(
    needs=("here",),
    takes=("spire", "vanilla", "draft", "temperature", "window", "batches", "contexts", "texts", "lookup", "kv"),
    tasks=DOMAINS,
    repeats=1,
    max_new_tokens=64,
    temperature=0.0,
    batches="1,4,16",
    contexts="8000",
)
def answers(ask: SpireFlags) -> Iterator[Table | None]:
    """Answers behind long prompts, from the first token on: tokens a second by batch, and over plain decoding."""
    contexts, batches, tokens = ask.numbers("contexts"), ask.numbers("batches"), ask.max_new_tokens or 64
    yield None
    found, left_out = list[Answered](), list[str]()
    with materialised(ask.model) as folder:
        builder, engines = Builder(folder, ask.device, ask.threads), dict[str, LLM]()
        for method in methods_of(ask):
            try:
                lengths = [[max(contexts) + tokens + DEPTH + 1] * max(batches)]
                engines[method.name] = builder.llm(method, lengths)
            except CapabilityError as error:
                left_out.append(f"{method.name} is left out: {error}")
        for context in contexts:
            known = lent_prompts(ask, engines[PLAIN], context, tokens + DEPTH + 1)
            for batch in batches:
                for turn in range(ask.repeats * max(1, SMALL_TURNS // batch)):
                    own = known.part(turn, batch)
                    seeds = [ask.seed + 1000 * turn + n for n in range(batch)]
                    given: dict[str, Any] = {"temperature": ask.temperature, "max_tokens": tokens, "ignore_eos": True}
                    params = [SamplingParams(seed=seed, **given) for seed in seeds]
                    for name in _turned([*engines], turn):
                        engines[name].forget()
                        own.lend(engines[name], tokens + DEPTH + 1)
                        found.append(answer(engines[name], own, name, context, params))
    yield _table(ask, found, left_out)


def _turned(names: Sequence[str], turn: int) -> list[str]:
    """Every turn begins with another one."""
    first = turn % len(names)
    return [*names[first:], *names[:first]]


def _table(ask: SpireFlags, found: Sequence[Answered], left_out: Sequence[str]) -> Table:
    plain: dict[tuple[int, int], list[Answered]] = {}
    for one in found:
        if one.method == PLAIN:
            plain.setdefault((one.context, one.batch), []).append(one)
    rows, values, same, total = [], [], 0, 0
    for context, batch, name in dict.fromkeys((one.context, one.batch, one.method) for one in found):
        own = [one for one in found if (one.context, one.batch, one.method) == (context, batch, name)]
        beside = plain[context, batch]
        speed, base = (sum(o.tokens for o in each) / sum(o.seconds for o in each) for each in (own, beside))
        times = [one.speed / other.speed for one, other in zip(own, beside, strict=True)]
        length = 1 + sum(one.accepted for one in own) / sum(one.passes for one in own)
        pairs = [
            (a, b) for one, other in zip(own, beside, strict=True) for a, b in zip(one.ids, other.ids, strict=True)
        ]
        if name != PLAIN:
            same, total = same + sum(a == b for a, b in pairs), total + len(pairs)
        spread = f"{min(times):.2f} to {max(times):.2f}"
        rows.append([f"{context:,}", str(batch), name, f"{speed:,.1f}", f"{speed / base:.2f}", spread, f"{length:.2f}"])
        values.append(
            {"context": context, "batch": batch, "method": name, "tokens_per_s": speed, "times_plain": speed / base}
            | {"turns": times, "tokens_a_pass": length}
        )
    texts = texts_at_once(ask)
    copied = f"{texts} texts were computed; more sequences at once have copies of their K/V, each its own"
    return Table(
        title=f"Answers of {ask.max_new_tokens} tokens from the first one on, T={ask.temperature:g}, K/V: {ask.kv}",
        head=HEAD,
        parts={"": rows},
        values={"answers": values, "machine": machine.describe(ask.device), "kv": ask.kv, "texts": texts},
        remarks=[
            *left_out,
            *([copied] if texts < max(ask.numbers("batches")) else []),
            "prompts were computed before the clock ran, and all methods stood in turns",
            f"answers that are plain decoding's: {same} of {total}",
        ],
        same=same == total,
    )
