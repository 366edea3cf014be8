"""Memory a stage (table 1): the paper's model, and ours predicted and counted."""

from __future__ import annotations

from collections.abc import Iterator

from kit.study import Table

from paceline.kv.pool import KVPool
from paceline.model.stages import Stage
from paceline.plan.models import named, shape_of
from specpipe_parts.common import PipeFlags, levels, study, target
from specpipe_parts.law import stage_bytes

GIB, MIB = 2**30, 2**20
KV_TOKENS = 81_920
RUNTIME = 0.25 * GIB
PAPER = {"first": 23.5, "between": 21.5, "last": 23.5}  # table 1, GiB
SLOTS = 2048


def held(stage: Stage) -> int:
    """Bytes of a stage's layers, of their K and V, and of the embedding or head that belongs to it."""
    decoder = stage.decoder
    parts = [*decoder.layers[stage.start : stage.stop].parameters(), *stage.store.k, *stage.store.v]
    if decoder.stack is not None:  # packed weights, which are no parameters
        each = len(decoder.stack.weights.linears) // decoder.num_layers
        parts += [one.packed for one in decoder.stack.weights.linears[stage.start * each : stage.stop * each]]
    table = decoder.config.vocab_size * decoder.config.d_model * decoder.dtype.itemsize
    ends = (stage.start == 0) + (stage.stop == decoder.num_layers)
    return sum(part.numel() * part.element_size() for part in parts) + ends * table


@study.table(takes=("stages",), stages=4)
def table_1(ask: PipeFlags) -> Iterator[Table | None]:
    """Memory a stage: Llama 70B with grouped queries counted right, and the target here, predicted and counted."""
    llm = target(ask)
    config = levels(ask)
    pool = KVPool(*llm.decoder.cache_shape, SLOTS, llm.decoder.dtype, llm.decoder.device)
    stages = config.cut(llm.decoder, pool)
    yield None
    large = named("llama-3-70b")
    assert large is not None
    right = [size / GIB for size in stage_bytes(large, 8, KV_TOKENS, RUNTIME)]
    rows = [
        ["llama-3-70b, 8 stages, GiB", place, f"{found:.1f}", f"{PAPER[place]:.1f} (paper)"]
        for place, found in zip(PAPER, (right[0], right[1], right[-1]), strict=True)
    ]
    size = llm.decoder.dtype.itemsize
    slots = stages[0].store.k[0].shape[1]
    shape = shape_of(llm.decoder.config)
    sizes = [stage.stop - stage.start for stage in stages]
    predicted = stage_bytes(shape, ask.stages, slots, number_bytes=size, layers=sizes)
    counted = [held(stage) for stage in stages]
    name = f"{ask.model}, {ask.stages} stages, MiB"
    both = [*zip(predicted, counted, strict=True)]
    rows += [[name, f"{stage}", f"{p / MIB:.2f}", f"{c / MIB:.2f}"] for stage, (p, c) in enumerate(both)]
    far = max(abs(p / c - 1) for p, c in both)
    yield Table(
        title="Memory a stage",
        head=("model", "stage", "predicted", "paper, or counted"),
        parts={"": rows},
        values={"llama-3-70b": right, "predicted": predicted, "counted": counted, "farthest": far},
        remarks=[f"prediction and count differ by {far:.2%} at most"],
        how=[["sizes alone, no clock: parameters of the layers, K and V of all slots, embedding and head"]],
    )
