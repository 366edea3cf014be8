"""Time passes of the target: the first costs of the automatic draft budget."""

from __future__ import annotations

import functools
import platform
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from time import perf_counter

import torch

from ..kernels.calls import RowSpan, TokenPass
from ..kv.pool import KVPool, SequenceCache
from ..model.decoder import Decoder
from ..model.packing import RowPacker
from ..model.parallel import BEST
from .costs import CostTable

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
        for cache in (self._pool.tensors.all_k, self._pool.tensors.all_v):
            # Zeros that nobody wrote are one page of memory, read from the processor's caches. Four bytes of 60 are a
            # scale of 0.01, too.
            cache.fill_(0.5 if dtype.is_floating_point else 60)
        self._caches = [self._pool.open(expected=room) for _ in range(sequences)]
        for text in self._caches if context else ():
            text.reserve(context)
            self._pool.commit([(text, range(context))])

    @torch.inference_mode()
    def ms(self, sequences: int, rows: int, layers: int | None = None) -> float:
        """Return ms of one pass of ``rows`` rows of each sequence, packing and the choice of tokens included.

        As the engine does it: in one compiled call where the layers are compiled. Torch's threads, which would choose
        among many rows, take the processors from the layers' own just when the next pass begins.

        Args:
            layers: the first so many alone, and the head; None: all.
        """
        caches = self._caches[:sequences]
        for cache in caches:
            cache.reserve(rows)
        began = perf_counter()
        if self._decoder.stack is None or self._decoder.ranks is not None or layers is not None:
            self._run(caches, rows, layers or self._decoder.num_layers)
        else:
            self._decoder.stack.decide(self._chains(caches, rows), self._pool)
        elapsed = perf_counter() - began
        for cache in caches:
            cache.rollback()
        return elapsed * 1e3

    def _chains(self, caches: Sequence[SequenceCache], rows: int) -> TokenPass:
        """Return a chain of ``rows`` rows of each sequence, all of which choose the likeliest token."""
        count, vocab = len(caches) * rows, self._decoder.config.vocab_size
        slots: list[int] = []
        spans = []
        for i, cache in enumerate(caches):
            first = cache.committed
            places = cache.slots(first, first + rows)
            slots += range(places.start, places.stop) if isinstance(places, slice) else places.tolist()
            spans.append(RowSpan(i * rows, (i + 1) * rows, first, cache.slots(0, first + rows), None))
        positions = [cache.committed + i for cache in caches for i in range(rows)]
        return TokenPass([(7 + i % rows) % vocab for i in range(count)], positions, slots, spans, range(count))

    def _run(self, caches: Sequence[SequenceCache], rows: int, layers: int) -> None:
        packer = RowPacker(self._decoder, self._decoder.device)
        vocab = self._decoder.config.vocab_size
        for cache in caches:
            first = cache.committed
            packer.add(
                [(7 + i) % vocab for i in range(rows)],
                range(first, first + rows),
                slots=cache.slots(first, first + rows),
                keys=cache.slots(0, first + rows),
                num_keys=first + rows,
                prefix=first,
            )
        decoder, batch = self._decoder, packer.batch()
        run = batch, self._pool, BEST, range(packer.rows)
        with decoder.whole_run(*run) if layers == decoder.num_layers else nullcontext():
            state = decoder.run_layers(decoder.embed(batch), 0, layers, self._pool)
            if decoder.stack is not None and decoder.ranks is None:  # it chooses while it computes them
                decoder.logits(state)
            else:
                decoder.best(state.hidden)


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
