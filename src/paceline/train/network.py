"""The decoder with gradients: whole packed rows at a time, no cache.

The very parameters of `target.decoder.Decoder`, before its `finish`: every family that the engine runs
can be trained, and a checkpoint written here is one that the engine reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from ..core.errors import CapabilityError, ConfigError
from ..model.attention.reference import ReferenceAttention
from ..model.decoder import Decoder
from ..model.families import DecoderConfig
from ..model.layers import _ACTIVATIONS, Layer, Norm
from ..model.linear import Dense
from ..model.rope import RopeTable, RopeTables, rotated
from ..weights.files import read_json
from ..weights.loader import WEIGHTS, load_weights
from ..weights.names import weight_map
from ..weights.source import read_config
from .data import TokenBatch

Rotation = tuple[Tensor, Tensor] | None  # cos and signed sin [B, T, 1, dim]
KeyValues = tuple[Tensor, Tensor]  # [B, T, kv_heads, head_dim] each
Projected = tuple[Tensor, Tensor, Tensor]  # queries [B, T, heads, head_dim], keys and values
# (layer index, linear's name, its input) -> what is added to its output, or None
Delta = Callable[[int, str, Tensor], Tensor | None]


class Network(nn.Module):
    """A trainable decoder, or without gradients a ``frozen`` one. The parameters are float32 and NaN until loaded or
    `init_weights`."""

    def __init__(self, config: DecoderConfig, device: torch.device | str = "cpu", frozen: bool = False) -> None:
        super().__init__()
        self.config = config
        place = torch.device(device)
        self.decoder = Decoder(config, ReferenceAttention(), dtype=torch.float32, device=place)
        self._ropes = RopeTables(config.rotations, torch.float32, place)
        self.requires_grad_(not frozen)

    @classmethod
    def load(cls, folder: Path, device: torch.device | str = "cpu", frozen: bool = False) -> Network:
        """Return the checkpoint in ``folder``, in float32."""
        network = cls(read_config(folder), device, frozen)
        network.load_weights(folder)
        network.decoder.assert_loaded()
        return network

    def load_weights(self, folder: Path) -> None:
        """Fill it from a checkpoint; raises ConfigError as `read_layout`."""
        load_weights(self.decoder, folder)

    @property
    def layers(self) -> Sequence[Layer]:
        """Return the layers, bottom first."""
        return list(self.decoder.layers)  # type: ignore[arg-type]

    @property
    def head_weight(self) -> Tensor:
        """Return [V, d_model] of the output head."""
        head = self.decoder.head
        return self.decoder.embedding if head is None else head.weight

    def init_weights(self, seed: int) -> None:
        """Random start: N(0, 0.02), residual projections smaller by sqrt(2 layers) (GPT-2), norms at one."""
        start_values(self.decoder, seed, self.config.num_layers)

    # -- forward

    def embed(self, tokens: Tensor) -> Tensor:
        """Return [.., d_model] embeddings of ``tokens`` [..] as the first layer and drafters read them."""
        rows = F.embedding(tokens, self.decoder.embedding)
        return rows if self.config.embedding_scale == 1 else rows * self.config.embedding_scale

    def rotation(self, positions: Tensor) -> Rotation:
        """cos and signed sin [B, T, 1, dim] of ``positions`` [B, T], where all layers have the same.

        Raises:
            CapabilityError: layers that rotate in different ways (Gemma 3, SmolLM3).
        """
        if len({*self.config.rotations}) > 1:
            subject, wrong = (
                f"this recipe for a model of family {self.config.family}",
                "its layers rotate in different ways",
            )
            raise CapabilityError(subject, wrong, "train eagle, lyanna, medusa or a draft_model for it")
        return self._rotations(positions)[0]

    def _rotations(self, positions: Tensor) -> list[Rotation]:
        """Return the same of every layer."""
        shape = (*positions.shape, 1, -1)
        rotations = self._ropes.rows(positions.reshape(-1))
        shaped = [None if pair is None else (pair[0].view(shape), pair[1].view(shape)) for pair in rotations]
        return [shaped[table] for table in self._ropes.of_layer]

    def qkv(
        self, index: int, hidden: Tensor, rotation: Rotation, delta: Delta | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values [B, T, heads, head_dim] of ``hidden`` [B, T, d_model]."""
        return project(self.layers[index], self.config, hidden, rotation, index, delta)

    def finish_layer(self, index: int, hidden: Tensor, attended: Tensor, delta: Delta | None = None) -> Tensor:
        """Run the rest of a layer: ``attended`` [B, T, heads * head_dim] into the residual stream, then the MLP."""
        return finish(self.layers[index], self.config, hidden, attended, index, delta)

    def run(
        self,
        hidden: Tensor,
        start: int,
        stop: int,
        batch: TokenBatch,
        delta: Delta | None = None,
        keep: list[Projected] | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Return layers start .. stop - 1, each token attending within its document; ``keep`` is given the queries,
        keys and values of every layer run.

        Returns:
            [B, T, d_model], and the inputs of every layer run.
        """
        rotations, masks = self._rotations(batch.positions), self.masks(batch, start, stop)
        inputs = []
        for index in range(start, stop):
            inputs.append(hidden)
            q, k, v = self.qkv(index, hidden, rotations[index], delta)
            if keep is not None:
                keep.append((q, k, v))
            hidden = self.finish_layer(index, hidden, attend(q, k, v, masks[index]), delta)
        return hidden, inputs

    def masks(self, batch: TokenBatch, start: int = 0, stop: int | None = None) -> dict[int, Tensor]:
        """Return `visible` of each of the layers start .. stop - 1; layers of one window share theirs."""
        windows = dict(enumerate(self.config.windows[start:stop], start))
        by_window = {window: visible(batch, window) for window in set(windows.values())}
        return {index: by_window[window] for index, window in windows.items()}

    def forward(self, batch: TokenBatch) -> Tensor:
        """Return [B, T, d_model] after the final norm."""
        hidden, _ = self.run(self.embed(batch.tokens), 0, self.config.num_layers, batch)
        return self.final(hidden)

    def final(self, hidden: Tensor) -> Tensor:
        """Return the final norm: what the head multiplies."""
        return normed(self.decoder.norm, hidden)

    def logits(self, normed_hidden: Tensor) -> Tensor:
        """Return [..., V] of rows that went through `final`."""
        return F.linear(normed_hidden, self.head_weight)

    # -- files

    def state(self, layers_only: bool = False) -> dict[str, Tensor]:
        """Return the parameters under their checkpoint names; of all of them, or of the layers'."""
        parameters, values = dict(self.decoder.named_parameters()), {}
        for piece in weight_map(self.config):
            if piece.of_layer or not layers_only:
                value = parameters[piece.into].detach()
                name = piece.source if piece.source.startswith("lm_head") else f"model.{piece.source}"
                values[name] = value if piece.rows is None else value[piece.at : piece.at + piece.rows]
        return values

    def save(
        self, folder: Path, config: dict[str, Any], dtype: torch.dtype = torch.bfloat16, layers_only: bool = False
    ) -> None:
        """Write ``config.json``, which is ``config``, and the weights in ``dtype``; with ``layers_only`` without
        embedding, final norm and head, which those who load it have."""
        write_checkpoint(folder, config, self.state(layers_only), dtype)


def config_of_layers(folder: Path, keep: Sequence[int]) -> dict[str, Any]:
    """Return the config.json of a model of the layers ``keep`` of the one in ``folder``.

    Raises:
        ConfigError: there is none: the target is a GGUF file.
    """
    values: dict[str, Any] = read_json(folder / "config.json", "name a target that is a Hugging Face folder")
    for name in ("layer_types", "no_rope_layers"):  # an entry a layer
        if isinstance(values.get(name), list):
            values[name] = [values[name][index] for index in keep]
    return {**values, "num_hidden_layers": len(keep)}


@torch.no_grad()
def take_layers(network: Network, source: Network, keep: Sequence[int]) -> None:
    """Fill ``network`` with the layers ``keep`` of ``source``, and with its embedding, norm and head."""
    parameters = dict(source.decoder.named_parameters())
    for name, parameter in network.decoder.named_parameters():
        parts = name.split(".")
        if parts[0] == "layers":
            parts[1] = str(keep[int(parts[1])])
        parameter.copy_(parameters[".".join(parts)])


def start_values(module: nn.Module, seed: int, layers: int) -> None:
    """Implement `Network.init_weights`."""
    generator = torch.Generator().manual_seed(seed)
    shrink = (2 * layers) ** -0.5
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            parameter.data.zero_()
        elif parameter.ndim == 1:
            parameter.data.fill_(1.0)
        else:
            residual = name.removesuffix(".weight").rpartition(".")[2] in ("out", "down")
            deviation = 0.02 * (shrink if residual else 1.0)
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * deviation)


