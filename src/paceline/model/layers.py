"""One decoder layer: norms, attention and MLP, as few calls as the arithmetic allows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention.base import AttentionBackend
from .base import ForwardState
from .families import DecoderConfig, linear_biases, linear_shapes
from .linear import Dense, LinearOp, Quant, make_linear, nan_parameter

if TYPE_CHECKING:
    from .parallel import Ranks

# Elementwise operations on more elements than this are cut into one range a thread, at any element.
_SERIAL_ELEMENTS = 32768


class Norm(nn.Module):
    """RMS norm, computed in float32."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.weight = nan_parameter((config.d_model,), gain_dtype(config, dtype), device)
        self._scale = self._floor = torch.empty(0)

    def finish(self) -> None:
        """Prepare what `rms` wants."""
        self._scale, self._floor = rms_constants(self.weight.data, self.eps)

    def __call__(self, x: Tensor) -> Tensor:
        """Return [rows, d_model] -> [rows, d_model]; by-passes the module's hooks, which cost more than the norm."""
        return rms(x, self._scale, self._floor)


def gain_dtype(config: DecoderConfig, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the gains of norms."""
    return torch.float32 if config.wide_norms and dtype.itemsize < 4 else dtype


def rms_constants(weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return what `rms` wants in place of weight and eps: weight * sqrt(d), and sqrt(eps * d), float32 or wider."""
    wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
    d = weight.shape[-1]
    floor = torch.tensor((eps * d) ** 0.5, dtype=wide, device=weight.device)
    return weight.to(wide) * d**0.5, floor


def rms(x: Tensor, scale: Tensor, floor: Tensor) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich 2019), rounded once.

    Written as x * weight sqrt(d) / hypot(|x|, sqrt(eps d)): the same number in half the time of
    `F.rms_norm` on a few rows (5.5 against 11.3 us for one row of 768).
    """
    wide = x.to(scale.dtype)
    length = torch.hypot(torch.linalg.vector_norm(wide, dim=-1, keepdim=True), floor)
    return (wide / length).mul_(scale).to(x.dtype)


class Layer(nn.Module):
    """One decoder layer, pre-norm: attention and MLP, each added to the residual stream.

    Each goes through a norm of its own before it is added, where the family has one.
    """

    qkv: LinearOp
    out: LinearOp
    up: LinearOp  # gate and up in one
    down: LinearOp
    table: int  # which of the network's `RopeTables`; -1: none

    def __init__(
        self,
        config: DecoderConfig,
        index: int,
        dtype: torch.dtype,
        device: torch.device,
        exact: bool,
        weights: torch.device | None = None,  # where those of the products are; None: on the device
        ranks: Ranks | None = None,  # of which this is one's part of a layer; None: it is whole
    ) -> None:
        super().__init__()
        c, self.ranks = config, ranks
        self.index = index
        self.heads, self.kv_heads, self.head_dim = c.num_heads, c.num_kv_heads, c.head_dim
        self.window, self.scale = c.windows[index], c.scale
        rope = c.rotations[index]
        self.rotated_dim = rope.dim if rope else 0
        self.activation, self.exact = c.activation, exact
        self.eps = c.norm_eps
        biases = linear_biases(c)
        for name, (inputs, outputs) in linear_shapes(c).items():
            self.add_module(name, Dense(inputs, outputs, biases[name], dtype, device, weights))
        bare = index == 0 and not c.first_norm
        self.attention_norm = nn.Identity() if bare else Norm(c, dtype, device)
        self.mlp_norm = Norm(c, dtype, device)
        self.attention_post_norm = Norm(c, dtype, device) if c.post_norms else None
        self.mlp_post_norm = Norm(c, dtype, device) if c.post_norms else None
        gain = gain_dtype(c, dtype)
        self.q_norm = nan_parameter((c.head_dim,), gain, device) if c.qk_norm else None
        self.k_norm = nan_parameter((c.head_dim,), gain, device) if c.qk_norm else None
        self._head_scale: Tensor | None = None  # [heads + kv_heads, head_dim]
        self._head_floor = torch.empty(0)

    def finish(self, quant: Quant | None) -> None:
        """Replace the weight holders by callables. These live in ``__dict__``, where look-up is fast."""
        for name in ("qkv", "out", "up", "down"):
            dense = self._modules[name]
            if not isinstance(dense, Dense):
                raise RuntimeError("finish() was called twice")
            bias = None if dense.bias is None else dense.bias.data
            linear = make_linear(dense.weight.data, bias, exact=self.exact, quant=quant)
            del self._modules[name]
            object.__setattr__(self, name, linear)
        for name in ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm"):
            norm = getattr(self, name)
            if isinstance(norm, Norm):
                norm.finish()
            object.__setattr__(self, name, norm)
        if self.q_norm is not None and self.k_norm is not None:
            heads = [self.q_norm.data] * self.heads + [self.k_norm.data] * self.kv_heads
            self._head_scale, self._head_floor = rms_constants(torch.stack(heads), self.eps)

    def run(
        self,
        hidden: Tensor,  # [rows, d_model]
        state: ForwardState,
        rotation: tuple[Tensor, Tensor] | None,  # cos and signed sin [rows, 1, rotated_dim]
        k_cache: Tensor,  # [kv_heads, slots, head_dim]
        v_cache: Tensor,  # [kv_heads, slots, head_dim]
        attention: AttentionBackend,
    ) -> Tensor:  # [rows, d_model]
        """Return both halves of the layer; ``hidden`` is left as it is."""
        normed = self.attention_norm(hidden)
        flat = self.qkv(normed)
        if state.adapters:
            self._adapt(state, "qkv", normed, flat)
        qkv = flat.view(hidden.shape[0], -1, self.head_dim)
        rotated = self.heads + self.kv_heads
        qk = qkv[:, :rotated]  # [rows, heads + kv_heads, head_dim]
        if self._head_scale is not None:
            qk = rms(qk, self._head_scale, self._head_floor)
        if rotation is not None:
            qk = self._rotate(qk, *rotation)
        store(k_cache, state.slots, qk[:, self.heads :])
        store(v_cache, state.slots, qkv[:, rotated:])
        attended = attention.attend(state.attn, qk[:, : self.heads], k_cache, v_cache, self.scale, self.window)
        hidden = self._add("out", attended, hidden, self.attention_post_norm, state)
        normed = self.mlp_norm(hidden)
        up = self.up(normed)
        if state.adapters:
            self._adapt(state, "up", normed, up)
        return self._add("down", self._inner(up), hidden, self.mlp_post_norm, state)

    def _add(self, linear: str, x: Tensor, hidden: Tensor, norm: Norm | None, state: ForwardState) -> Tensor:
        """Return ``hidden`` and the product of ``x`` after ``norm``: [rows, d_model]."""
        product: LinearOp = getattr(self, linear)
        if self.ranks is not None:
            return self._joined(linear, product, self.ranks, x, hidden, norm, state)
        result = product.add(x, hidden) if norm is None else product(x)
        if state.adapters:
            self._adapt(state, linear, x, result)
        return result if norm is None else hidden + norm(result)

    def _joined(
        self,
        linear: str,
        product: LinearOp,
        ranks: Ranks,
        x: Tensor,
        hidden: Tensor,
        norm: Norm | None,
        state: ForwardState,
    ) -> Tensor:
        """Return `_add` where ranks have parts of the product: what they make of it together is rounded once."""
        x = ranks.inputs(x)
        result = product.wide(x)
        if state.adapters:
            self._adapt(state, linear, x, result)
        result = ranks.outputs(result)
        return (hidden + (result if norm is None else norm(result.to(hidden.dtype)))).to(hidden.dtype)

    def _adapt(self, state: ForwardState, linear: str, x: Tensor, y: Tensor) -> None:
        """Add the adapters' deltas to ``y`` [rows, out], the linear's output for ``x`` [rows, in], in place."""
        for part in state.adapters:
            delta = part.adapter.delta(self.index, linear, x[part.start : part.stop])
            if delta is not None:
                y[part.start : part.stop] += delta

    def _rotate(self, qk: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return rotary embedding of the first ``rotated_dim`` dimensions of every head."""
        dim = self.rotated_dim
        part = qk if dim == self.head_dim else qk[..., :dim]
        turned = torch.addcmul(part * cos, part.roll(dim // 2, -1), sin)
        return turned if dim == self.head_dim else torch.cat((turned, qk[..., dim:]), -1)

    def _inner(self, x: Tensor) -> Tensor:
        """Return the MLP between its two products: [rows, 2 d_ff] -> [rows, d_ff]."""
        gate, up = x.chunk(2, dim=-1)
        activate, block = _ACTIVATIONS[self.activation], len(gate)
        # A vectorised exp rounds the tail of a range otherwise than its body. A pass that is cut for several threads
        # has tails where the number of rows puts them, so an exact one is never cut.
        if self.exact and self.activation != "relu":
            # Rows that are separate are ranges of their own; contiguous ones are, where a row fills its vectors.
            separate = not gate.is_contiguous() or gate.shape[1] % 64 == 0
            block = max(1, (_SERIAL_ELEMENTS - 1) // gate.shape[1]) if separate else 1
        activated = activate(gate) if len(gate) <= block else torch.cat([activate(part) for part in gate.split(block)])
        return activated.mul_(up)


def store(cache: Tensor, slots: Tensor | slice, values: Tensor) -> None:
    """Set cache[:, slots] to values [rows, kv_heads, head_dim]."""
    if isinstance(slots, slice):
        cache[:, slots] = values.transpose(0, 1)
    else:
        cache.index_copy_(1, slots, values.transpose(0, 1))


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}
