"""Attention of streams over few keys (appendix H.1): what it saves of a fused step."""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter
from typing import Any

from kit.study import Table

from paceline.api.llm import LLM
from paceline.bench import machine
from paceline.core.errors import CapabilityError
from paceline.kernels.calls import RowSpan
from paceline.kernels.calls import TokenPass as Pass
from paceline.kernels.streams import StreamCarrier, StreamRun
from paceline.kv.pool import SequenceCache
from paceline.papers.streaming.model import StreamSet
from paceline.weights.loader import resolve_folder
from streaming.common import StreamingFlags, TrainedSet, study

CONTEXTS = (256, 1024, 1900)
STEPS = 40  # of each kind
QUICK_STEPS = 2
FEW = 64  # keys that a stream attends to (appendix H.1)
DRAFTS = (8, 32)  # nodes


@study.table(needs=("set",), repeats=STEPS, quick={"repeats": QUICK_STEPS})
def appendix_h1(ask: StreamingFlags) -> Iterator[Table | None]:
    """Time of a fused step, streams on every node, that attend to all keys or to those with the highest weights."""
    trained = TrainedSet.read(str(ask.set))
    if trained.application:
        raise CapabilityError(f"set {ask.set}", "main rows of a shared set see streams", "name a lossless set")
    method = f"streams:{trained.folder},at=nodes,k={max(DRAFTS)},nodes={max(DRAFTS)}"
    llm = LLM(
        ask.model, **ask.llm | {"drafter": method, "max_sequences": 1, "budget": max(DRAFTS), "kernels": "native"}
    )
    yield None
    streams = StreamSet.load(resolve_folder(trained.folder), dtype=llm.decoder.dtype)
    fit = [n for n in CONTEXTS if n + max(DRAFTS) < llm.decoder.config.max_position]
    found = [few_keys_cost(llm, streams, n, d, ask.repeats) for n in fit for d in DRAFTS]
    shown = ("all_ms", "few_ms", "saved_ms", "ratio")
    yield Table(
        title=f"A fused step whose streams attend to {FEW} keys of their main row, or to all",
        head=("context", "nodes", "stream rows", "all keys, ms", f"{FEW} keys, ms", "saved, ms", "ratio"),
        parts={
            "": [[*(str(c[n]) for n in ("context", "nodes", "rows")), *(f"{c[n]:.2f}" for n in shown)] for c in found]
        },
        values={"machine": machine.describe(ask.device), "costs": found},
        how=[
            [
                trained.line,
                f"the fastest of {ask.repeats} steps of each kind in turns",
                machine.line(ask.device),
            ]
        ],
    )


def few_keys_cost(llm: LLM, streams: StreamSet, context: int, drafted: int, repeats: int) -> dict[str, Any]:
    """Lowest ms of the compiled call with and without the limit, in turns; K and V are random numbers.

    Args:
        context: keys before the root.
        drafted: nodes of the draft, a tree of two children a node.
    """
    pool, rows = llm.engine.pool, streams.config.gamma * (drafted + 1)
    for part in (*pool.k, *pool.v):
        part.normal_()
    cache = pool.open()
    cache.reserve(context + drafted + 1)
    carriers = [StreamCarrier(0, 0, streams.config.gamma, drafted, (), range(drafted + 1))]
    ways = {most: StreamRun(streams, carriers, 3, pool.scratch(rows), most=most) for most in (None, FEW)}
    times: dict[int | None, list[float]] = {most: [] for most in ways}
    for _ in range(repeats):
        for most, riding in ways.items():
            began = perf_counter()
            fused_pass(llm, cache, context, drafted, riding)
            times[most].append(1e3 * (perf_counter() - began))
    cache.release()
    every, few = min(times[None]), min(times[FEW])
    saved = {"all_ms": every, "few_ms": few, "saved_ms": every - few, "ratio": few / every}
    return {"context": context, "nodes": drafted, "rows": rows, **saved}


def fused_pass(llm: LLM, cache: SequenceCache, context: int, drafted: int, riding: StreamRun) -> None:
    """One compiled call that verifies a tree behind ``context`` keys and reads its streams."""
    rows, stack = drafted + 1, llm.decoder.stack
    assert stack is not None
    parents, depths = [(n - 1) // 2 for n in range(1, rows)], [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    slots, span = (cache.slots(first, context + rows) for first in (context, 0))
    listed = slots if isinstance(slots, slice) else slots.tolist()
    spans, every = [RowSpan(0, rows, context, span, parents)], range(rows)
    places = [context + depth for depth in depths]
    asked = Pass([8 + n for n in every], places, listed, spans, every)
    stack.decide_streams(asked, riding, llm.engine.pool)
