"""A state head as the network of a body: its layer over the target's embedding and head."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ...core.options import option
from ...kernels.drafts import NativeFuse
from ...kernels.layers import unsupported
from ...kernels.linear import NativeLinear
from ...kv.pool import KVPool
from ...model.attention import make_backend
from ...model.attention.base import Segment
from ...model.base import Batch, ForwardState
from ...model.decoder import Decoder
from ...model.linear import LinearOp, Quant, make_linear

if TYPE_CHECKING:
    from ...model.decoder import TargetInfo
    from ...model.handle import TargetHandle
    from .head import StateHead

LAST = -1  # the tap that is read
Storage = Literal["auto", "plain", "int8", "q8_0", "q4_0"]


def storage_option() -> Storage:
    """Return the field of a drafter's options that states how its weights are stored."""
    about = "how its weights are stored: plain, in the target's number type; auto: in as many bits as the target's"
    field_option: Storage = option("auto", help=about)
    return field_option


def stored_as(storage: Storage, target: TargetInfo) -> Quant | None:
    """Return the storage of a drafter's weights; None: plain.

    By default a draft takes the same share of a pass as of one over plain weights.
    """
    if storage != "auto":
        return None if storage == "plain" else storage
    of_target = None if target.handle.stack is None else target.decoder.quant
    return "q4_0" if of_target == "stored" else of_target


class HeadNetwork:
    """Runs a state head: computes the rows of a `StateBody`.

    Args:
        head: its parameters; its layer is of no other use afterwards.
        handle: of the target.
        device: where the target runs.
        reads_tokens: whether the rows of a text see the token that follows them.
        hot: [H] int64, the only tokens that it drafts; None: all.
        quant: how its weights are stored; None: in the target's dtype.

    Raises:
        CapabilityError: a head of another width or vocabulary than the target's, or weights stored in a way that its
            layers cannot be computed with.
    """

    def __init__(
        self,
        head: StateHead,
        handle: TargetHandle,
        device: torch.device,
        reads_tokens: bool = True,
        hot: Tensor | None = None,
        quant: Quant | None = None,
    ) -> None:
        c, self.handle, self.reads_tokens = head.config, handle, reads_tokens
        native = handle.stack is not None and unsupported(c, handle.dtype, device) is None
        attention = make_backend(handle.dtype)
        options: dict[str, Any] = {"dtype": handle.dtype, "device": device, "native": native, "quant": quant}
        self.decoder = Decoder(c, attention, ends_of=handle, normed=True, **options)
        parameters = dict(self.decoder.named_parameters())
        for name, value in head.layer.named_parameters():
            parameters[f"layers.0.{name}"].data.copy_(value.data)
        self.decoder.finish().cut(hot)
        self.stack, self.cache_shape = self.decoder.stack, self.decoder.cache_shape
        make = partial(NativeLinear, quant=quant) if native else make_linear
        self._fuse_all, self._fuse_state, self._constant = _fusing(head, handle.dtype, device, make)
        self.fuse: NativeFuse | None = None
        if isinstance(self._fuse_all, NativeLinear) and isinstance(self._fuse_state, NativeLinear):
            parts = self._fuse_all, self._fuse_state, self._constant
            self.fuse = NativeFuse(*parts, reads_tokens, handle.stack)

    def plan(self, segments: Sequence[Segment], positions: Tensor) -> Any:
        """Return the attention plan of rows at ``positions`` [rows] int64; see `Decoder.plan`."""
        return self.decoder.plan(segments, positions)

    def read(self, hidden: Mapping[int, Tensor]) -> Tensor:
        """Return [rows, d] what is kept of the taps that a pass showed: the last layer, raw."""
        return hidden[LAST]

    def final(self, states: Tensor) -> Tensor:
        """Return [rows, d] the states that rows are made of: the kept ones after the final norm.

        Where rows are fused in compiled code, that does it.
        """
        return self.handle.final(states)

    def run(self, batch: Batch, states: Tensor, tokens: bool, pool: KVPool) -> Tensor:
        """Return [rows, d] the states that come next; see `StateBody.run`."""
        if tokens:
            fused = self._fuse_all(torch.cat((self.handle.embed(batch.tokens), states), -1))
        else:
            fused = self._fuse_state.add(states, self._constant)
        state = ForwardState(fused, batch.positions, batch.slots, batch.attn)
        return self.decoder.run_layers(state, 0, 1, pool).hidden

    def logits(self, states: Tensor) -> Tensor:
        """Return [rows, V] float32 or wider, of states that it predicted: by the target's own head."""
        return self.decoder.read(states)


def _fusing(
    head: StateHead, dtype: torch.dtype, device: torch.device, make: Callable[[Tensor, Tensor | None], LinearOp]
) -> tuple[LinearOp, LinearOp, Tensor]:
    """Return the map of states with tokens, the map of states without, and what the latter always adds, [1, d]."""
    weight = head.fc.weight.data.to(device, dtype)
    bias = None if head.fc.bias is None else head.fc.bias.data.to(device, dtype)
    width = weight.shape[0]
    of_state = weight[:, -width:].contiguous()
    blank = torch.zeros(width) if head.blank is None else head.blank.data
    constant = (head.fc.weight.data[:, :width].double() @ blank.double()).to(device)
    if bias is not None:
        constant = constant + bias.double()
    return make(weight, bias), make(of_state, None), constant.to(dtype)[None]
