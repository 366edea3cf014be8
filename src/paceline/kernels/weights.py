"""A decoder's weights as the compiled layers read them: packed, in the order in which a pass reads."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..core.errors import CapabilityError
from ..model.adapters import LINEARS
from ..model.families import DecoderConfig
from ..model.layers import Layer, Norm
from ..model.linear import Dense, Quant
from ..model.padding import groups_of
from ..model.parallel import Ranks
from ..weights.blocks import StoredRows, StoredWeights
from . import abi
from .linear import NativeLinear
from .memory import Arena

Parts = Mapping[str, Sequence[StoredRows] | None]


class Loaded(Protocol):
    """Describe what compiled layers need of a `decoder.Decoder` whose parameters are loaded."""

    local: DecoderConfig  # the configuration of the layers that are loaded here
    ranks: Ranks | None
    dtype: torch.dtype
    device: torch.device
    quant: Quant | None
    normed: bool
    embedding: Tensor
    norm: Norm | None  # None: embedding, norm and head are shared
    head: Dense | None  # None: it is tied, or shared

    def in_order(self) -> list[Layer]:
        """Return every layer of a pass."""
        ...

    def scale_embedding(self) -> None:
        """Scale the table of embeddings."""
        ...


class NativeWeights:
    """All weights of a loaded decoder, which gives them up.

    Those in ``stored`` are in blocks, by the parameter's name. Embedding, norm and head are the lender's, if any.

    Raises:
        CapabilityError: a final norm that is shared and rounds otherwise.
    """

    head: NativeLinear
    norm: int | None  # where the gains of the final norm lie, float32; None: there is none
    embedding: abi.CLinear  # rows as they are or, in blocks, packed as a product's weight, a tied head's own

    def __init__(self, decoder: Loaded, stored: StoredWeights, ends_of: NativeWeights | None) -> None:
        c = decoder.local
        self.eps = ctypes.c_float(c.norm_eps).value  # of the final norm
        self._held: list[Any] = []
        self._arena = Arena()
        self._quant = decoder.quant
        self.linears: list[NativeLinear] = []
        self.layers = (abi.CLayer * c.num_layers)()
        for index, (entry, layer) in enumerate(zip(self.layers, decoder.in_order(), strict=True)):
            parts = {name: _rows(stored, f"layers.{index}.{name}.weight") for name in LINEARS}
            self._fill(entry, layer, groups_of(c), parts)
        if ends_of is None:
            self._own_ends(decoder, stored)
        else:
            self._lent_ends(decoder, ends_of)

    def _fill(self, entry: abi.CLayer, layer: Layer, groups: dict[str, tuple[int, int]], parts: Parts) -> None:
        for name in LINEARS:
            dense = getattr(layer, name)
            bias = None if dense.bias is None else dense.bias.data
            options = self._quant, groups[name], self._arena, parts[name]
            linear = NativeLinear(dense.weight.data, bias, *options)
            delattr(layer, name)  # one copy of the weights is enough
            self.linears.append(linear)
            setattr(entry, name, linear.struct)
        for name in ("attention_norm", "mlp_norm", "attention_post_norm", "mlp_post_norm"):
            setattr(entry, name, self._floats(getattr(getattr(layer, name), "weight", None)))
        entry.q_norm, entry.k_norm = self._floats(layer.q_norm), self._floats(layer.k_norm)
        entry.window, entry.rope = layer.window or 0, layer.table

    def _own_ends(self, decoder: Loaded, stored: StoredWeights) -> None:
        assert decoder.norm is not None, "only who borrows has none"
        table, parts = decoder.embedding, _rows(stored, "embedding")
        name, weight = ("embedding", table) if decoder.head is None else ("head.weight", decoder.head.weight)
        options = (0, 0), self._arena
        self.head = NativeLinear(weight.data, None, self._quant, *options, parts=_rows(stored, name))
        self.norm = self._floats(decoder.norm.weight)
        if parts is None:
            decoder.scale_embedding()  # the head has its copy
            self.embedding = abi.CLinear(weight=table.data_ptr(), n=len(table), k=table.shape[1])
        else:
            packed = (
                self.head if decoder.head is None else NativeLinear(table.data, None, arena=self._arena, parts=parts)
            )
            # Rounded as the table's entries are.
            factor = torch.tensor([decoder.local.embedding_scale]).to(decoder.dtype).float()
            self._held += [packed, factor]
            scale = factor.data_ptr() if decoder.local.embedding_scale != 1 else None
            w = packed.struct
            self.embedding = abi.CLinear(weight=w.weight, scale=scale, n=w.n, k=w.k, kind=w.kind)

    def _lent_ends(self, decoder: Loaded, ends_of: NativeWeights) -> None:
        self._held.append(ends_of)
        self.head, self.embedding = ends_of.head, ends_of.embedding
        self.norm = None if decoder.normed else ends_of.norm
        if not decoder.normed and self.eps != ends_of.eps:
            wrong = f"its final norm has eps {ends_of.eps:g}, these layers have {self.eps:g}"
            raise CapabilityError("compiled layers over the final norm of a target", wrong, "use native=False")

    def _floats(self, parameter: Tensor | None) -> int | None:
        if parameter is None:
            return None
        wide = parameter.data.float().contiguous()
        self._held.append(wide)
        return wide.data_ptr()

    @property
    def products(self) -> list[NativeLinear]:
        """Return the products of a pass, in order; the head's is the last."""
        return [*self.linears, self.head]


def _rows(stored: StoredWeights, name: str) -> list[StoredRows] | None:
    """Return where the rows of a parameter lie; None: it is not in blocks."""
    return [part.stored() for part in stored[name]] if name in stored else None
