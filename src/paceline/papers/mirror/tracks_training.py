"""A draft of tracks with gradients: all tracks at once, their products as one batch of products.

What `papers.mirror.tracks.Tracks` computes track by track, without a cache. Every parameter holds those of all tracks,
one after the other; files have them under their own names (`weights.names`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from ...core.options import option
from ...model.families import SEGMENTS, DecoderConfig, linear_shapes
from ...model.layers import _ACTIVATIONS
from ...model.linear import nan_parameter
from ...model.rope import RopeTable
from ...train.data import TokenBatch
from ...train.network import Rotation, attend, rotate, rotation_of, start_values, visible, write_checkpoint
from ...train.recipes.distillation import DistilledOptions
from ...train.recipes.distillation import build as build
from ...weights.loader import WEIGHTS, read_layout
from ...weights.names import Piece, weight_map
from ...weights.source import read_config


class _TrackLayer(nn.Module):
    """One layer of all tracks; ``config`` is of one of them."""

    def __init__(self, config: DecoderConfig, tracks: int, device: torch.device) -> None:
        super().__init__()
        for name, (inputs, outputs) in linear_shapes(config).items():
            parameter = nan_parameter((tracks, outputs, inputs), torch.float32, device, trainable=True)
            self.register_parameter(name, parameter)
        for name in ("attention_norm", "mlp_norm"):
            gains = nan_parameter((tracks * config.d_model,), torch.float32, device, trainable=True)
            self.register_parameter(name, gains)
        self.config = config

    def forward(self, x: Tensor, rotation: Rotation, mask: Tensor) -> Tensor:
        """Return [G, B, T, d] of the residual streams of all tracks."""
        c, parts = self.config, dict(self.named_parameters())
        tracks = len(x)
        both = product(gained(x, parts["attention_norm"], c.norm_eps), parts["qkv"]).unflatten(-1, (-1, c.head_dim))
        q, k, v = both.split((c.num_heads, c.num_kv_heads, c.num_kv_heads), dim=-2)
        # To attention the heads of all tracks are heads of one layer, [B, T, G * heads, head_dim].
        q, k, v = (part.permute(1, 2, 0, 3, 4).flatten(2, 3) for part in (q, k, v))
        seen = attend(rotate(q, rotation), rotate(k, rotation), v, mask)
        x = x + product(seen.unflatten(-1, (tracks, -1)).movedim(2, 0), parts["out"])
        gate, up = product(gained(x, parts["mlp_norm"], c.norm_eps), parts["up"]).chunk(2, dim=-1)
        return x + product(_ACTIVATIONS[c.activation](gate) * up, parts["down"])


class TracksNetwork(nn.Module):
    """A trainable draft of tracks; ``config`` is of all of them together.

    The parameters are float32 and NaN until loaded or `init_weights`.
    """

    def __init__(self, config: DecoderConfig, device: torch.device | str = "cpu") -> None:
        super().__init__()
        c, place, track_config = config, torch.device(device), config.track
        self.config = c
        self._rope = RopeTable(c.rope, torch.float32, place)
        options: dict[str, Any] = {"dtype": torch.float32, "device": place, "trainable": True}
        self.embedding = nan_parameter((c.vocab_size, c.d_model), **options)
        self.layers = nn.ModuleList(_TrackLayer(track_config, c.tracks, place) for _ in range(c.num_layers))
        self.merge = nan_parameter((c.tracks, track_config.d_model, c.d_model), **options)
        self.merge_norm = nan_parameter((c.d_model,), **options)
        self.norm = nan_parameter((c.d_model,), **options)

    def init_weights(self, seed: int) -> None:
        """Random start, as of `Network`."""
        start_values(self, seed, self.config.num_layers)

    @property
    def head_weight(self) -> Tensor:
        """Return [V, d_model] of the output head."""
        return self.embedding

    def forward(self, batch: TokenBatch) -> Tensor:
        """Return [B, T, d_model] after the final norm."""
        c = self.config
        rotation, mask = rotation_of(self._rope, batch.positions), visible(batch)
        x = F.embedding(batch.tokens, self.embedding).unflatten(-1, (c.tracks, -1)).movedim(2, 0)  # [G, B, T, d]
        for index, layer in enumerate(self.layers):
            if index == c.num_layers // SEGMENTS:
                x = self.merged(x)
            x = layer(x, rotation, mask)
        wide = x.movedim(0, 2).flatten(2).float()
        return F.rms_norm(wide, (c.d_model,), self.norm, c.norm_eps)

    def merged(self, x: Tensor) -> Tensor:
        """Return [G, B, T, d] of all tracks, after what they give each other; see `papers.mirror.tracks`."""
        c = self.config
        normed = gained(x, self.merge_norm, c.norm_eps).movedim(0, 2).flatten(2)
        return x + product(normed.expand(c.tracks, -1, -1, -1), self.merge)

    # -- files

    def _rows(self, piece: Piece) -> Tensor:
        """Return the values that a tensor of a checkpoint has here."""
        values = dict(self.named_parameters())
        if not piece.into.startswith("tracks."):
            return values[piece.into.removesuffix(".weight")]
        _, track, name = piece.into.removesuffix(".weight").split(".", 2)
        stacked = values[name.removeprefix("body.")]
        rows = stacked[int(track)] if stacked.ndim > 1 else stacked.view(self.config.tracks, -1)[int(track)]
        return rows if piece.rows is None else rows[piece.at : piece.at + piece.rows]

    def load_weights(self, folder: Path) -> None:
        """Fill it from a checkpoint; raises ConfigError as `read_layout`."""
        read_layout(folder, self.config)
        values = load_file(folder / WEIGHTS)
        with torch.no_grad():
            for piece in weight_map(self.config):
                self._rows(piece).copy_(values[f"model.{piece.source}"])

    @classmethod
    def load(cls, folder: Path) -> TracksNetwork:
        """Return the checkpoint in ``folder``, in float32."""
        network = cls(read_config(folder))
        network.load_weights(folder)
        return network

    def save(self, folder: Path, config: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> None:
        """Write ``config.json``, which is ``config``, and the weights in ``dtype``."""
        values = {f"model.{piece.source}": self._rows(piece) for piece in weight_map(self.config)}
        write_checkpoint(folder, config, values, dtype)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Return [G, B, T, out] of x [G, B, T, in] and weights [G, out, in]: of each track its own."""
    return torch.bmm(x.flatten(1, 2), weight.transpose(1, 2)).unflatten(1, x.shape[1:3])


def gained(x: Tensor, gains: Tensor, eps: float) -> Tensor:
    """Return RMS norm [G, B, T, d] of every track, with gains [G * d], in float32."""
    return F.rms_norm(x.float(), x.shape[-1:], eps=eps) * gains.view(len(x), 1, 1, -1)


@dataclass(frozen=True, kw_only=True)
class TracksOptions(DistilledOptions):
    """A draft of tracks; widths and heads are those of all tracks together."""

    tracks: int = option(4, help="parts without traffic between two merges, each for a process of its own", minimum=2)

    network: ClassVar[Callable[..., Any]] = TracksNetwork

    def config(self, *sizes: Any, **more: Any) -> dict[str, Any]:
        """Return its config.json; arguments as for `ModelShape`."""
        marks = {"architectures": ["PacelineTracksForCausalLM"], "model_type": "paceline_tracks"}
        return {**super().config(*sizes, **more), **marks, "num_tracks": self.tracks, "merge": "gather"}
