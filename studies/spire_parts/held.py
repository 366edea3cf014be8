"""Bytes of K/V by context: what a draft holds beside the target's, and what a pass of it reads (sections 3.1 and 4)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from kit.study import Table
from torch import Tensor

from paceline.bench.measure import Builder
from paceline.bench.records import PLAIN, Method
from paceline.core.sampling import SamplingParams
from paceline.model.attention.base import slot_indices
from spire_parts.common import (
    CONTEXTS,
    DEPTH,
    MAGICDEC,
    SPIRE,
    SpireFlags,
    contestants,
    method_of,
    study,
    verdict,
)

STEPS = 3  # behind the prompt: drafts are made and some of them kept


def written(cache: Sequence[Tensor]) -> int:
    """Slots that hold anything: K of the first layer is nowhere zero, and zeros are what a pool begins with."""
    return int((cache[0].abs().sum((0, 2)) > 0).sum())


def slot_bytes(cache: Sequence[Tensor]) -> int:
    """K and V of all layers of one slot."""
    each = cache[0][:, 0]
    return 2 * len(cache) * each.numel() * each.element_size()


def counted(llm: Any, name: str, context: int) -> tuple[int, int, int]:
    """A request in the middle of its answer: bytes of the target's K/V, of the draft's own, and those that the next
    pass of the draft reads."""
    engine, vocab = llm.engine, llm.decoder.config.vocab_size
    prompt = [8 + (7 * n + n // 13) % (vocab - 8) for n in range(context)]
    request = engine.submit(prompt, SamplingParams(temperature=0, max_tokens=64, ignore_eos=True))
    for _ in range(STEPS + -(-context // engine.scheduler.config.max_batch_rows)):
        engine.step()
    (sequence,) = engine.live[request].sequences
    cache, drafter, pool = sequence.cache, engine.round.drafter, engine.pool
    position = len(sequence.tokens) - 1
    whole = cache.committed * slot_bytes(pool.k)
    if name == PLAIN:
        own, seen = 0, whole
    elif name == MAGICDEC:
        each = slot_bytes(pool.k)
        keys = len(slot_indices(drafter.view.keys(cache, position, 0), pool.device))
        own, seen = drafter.config.sinks * each, keys * each
    elif name == SPIRE:
        each = slot_bytes(drafter.ring.k)
        own, seen = written(drafter.ring.k) * each, min(position, drafter.ring.view.keys) * each
    else:
        own = seen = written(drafter.model.pool.k) * slot_bytes(drafter.model.pool.k)  # it reads all that it holds
    engine.abort(request)
    return whole, own, seen


@study.table(takes=("vanilla", "spire", "draft", "window", "contexts"))
def kv_bytes(ask: SpireFlags) -> Iterator[Table | None]:
    """K/V by context: bytes that a draft holds for a text, and bytes that one of its passes reads."""
    contexts = ask.numbers("contexts") or CONTEXTS
    yield None
    drafts = [method_of(ask, name, verifier="sample_and_match") for name in contestants(ask)]
    methods = [replace(method, dtype=ask.dtype) for method in (Method(name=PLAIN), *drafts)]
    builder, rows, values = Builder(ask.model, ask.device, ask.threads), [], []
    for method in methods:
        for context in contexts:
            whole, own, seen = counted(builder.llm(method, [[context + 64]]), method.name, context)
            values.append(
                {"draft": method.name, "context": context, "target_holds": whole, "holds": own, "pass_reads": seen}
            )
            rows.append([method.name, f"{context:,}", *(f"{n / 1024:,.0f}" for n in (whole, own, seen))])
    constant = {name: {one["pass_reads"] for one in values if one["draft"] == name} for name in (MAGICDEC, SPIRE)} | {
        "held": {one["holds"] for one in values if one["draft"] == SPIRE}
    }
    remarks = [
        verdict("bytes that a pass of MagicDec reads are the same at all contexts", len(constant[MAGICDEC]) == 1)
    ]
    if ask.spire:
        remarks.append(verdict("bytes that SPIRe holds are the same at all contexts", len(constant["held"]) == 1))
    yield Table(
        title=f"K/V of a text in the middle of its answer, KiB, k = {DEPTH}",
        head=("draft", "context", "target holds", "draft holds", "a draft pass reads"),
        parts={"": rows},
        values={"bytes": values},
        remarks=[
            *remarks,
            "plain: what a pass of the target reads; a draft's own: counted in the slots that are written",
        ],
    )
