"""Feedback memory with gradients: k passes over every k-th prefix of packed rows (SPIRe, section 3.3, figure 2).

A *block* is k tokens in a row. In its pass j, from 0 on, every block computes its token j: a row of its own for each
block, all blocks at once. It sees the memory of verified tokens (activations of the target) in front of its block, and
that of the block's tokens 0 .. j - 1, which the passes before have made. So a text of T tokens costs T rows, as in a
plain network, and k passes, not T; and each row sees what it will see in use, where a draft begins at the root.

                     verified                     the block's own
    pass 0   row bk  sinks, window in front of bk          -
    pass 1   bk + 1  the same, for its own window     of bk
    pass 2   bk + 2                                   of bk, bk + 1

Attention is that of carriers: blocks are the carriers of their documents.

Shapes: B rows of packed documents, T tokens in each, P blocks of a row, k tokens of a block, d wide; R blocks of all
rows that have something in front of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...model.families import DecoderConfig
from ...model.layers import Layer
from ...model.linear import Dense
from ...train.carriers import GroupAttention, heads_first, keys_of_blocks, make_carriers
from ...train.data import TokenBatch
from ...train.network import KeyValues, Network, Rotation, finish, head_norm, normed, rotate
from .model import SpireShape


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
        Of each pass [B, P, d] the draft's last states, after its final norm; 0 of blocks that nothing is in front of.
    """
    c, layers, mix = network.config, network.layers, memory.softmax(-1)
    begun = blocks.there[:, :, 0] & (batch.positions[:, blocks.places[:, 0]] > 0)  # [B, P]
    positions = batch.positions[:, blocks.places][begun]  # [R, k]
    tokens = batch.tokens[:, blocks.places][begun]
    flat = torch.arange(batch.tokens.numel(), device=tokens.device).view_as(batch.tokens)
    carriers = make_carriers(flat[:, blocks.places[:, 0]][begun], positions[:, 0])
    sizes = [rows.stop - rows.start for rows, _ in carriers.blocks]
    whole, verified, own = network.rotation(batch.positions), [], []
    for layer, states in zip(layers, past, strict=True):
        k, v = (part.flatten(0, 1) for part in _keys_and_values(layer, c, states, whole))
        verified.append([keys_of_blocks(heads_first(part, c.num_heads), carriers.blocks) for part in (k, v)])
        own.append(([k.new_zeros(len(carriers), *k.shape[1:])], [v.new_zeros(len(carriers), *v.shape[1:])]))
    ends = []
    for step in range(shape.depth):
        first = positions[:, step] - shape.window  # [R] of the window
        rotation, at = network.rotation(positions[:, step]), positions[:, :step]
        far = (at < first[:, None]) & (at >= shape.sinks)
        hidden_own = F.pad(far, (1, 0), value=True)[:, None]  # [R, 1, 1 + step]: the first key stands for none
        hidden_keys = []
        for rows, keys in carriers.blocks:
            place = torch.arange(keys.stop - keys.start, device=tokens.device)
            out = (place < first[rows, None]) & (place >= shape.sinks)
            hidden_keys.append((out | (place >= positions[rows, :1]))[:, None])
        hidden = network.embed(tokens[:, step])
        activations = [hidden]
        for layer, (main_k, main_v), both in zip(layers, verified, own, strict=True):
            q = _part(layer, normed(layer.attention_norm, hidden), slice(0, c.num_heads * c.head_dim))
            q = rotate(head_norm(q.unflatten(-1, (-1, c.head_dim)), layer.q_norm, c), rotation)
            split = (
                heads_first(x, c.num_heads).split(sizes, 1) for x in (q[:, None], *(torch.stack(x, 1) for x in both))
            )
            parts = zip(*split, main_k, main_v, hidden_keys, hidden_own.split(sizes), strict=True)
            seen = [GroupAttention.apply(q, k, v, a, b, *masks, c.scale) for q, a, b, k, v, *masks in parts]
            attended = torch.cat(seen, 1).permute(1, 2, 0, 3).flatten(1)
            hidden = finish(layer, c, hidden, attended)
            activations.append(hidden)
        final = network.final(hidden)
        ends.append(final.new_zeros(*begun.shape, final.shape[-1]).masked_scatter(begun[..., None], final))
        for weights, layer, both in zip(mix, layers, own, strict=True):
            mixed = torch.einsum("l,lrd->rd", weights.to(hidden.dtype), torch.stack(activations))
            for kept, new in zip(both, _keys_and_values(layer, c, mixed, rotation), strict=True):
                kept.append(new)
    return ends
