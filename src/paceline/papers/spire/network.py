"""SPIRe's draft at work: layers whose rows see memory of earlier tokens, not the layers' own inputs.

A row at position t goes through layer i with keys m^i_j of earlier j alone, and only afterwards, when all its
activations x^0 .. x^n are there, has a memory of its own: m^i_t = sum_l softmax(w_i)_l x^l_t (section 3.3). K and V are
the layer's projections of these, after the layer's norm as its own input would be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from ...kernels.drafts import RingChain, recall, write_keys
from ...kv.ring import RingCache
from ...model.base import ForwardState, Taps
from ...model.decoder import Decoder
from ...model.families import DecoderConfig
from ...model.layers import Layer, Norm, rms, rms_constants
from ...model.linear import make_linear
from ...model.packing import RowPacker
from ...model.rope import RopeTable, rotated

Projection = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def projection(layer: Layer, c: DecoderConfig) -> Projection:
    """Return K and V of a layer, of any states: the only products that a verified token costs.

    Compiled layers have their own.

    Args:
        layer: its weights, not yet finished.
        c: of the draft.

    Returns:
        A function of states [rows, d_model] and of their rotation, cos and sin, that gives K and V [rows, kv_heads,
        head_dim].
    """
    dense: Any = layer.qkv
    first = c.num_heads * c.head_dim
    weight = dense.weight.data[first:].contiguous()
    product = make_linear(weight, None if dense.bias is None else dense.bias.data[first:].contiguous())
    norm = deepcopy(layer.attention_norm)
    if isinstance(norm, Norm):
        norm.finish()
    scale = None if layer.k_norm is None else rms_constants(layer.k_norm.data, c.norm_eps)

    def project(states: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        k, v = product(norm(states)).view(len(states), 2, c.num_kv_heads, c.head_dim).unbind(1)
        if scale is not None:
            k = rms(k, *scale)
        return rotated(k, cos, sin), v

    return project


class SpireNetwork:
    """Layers, memory and K/V projections of a draft.

    Args:
        decoder: its checkpoint, loaded and not finished; it is then.
        memory: w of `SpireShape.fresh_memory`'s shape.
    """

    def __init__(self, decoder: Decoder, memory: Tensor) -> None:
        c = decoder.config
        layers: list[Any] = [] if decoder._native else list(decoder.layers)
        self._projections = [projection(layer, c) for layer in layers]
        self.decoder = decoder.finish()
        wide = torch.float64 if decoder.dtype == torch.float64 else torch.float32
        self._table = RopeTable(c.rope, wide, decoder.device)
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
        for index, (project, state) in enumerate(zip(self._projections, states, strict=True)):
            for cache, values in zip((ring.k[index], ring.v[index]), project(state[which], cos, sin), strict=True):
                cache.index_copy_(1, where, values.transpose(0, 1))

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
