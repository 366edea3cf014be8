"""Time passes of the target: the first costs of the automatic draft budget."""

from __future__ import annotations

import functools
import platform
from contextlib import nullcontext
from pathlib import Path
from time import perf_counter

import torch

from ..core.sampling import SamplingParams, SequenceSampler
from ..core.sequence import Sequence
from ..core.tree import TokenTree
from ..kv.pool import KVPool
from ..model.decoder import Decoder
from .base import Work
from .compiled import decide_compiled
from .costs import CostTable
from .passes import decide, embed, lay_out, packed, read_logits, whole_run

GREEDY = SamplingParams(temperature=0)

QUICK_ROWS = (1, 2, 4, 8, 16, 32)  # of one sequence, in the quick estimate
QUICK_BATCHES = (8,)  # sequences of one row each, next to the single one
QUICK_CONTEXT = 64
QUICK_MS = 200.0  # time after which the quick estimate measures nothing further
QUICK_REPEATS = 12  # the fastest of a few passes is not a good estimate next to other work


@functools.cache
def processor(device: str) -> str:
    """Return the name of the processor that computes."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:  # no Linux
        return platform.processor() or platform.machine()
    return platform.processor() or platform.machine()


KVLayout = tuple[tuple[int, int, int], torch.dtype]  # layers, heads, width of a row; its numbers


class PassTimer:
    """Times target passes over sequences with a given number of committed tokens.

    Args:
        decoder: the network.
        sequences: most sequences in a pass.
        context: committed tokens of each.
        rows: most rows of a sequence.
        layout: shape and type of the K/V cache (`api.assembly.memory.kv_layout`); None: as the activations are.
    """

    def __init__(
        self, decoder: Decoder, sequences: int, context: int, rows: int, layout: KVLayout | None = None
    ) -> None:
        room = context + rows
        self._decoder = decoder
        size = (room + 64) * sequences  # with room for each sequence to lie in one piece
        shape, dtype = layout or (decoder.cache_shape, decoder.dtype)
        self._pool = KVPool(*shape, size, dtype, decoder.device)
        for numbers in (self._pool.tensors.all_k, self._pool.tensors.all_v):
            # Zeros that nobody wrote are one page of memory, read from the processor's caches. Four bytes of 60 are a
            # scale of 0.01, too.
            numbers.fill_(0.5 if dtype.is_floating_point else 60)
        vocab = decoder.config.vocab_size
        self._works = []
        for key in range(sequences):
            tokens = [(7 + i) % vocab for i in range(context + 1)]
            sampler = SequenceSampler(GREEDY, tokens, seed=0, sample_index=0, vocab_size=vocab)
            cache = self._pool.open(expected=room)
            self._works.append(Work(Sequence(key, tokens, len(tokens), sampler, cache=cache), 1, True, rows, rows))
            if context:
                cache.reserve(context)
                self._pool.commit([(cache, range(context))])

    @torch.inference_mode()
    def ms(self, sequences: int, rows: int, layers: int | None = None) -> float:
        """Return ms of one pass as the engine runs it: a root and a chain of ``rows - 1`` nodes of each sequence.

        Packing and the verdict are included.

        Args:
            layers: the first so many alone, and the head; None: all.
        """
        decoder, works = self._decoder, self._works[:sequences]
        caches = [work.sequence.cache for work in works if work.sequence.cache is not None]
        for cache in caches:
            cache.reserve(rows)
        chain = TokenTree.chain([(8 + i) % decoder.config.vocab_size for i in range(rows - 1)], 1.0)
        began = perf_counter()
        p = lay_out(works, works, [chain] * sequences if rows > 1 else [])
        if layers is not None or not decide_compiled(p, decoder, self._pool, None):
            batch = packed(p, decoder)
            with nullcontext() if layers is not None else whole_run(p, decoder, batch, self._pool, None):
                embed(p, decoder, batch)
                decoder.run_layers(p.state, 0, layers or decoder.num_layers, self._pool)
                decide(p, None, read_logits(p, decoder))
        elapsed = perf_counter() - began
        for cache in caches:
            cache.rollback()
        return elapsed * 1e3


def quick_estimate(decoder: Decoder, max_sequences: int) -> CostTable:
    """Return a rough table in a fraction of a second: the fastest of few passes of few sizes.

    The fastest, since so few passes have no good median; the steps themselves correct the rest. On a model so slow
    that even this takes long, fewer sizes are measured.

    Args:
        decoder: the network.
        max_sequences: sequences that may run at once.
    """
    room = decoder.config.max_position
    context = max(0, min(QUICK_CONTEXT, room - max(QUICK_ROWS)))
    batches = [b for b in QUICK_BATCHES if 1 < b <= max_sequences]
    rows = [r for r in QUICK_ROWS if r <= room]
    cases = sorted([(1, r) for r in rows] + [(b, 1) for b in batches], key=lambda c: (c not in ((1, 1), (1, 8)), c))
    timer = PassTimer(decoder, max([1, *batches]), context, max(rows))
    began = perf_counter()
    timer.ms(1, 1)  # the first pass does what is done once only
    best: dict[tuple[int, int], float] = {}
    for _ in range(QUICK_REPEATS):
        for case in cases:
            late = (perf_counter() - began) * 1e3 > QUICK_MS
            if late and (1, 1) in best and len(best) > 1:
                break
            best[case] = min(timer.ms(*case), best.get(case, float("inf")))
    plain = {1: best[1, 1]} | {b: best[b, 1] for b in batches if (b, 1) in best}
    if len(plain) == 1:  # sequences were not timed: a sequence is taken to cost what a row does
        plain |= {r: best[1, r] for r in rows[1:] if (1, r) in best}
    return CostTable(
        chain=[(r, best[1, r]) for r in rows if (1, r) in best],
        plain=sorted(plain.items()),
    )
