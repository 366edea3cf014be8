"""Feedback memory with gradients: k passes over every k-th prefix of packed rows (SPIRe, section 3.3, figure 2).

A *block* is k tokens in a row. In its pass j, from 0 on, every block computes its token j: a row of its own for each
block, all blocks at once. It sees the memory of verified tokens (activations of the target) in front of its block, and
that of the block's tokens 0 .. j - 1, which the passes before have made. So a text of T tokens costs T rows, as in a
plain network, and k passes, not T; and each row sees what it will see in use, where a draft begins at the root.

                     verified                     the block's own
    pass 0   row bk  sinks, window in front of bk          -
    pass 1   bk + 1  the same, for its own window     of bk
    pass 2   bk + 2                                   of bk, bk + 1

Blocks that lie side by side see nearly the same keys. So attention is computed in *groups* of blocks, each over the
tokens that its blocks may see (a band of the row, and their sinks): what a row costs does not grow with its length.

Shapes: B rows of packed documents, T tokens in each, P blocks of a row, k tokens of a block, d wide; G groups of C
blocks, whose keys are L verified tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...model.families import DecoderConfig
from ...model.layers import Layer
from ...model.linear import Dense
from ...train.data import TokenBatch
from ...train.network import KeyValues, Network, Rotation, finish, head_norm, normed, rotate
from .model import SpireShape

GROUP = 16  # blocks that attend together, where a view is narrower than a row


@dataclass(frozen=True, slots=True)
class Blocks:
    """Describe where the blocks of a batch lie."""

    places: Tensor  # [P, k] of each block's tokens in their row; the last place where a row has ended
    there: Tensor  # [B, P, k] bool: the token is there, and of the document that its block begins in

    @staticmethod
    def of(batch: TokenBatch, depth: int, offset: int = 0) -> Blocks:
        """Return blocks of ``depth`` tokens, the first of which begins at ``offset``."""
        length = batch.tokens.shape[1]
        starts = torch.arange(offset, length, depth, device=batch.tokens.device)
        places = starts[:, None] + torch.arange(depth, device=starts.device)
        inside, places = places < length, places.clamp_max(length - 1)
        documents = batch.documents[:, places]  # [B, P, k]
        same = (documents == documents[:, :, :1]) & (documents >= 0)
        return Blocks(places, same & inside)


def _mask_of(batch: TokenBatch, blocks: Blocks, shape: SpireShape, step: int) -> Tensor:
    """Return [B, 1, P, T + P * own] bool: what the rows of a pass see, figure 2.

    First the T verified tokens, then the block's own ones, pass by pass: those of the passes before.

    Args:
        step: the pass, from 0 on.
    """
    rows, starts = blocks.places[:, step], blocks.places[:, 0]
    position, of_block = batch.positions[:, rows], batch.documents[:, starts]  # [B, P]
    keys = torch.arange(batch.tokens.shape[1], device=rows.device)
    near = batch.positions[:, None] >= position[:, :, None] - shape.window
    near = near | (batch.positions[:, None] < shape.sinks)
    verified = (batch.documents[:, None] == of_block[:, :, None]) & (keys < starts[:, None]) & near  # [B, P, T]
    drafted = []
    same = torch.eye(len(starts), dtype=torch.bool, device=rows.device)
    for other in range(step):
        at = batch.positions[:, blocks.places[:, other]]
        close = (at >= position - shape.window) | (at < shape.sinks)
        drafted.append(same & close[:, None])  # [B, P, P]
    return torch.cat([verified, *drafted], -1)[:, None]


@dataclass(frozen=True, slots=True)
class _Groups:
    """The blocks of a batch by groups, and the verified tokens that each group attends to."""

    size: int  # C
    places: Tensor  # [B, G, L] in the row, of the band and then of each block's sinks
    open: Tensor  # [G or 1, C or 1, L] or [B, G, C, L] bool: whether a block may look there, if its mask lets it

    @staticmethod
    def of(batch: TokenBatch, blocks: Blocks, shape: SpireShape) -> _Groups:
        """Return groups of `GROUP` blocks; one of all blocks, over the whole row, where that is as little work."""
        rows, length = batch.tokens.shape
        starts = blocks.places[:, 0]
        count, depth, device = len(starts), blocks.places.shape[1], starts.device
        band = shape.window + (GROUP - 1) * depth
        if band + GROUP * shape.sinks >= length:
            whole = torch.arange(length, device=device).expand(rows, 1, -1)
            return _Groups(count, whole, torch.ones(1, 1, length, dtype=torch.bool, device=device))
        starts = F.pad(starts, (0, -count % GROUP), value=length - 1).view(-1, GROUP)  # [G, C]
        first = starts[:, :1] - shape.window  # [G, 1] place at which its band begins
        near = first + torch.arange(band, device=device)
        inside = (near >= 0) & (near < length)
        near = near.clamp(0, length - 1).expand(rows, -1, -1)
        at = starts.expand(rows, -1, -1)
        begins = at - batch.positions.gather(1, at.flatten(1)).view_as(at)  # [B, G, C] a document's first token
        sinks = begins[..., None] + torch.arange(shape.sinks, device=device)  # [B, G, C, S]
        diagonal = torch.eye(GROUP, dtype=torch.bool, device=device)[:, :, None]  # [C, C, 1]
        apart = ((sinks < first[:, :, None]) & (sinks >= 0))[:, :, None] & diagonal  # [B, G, C, C, S]
        seen = inside[:, None].expand(rows, -1, GROUP, -1)
        places = torch.cat((near, sinks.clamp(0, length - 1).flatten(2)), -1)
        return _Groups(GROUP, places, torch.cat((seen, apart.flatten(3)), -1))

    def keys(self, whole: Tensor) -> Tensor:
        """Return [B * G, L, ..] of a row's [B, T, ..]."""
        rows, length = whole.shape[:2]
        first = torch.arange(rows, device=whole.device)[:, None, None] * length
        selected = whole.flatten(0, 1).index_select(0, (self.places + first).flatten())
        return selected.view(-1, self.places.shape[2], *whole.shape[2:])

    def split(self, each: Tensor) -> Tensor:
        """Return [B * G, C, ..] of the blocks' [B, P, ..]; the last group is filled up with zeros."""
        padded = F.pad(each, (0, 0) * (each.ndim - 2) + (0, -each.shape[1] % self.size))
        return padded.reshape(-1, self.size, *each.shape[2:])

    def mask(self, mask: Tensor, length: int) -> Tensor:
        """Return [B * G, 1, C, L + C * own] of the blocks' mask [B, 1, P, T + P * own]."""
        mask = mask[:, 0]
        rows, count = mask.shape[:2]
        verified = self.split(mask[:, :, :length]).view(rows, -1, self.size, length)
        places = self.places[:, :, None].expand(rows, verified.shape[1], self.size, -1)
        parts = [verified.gather(3, places) & self.open]
        eye = torch.eye(self.size, dtype=torch.bool, device=mask.device)
        for step_mask in mask[:, :, length:].unflatten(2, (-1, count)).unbind(2) if mask.shape[2] > length else ():
            diagonal = self.split(step_mask.diagonal(dim1=1, dim2=2)).view(rows, -1, self.size, 1)
            parts.append(diagonal & eye)
        return torch.cat(parts, -1).flatten(0, 1)[:, None]


