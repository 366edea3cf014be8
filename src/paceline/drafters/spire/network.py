"""SPIRe's draft at work: layers whose rows see memory of earlier tokens, not the layers' own inputs.

A row at position t goes through layer i with keys m^i_j of earlier j alone, and only afterwards, when all its
activations x^0 .. x^n are there, has a memory of its own: m^i_t = sum_l softmax(w_i)_l x^l_t (section 3.3). K and V are
the layer's projections of these, behind the layer's norm as its own input would be.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kv.ring import RingCache
from ...target.base import ForwardState, Taps
from ...target.decoder import Decoder, Layer, Norm, rms, rms_constants
from ...target.families import DecoderConfig
from ...target.linear import LinearOp, make_linear
from ...target.native_linear import NativeLinear
from ...target.packing import RowPacker
from ...target.rope import RopeTable


class Projection:
    """K and V of a layer, of any states: the only products that a verified token costs.

    Args:
        layer: its weights, not yet finished.
        c: of the draft.
        native: whether the compiled product does it.
    """

    def __init__(self, layer: Layer, c: DecoderConfig, native: bool) -> None:
        dense: Any = layer.qkv
        first = c.num_heads * c.head_dim
        weight = dense.weight.data[first:].contiguous()
        bias = None if dense.bias is None else dense.bias.data[first:].contiguous()
        self._product: LinearOp = NativeLinear(weight, bias, quant=False) if native else make_linear(weight, bias)
        self._norm = deepcopy(layer.attention_norm)
        if isinstance(self._norm, Norm):
            self._norm.finish()
        self._scale = None if layer.k_norm is None else rms_constants(layer.k_norm.data, c.norm_eps)
        self._heads, self._width = c.num_kv_heads, c.head_dim

    def __call__(self, states: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """[rows, kv_heads, head_dim] of ``states`` [rows, d_model], keys turned by their positions."""
        k, v = self._product(self._norm(states)).view(len(states), 2, self._heads, self._width).unbind(1)
        if self._scale is not None:
            k = rms(k, *self._scale)
        dim = cos.shape[-1]
        part = k[..., :dim].to(cos.dtype)
        turned = (part * cos + part.roll(dim // 2, -1) * sin).to(k.dtype)
        return torch.cat((turned, k[..., dim:]), -1), v


class SpireNetwork:
    """Layers, memory and K/V projections of a draft.

    Args:
        decoder: its checkpoint, loaded and not finished; it is then.
        memory: w of `SpireShape.fresh_memory`'s shape; None: there is no feedback memory.
        native: whether the decoder is compiled.
    """

    def __init__(self, decoder: Decoder, memory: Tensor | None, native: bool) -> None:
        c = decoder.config
        assert c.rope is not None, "it was looked at before"
        layers: list[Any] = list(decoder.layers)
        self.projections = [Projection(layer, c, native) for layer in layers]
        self.decoder = decoder.finish()
        wide = torch.float64 if decoder.dtype == torch.float64 else torch.float32
        self._table = RopeTable(c.rope, c.max_position, wide, decoder.device)
        # [n, n + 1] what the memory of each layer is made of
        mix = None if memory is None else memory.to(decoder.device, wide).softmax(-1)
        self._mix = None if mix is None else mix.expand(decoder.num_layers, -1)

    @property
    def feedback(self) -> bool:
        """Whether rows have a memory."""
        return self._mix is not None

    def write(self, ring: RingCache, states: list[Tensor], positions: list[int], slots: list[int]) -> None:
        """K and V of memory vectors.

        Args:
            states: of each layer [rows, d_model].
            positions: [rows] in the original text (section 3.1).
            slots: [rows] of the ring.
        """
        device = self.decoder.device
        cos, sin = self._table.rows(torch.tensor(positions, device=device))
        where = torch.tensor(slots, device=device)
        for index, (project, own) in enumerate(zip(self.projections, states, strict=True)):
            k, v = project(own, cos, sin)
            missing = ring.k[index].shape[-1] - k.shape[-1]  # compiled layers pad heads
            for cache, values in ((ring.k[index], k), (ring.v[index], v)):
                cache.index_copy_(1, where, F.pad(values, (0, missing)).transpose(0, 1))

    def run(self, packer: RowPacker, ring: RingCache) -> tuple[Tensor, list[Tensor]]:
        """One pass.

        Returns:
            [rows, V] logits, and of each layer [rows, d_model] the memory of the rows; none without feedback.
        """
        n = self.decoder.num_layers
        state: ForwardState = self.decoder.embed(packer.batch())
        first, taps = state.hidden, Taps(tuple(range(n)) if self.feedback else ())
        state = self.decoder.run_layers(state, 0, n, ring, taps)
        logits = self.decoder.logits(state)
        if self._mix is None:
            return logits, []
        activations = torch.stack([first, *(taps.hidden[layer] for layer in range(n))]).to(self._mix.dtype)
        mixed = torch.einsum("il,lrd->ird", self._mix, activations).to(first.dtype)
        return logits, list(mixed.unbind(0))