def write_checkpoint(folder: Path, config: dict[str, Any], values: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Write ``config.json`` and weights under their checkpoint names, as ``dtype``."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {**config, "dtype": str(dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    tensors = {name: value.detach().to("cpu", dtype).contiguous().clone() for name, value in values.items()}
    save_file(tensors, str(folder / WEIGHTS), metadata={"format": "pt"})


def project(
    layer: Layer, c: DecoderConfig, hidden: Tensor, rotation: Rotation, index: int = 0, delta: Delta | None = None
) -> Projected:
    """Return queries, keys and values [..., heads, head_dim] of a layer's input [..., d_model]."""
    x = normed(layer.attention_norm, hidden)
    both = linear(layer, "qkv", index, x, delta).unflatten(-1, (-1, c.head_dim))
    q, k, v = both.split((c.num_heads, c.num_kv_heads, c.num_kv_heads), dim=-2)
    q, k = head_norm(q, layer.q_norm, c), head_norm(k, layer.k_norm, c)
    if c.scale != c.head_dim**-0.5:  # attention scales by the head's width
        q = q * (c.scale * c.head_dim**0.5)
    return rotate(q, rotation), rotate(k, rotation), v


def finish(
    layer: Layer, c: DecoderConfig, hidden: Tensor, attended: Tensor, index: int = 0, delta: Delta | None = None
) -> Tensor:
    """Return the rest of a layer, see `Network.finish_layer`: [..., d_model]."""
    hidden = hidden + normed(layer.attention_post_norm, linear(layer, "out", index, attended, delta))
    x = normed(layer.mlp_norm, hidden)
    inner = linear(layer, "up", index, x, delta)
    gate, up = inner.chunk(2, dim=-1)
    inner = _ACTIVATIONS[c.activation](gate) * up
    return hidden + normed(layer.mlp_post_norm, linear(layer, "down", index, inner, delta))


def normed(norm: nn.Module | None, x: Tensor) -> Tensor:
    """Return a layer's norm with gradients, in float32 inside; of a layer that has none, ``x``."""
    if not isinstance(norm, Norm):
        return x
    wide = x if x.dtype == torch.float64 else x.float()
    return F.rms_norm(wide, norm.weight.shape, norm.weight.to(wide.dtype), norm.eps)


def head_norm(x: Tensor, weight: Tensor | None, c: DecoderConfig) -> Tensor:
    """Return queries or keys [..., heads, head_dim] after the norm that a layer has for each.

    Where it has none, ``x``.
    """
    return x if weight is None else F.rms_norm(x.float(), (c.head_dim,), weight, c.norm_eps).to(x.dtype)


def linear(layer: Layer, name: str, index: int, x: Tensor, delta: Delta | None) -> Tensor:
    """Return a linear layer, and what an adapter adds to it."""
    dense = layer._modules[name]
    if not isinstance(dense, Dense):
        raise ConfigError("training", "the decoder was finished for inference", "load it with Network.load")
    y = F.linear(x, dense.weight, dense.bias)
    more = None if delta is None else delta(index, name, x)
    return y if more is None else y + more


def rotation_of(rope: RopeTable, positions: Tensor) -> Rotation:
    """cos and signed sin [.., 1, dim] of ``positions`` [..]."""
    cos, sin = rope.rows(positions.reshape(-1))
    shape = (*positions.shape, 1, -1)
    return cos.view(shape), sin.view(shape)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Return rotary embedding of the first ``dim`` dimensions of every head [B, T, heads, head_dim]."""
    if rotation is None:
        return x
    return rotated(x, *(part.to(x.dtype) for part in rotation))


def visible(batch: TokenBatch, window: int | None = None) -> Tensor:
    """Return [B, 1, T, T] bool: keys of the same document at or before the query, within the window.

    Padding sees itself.
    """
    length = batch.tokens.shape[1]
    same = batch.documents[:, :, None] == batch.documents[:, None, :]
    places = torch.arange(length, device=batch.tokens.device)
    distance = places[:, None] - places[None, :]
    near = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    return (same & near)[:, None]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Return [B, Tq, heads * head_dim] from q [B, Tq, heads, head_dim], k and v [B, Tk, ..] and mask [B, 1, Tq, Tk]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if k.shape[1] != q.shape[1]:
        repeat = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(repeat, dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