def _keys_and_values(layer: Layer, c: DecoderConfig, memory: Tensor, rotation: Rotation) -> KeyValues:
    """Return [.., kv_heads, head_dim] a layer's projections of memory vectors [.., d]."""
    both = _part(layer, normed(layer.attention_norm, memory), slice(c.num_heads * c.head_dim, None))
    k, v = both.unflatten(-1, (-1, c.head_dim)).chunk(2, dim=-2)
    return rotate(head_norm(k, layer.k_norm, c), rotation), v


def _part(layer: Layer, x: Tensor, outputs: slice) -> Tensor:
    """Return some of the outputs of a layer's first product."""
    dense = layer._modules["qkv"]
    assert isinstance(dense, Dense), "the draft was finished for inference"
    return F.linear(x, dense.weight[outputs], None if dense.bias is None else dense.bias[outputs])


def run_blocks(
    network: Network,
    memory: Tensor,
    shape: SpireShape,
    batch: TokenBatch,
    blocks: Blocks,
    past: Sequence[Tensor],
) -> list[Tensor]:
    """Return the k passes.

    Args:
        network: the draft.
        memory: w of its feedback memory.
        past: of each layer [B, T, d] what stands for the memory of verified tokens.

    Returns:
        Of each pass [B, P, d] the draft's last states, after its final norm.
    """
    c, layers = network.config, network.layers
    whole, groups = network.rotation(batch.positions), _Groups.of(batch, blocks, shape)
    rows, count, length = len(batch.tokens), len(blocks.places), batch.tokens.shape[1]
    past_kv: list[list[KeyValues]] = [
        [_each(groups.keys, _keys_and_values(layer, c, kv, whole))] for layer, kv in zip(layers, past, strict=True)
    ]
    mix = memory.softmax(-1)
    ends = []
    for step in range(shape.depth):
        at = blocks.places[:, step]
        positions = batch.positions[:, at]
        rotation, mask = network.rotation(positions), _mask_of(batch, blocks, shape, step)
        seen = mask.any(-1)[:, 0, :, None]  # [B, P, 1]: the first token of a document has nothing before it
        mask = groups.mask(mask, length)
        mask = mask | ~mask.any(-1, keepdim=True)
        hidden = network.embed(batch.tokens[:, at])
        activations = [hidden]
        for layer, kv in zip(layers, past_kv, strict=True):
            k, v = (torch.cat(parts, 1) for parts in zip(*kv, strict=True))
            q = _part(layer, normed(layer.attention_norm, hidden), slice(0, c.num_heads * c.head_dim))
            q = rotate(head_norm(q.unflatten(-1, (-1, c.head_dim)), layer.q_norm, c), rotation)
            attended = _attend(groups.split(q), k, v, mask, c.scale)
            attended = attended.view(rows, -1, attended.shape[-1])[:, :count]
            hidden = finish(layer, c, hidden, attended * seen)
            activations.append(hidden)
        ends.append(network.final(hidden))
        if step + 1 < shape.depth:
            every = torch.stack(activations)  # [n + 1, B, P, d]
            for index, (layer, kv) in enumerate(zip(layers, past_kv, strict=True)):
                mixed = torch.einsum("l,lbpd->bpd", mix[index].to(every.dtype), every)
                kv.append(_each(groups.split, _keys_and_values(layer, c, mixed, rotation)))
    return ends


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Return [N, C, heads * head_dim] of q [N, C, heads, head_dim], k, v [N, L, kv_heads, head_dim] and a mask.

    In products, since torch's own attention takes five times as long for so few queries.
    """
    count, rows, heads, width = q.shape
    shared = k.shape[2]
    q = q.view(count, rows, shared, heads // shared, width).permute(0, 2, 3, 1, 4)
    scores = (q * scale).flatten(2, 3) @ k.permute(0, 2, 3, 1)  # [N, kv_heads, heads / kv_heads * C, L]
    scores = scores.unflatten(2, (-1, rows)).masked_fill(~mask[:, :, None], -torch.inf)
    mixed = scores.softmax(-1).flatten(2, 3).to(v.dtype) @ v.transpose(1, 2)
    return mixed.unflatten(2, (-1, rows)).permute(0, 3, 1, 2, 4).flatten(2)


def _each(act: Callable[[Tensor], Tensor], both: KeyValues) -> KeyValues:
    """Return keys and values, the same done to each."""
    return act(both[0]), act(both[1])
