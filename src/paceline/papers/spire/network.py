"""SPIRe's draft at work: layers whose rows see memory of earlier tokens, not the layers' own inputs.

A row at position t goes through layer i with keys m^i_j of earlier j alone, and only afterwards, when all its
activations x^0 .. x^n are there, has a memory of its own: m^i_t = sum_l softmax(w_i)_l x^l_t (section 3.3). K and V are
the layer's projections of these, after the layer's norm as its own input would be.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...kernels.drafts import RingChain, recall, write_keys
from ...kv.ring import RingCache
from ...model.base import ForwardState, Taps
from ...model.decoder import Decoder
from ...model.layers import rms, store
from ...model.packing import RowPacker
from ...model.rope import RopeTable, rotated


class SpireNetwork:
    """Layers, memory and K/V projections of a draft.

    Args:
        decoder: its checkpoint, loaded and not finished; it is then.
        memory: w of `SpireShape.fresh_memory`'s shape.
    """

    def __init__(self, decoder: Decoder, memory: Tensor) -> None:
        self.decoder = decoder.finish()
        wide = torch.float64 if decoder.dtype == torch.float64 else torch.float32
        self._table = RopeTable(decoder.config.rope, wide, decoder.device)
        # [n, n + 1] what the memory of each layer is made of
        self._mix = memory.to(decoder.device, wide).softmax(-1)

    @property
    def compiled(self) -> bool:
        """Return whether compiled layers run it."""
        return self.decoder.stack is not None

    def write(
        self,
        ring: RingCache,
        states: Sequence[Tensor],
        rows: Sequence[int],
        positions: Sequence[int],
        slots: Sequence[int],
    ) -> None:
        """Return K and V of memory vectors.

        Args:
            states: of each layer its own, [n, d_model].
            rows: [rows] which of them.
            positions: [rows] in the original text (section 3.1).
            slots: [rows] of the ring.
        """
        if self.decoder.stack is not None:
            return write_keys(self.decoder.stack, ring, states, rows, positions, slots)
        device = self.decoder.device
        which = torch.tensor(rows, device=device)
        cos, sin = self._table.rows(torch.tensor(positions, device=device))
        where = torch.tensor(slots, device=device)
        for index, (layer, state) in enumerate(zip(self.decoder.in_order(), states, strict=True)):
            flat = layer.qkv(layer.attention_norm(state[which])).view(len(rows), -1, layer.head_dim)
            k, v = flat[:, layer.heads :].chunk(2, 1)
            if layer._head_scale is not None:
                k = rms(k, layer._head_scale[layer.heads :], layer._head_floor)
            store(ring.k[index], where, rotated(k, cos, sin))
            store(ring.v[index], where, v)

    def run(self, packer: RowPacker, ring: RingCache) -> tuple[Tensor, Tensor]:
        """Run one pass; return [rows, V] logits, and [layers, rows, d_model] the memory of the rows."""
        n = self.decoder.num_layers
        state: ForwardState = self.decoder.embed(packer.batch())
        first, taps = state.hidden, Taps(tuple(range(n)))
        state = self.decoder.run_layers(state, 0, n, ring, taps)
        logits = self.decoder.logits(state)
        weights = self._mix[:, :, None, None]  # [layers, layers + 1, 1, 1]
        memory = weights[:, 0] * first.to(weights.dtype)
        for layer in range(n):  # in order, as compiled code adds them
            memory += weights[:, layer + 1] * taps.hidden[layer].to(weights.dtype)
        return logits, memory.to(first.dtype)

    def roll(self, chains: Sequence[RingChain], ring: RingCache, floor: float) -> list[list[tuple[int, float]]]:
        """Return chains of `run` and `write` in one compiled call; see `recall`."""
        assert self.decoder.stack is not None, "compiled layers"
        return recall(self.decoder.stack, ring, chains, self._mix, floor, self.decoder.config.vocab_size)
