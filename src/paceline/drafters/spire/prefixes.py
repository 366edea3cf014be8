"""Feedback memory with gradients: k passes over every k-th prefix of packed rows (SPIRe, section 3.3, figure 2).

A *block* is k tokens in a row. In its pass j, from 0 on, every block computes its token j: a row of its own for each
block, all blocks at once. It sees the memory of verified tokens (activations of the target) in front of its block, and
that of the block's tokens 0 .. j - 1, which the passes before have made. So a text of T tokens costs T rows, as in a
plain network, and k passes, not T; and each row sees what it will see in use, where a draft begins at the root.

                     verified                     the block's own
    pass 0   row bk  sinks, window in front of bk          -
    pass 1   bk + 1  the same, for its own window     of bk
    pass 2   bk + 2                                   of bk, bk + 1

Shapes: B rows of packed documents, T tokens in each, P blocks of a row, k tokens of a block, d wide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...network.families import DecoderConfig
from ...network.layers import Layer
from ...network.linear import Dense
from ...training.data import TokenBatch
from ...training.network import KeyValues, Network, Rotation, attend, finish, head_norm, normed, rotate
from .model import SpireShape


@dataclass(frozen=True, slots=True)
class Blocks:
    """Where the blocks of a batch lie."""

    places: Tensor  # [P, k] of each block's tokens in their row; the last place where a row has ended
    there: Tensor  # [B, P, k] bool: the token is there, and of the document that its block begins in

    @staticmethod
    def of(batch: TokenBatch, depth: int, offset: int = 0) -> Blocks:
        """Blocks of ``depth`` tokens, the first of which begins at ``offset``."""
        length = batch.tokens.shape[1]
        starts = torch.arange(offset, length, depth, device=batch.tokens.device)
        places = starts[:, None] + torch.arange(depth, device=starts.device)
        inside, places = places < length, places.clamp_max(length - 1)
        documents = batch.documents[:, places]  # [B, P, k]
        same = (documents == documents[:, :, :1]) & (documents >= 0)
        return Blocks(places, same & inside)


def mask_of(batch: TokenBatch, blocks: Blocks, shape: SpireShape, step: int) -> Tensor:
    """[B, 1, P, T + P * own] bool: what the rows of a pass see, figure 2.

    First the T verified tokens, then the block's own ones, pass by pass: those of the passes before; without feedback
    that of this pass, too.

    Args:
        step: the pass, from 0 on.
    """
    rows, starts = blocks.places[:, step], blocks.places[:, 0]
    position, of_block = batch.positions[:, rows], batch.documents[:, starts]  # [B, P]
    stop = position if shape.feedback else position + 1  # the first position that a row does not see
    keys = torch.arange(batch.tokens.shape[1], device=rows.device)
    near = batch.positions[:, None] >= stop[:, :, None] - shape.window
    near = near | (batch.positions[:, None] < shape.sinks)
    verified = (batch.documents[:, None] == of_block[:, :, None]) & (keys < starts[:, None]) & near  # [B, P, T]
    own = []
    same = torch.eye(len(starts), dtype=torch.bool, device=rows.device)
    for other in range(step if shape.feedback else step + 1):
        at = batch.positions[:, blocks.places[:, other]]
        close = (at >= stop - shape.window) | (at < shape.sinks)
        own.append(same & close[:, None])  # [B, P, P]
    return torch.cat([verified, *own], -1)[:, None]


def keys_and_values(layer: Layer, c: DecoderConfig, memory: Tensor, rotation: Rotation) -> KeyValues:
    """[.., kv_heads, head_dim] a layer's projections of memory vectors [.., d]."""
    both = _part(layer, normed(layer.attention_norm, memory), slice(c.num_heads * c.head_dim, None))
    k, v = both.unflatten(-1, (-1, c.head_dim)).chunk(2, dim=-2)
    return rotate(head_norm(k, layer.k_norm, c), rotation), v


def _queries(layer: Layer, c: DecoderConfig, hidden: Tensor, rotation: Rotation) -> Tensor:
    """[.., heads, head_dim] of a layer's input [.., d]."""
    q = _part(layer, normed(layer.attention_norm, hidden), slice(0, c.num_heads * c.head_dim))
    return rotate(head_norm(q.unflatten(-1, (-1, c.head_dim)), layer.q_norm, c), rotation)


def _part(layer: Layer, x: Tensor, outputs: slice) -> Tensor:
    """Some of the outputs of a layer's first product."""
    dense = layer._modules["qkv"]
    assert isinstance(dense, Dense), "the draft was finished for inference"
    return F.linear(x, dense.weight[outputs], None if dense.bias is None else dense.bias[outputs])


def run_blocks(
    network: Network,
    memory: Tensor | None,
    shape: SpireShape,
    batch: TokenBatch,
    blocks: Blocks,
    past: Sequence[Tensor] | None,
) -> list[Tensor]:
    """The k passes.

    Args:
        network: the draft.
        memory: w of its feedback memory; None: it has none.
        past: of each layer [B, T, d] what stands for the memory of verified tokens; None: the draft's embeddings.

    Returns:
        Of each pass [B, P, d] the draft's last states, after its final norm.
    """
    c, layers = network.config, network.layers
    if past is None:
        past = [network.embed(batch.tokens, batch.positions)] * len(layers)
    whole = network.rotation(batch.positions)
    known: list[list[KeyValues]] = [
        [keys_and_values(layer, c, own, whole)] for layer, own in zip(layers, past, strict=True)
    ]
    mix = None if memory is None else memory.softmax(-1).expand(len(layers), -1)
    said = []
    for step in range(shape.depth):
        rows = blocks.places[:, step]
        positions = batch.positions[:, rows]
        rotation, mask = network.rotation(positions), mask_of(batch, blocks, shape, step)
        seen = mask.any(-1)  # [B, 1, P]: the first token of a document has nothing before it
        hidden = network.embed(batch.tokens[:, rows], positions)
        activations = [hidden]
        for layer, own in zip(layers, known, strict=True):
            if mix is None:
                own.append(keys_and_values(layer, c, hidden, rotation))
            k, v = (torch.cat(parts, 1) for parts in zip(*own, strict=True))
            attended = attend(_queries(layer, c, hidden, rotation), k, v, mask | ~seen[..., None])
            hidden = finish(layer, c, hidden, attended * seen[:, 0, :, None])
            activations.append(hidden)
        said.append(network.final(hidden))
        if mix is not None and step + 1 < shape.depth:
            every = torch.stack(activations)  # [n + 1, B, P, d]
            for index, (layer, own) in enumerate(zip(layers, known, strict=True)):
                mixed = torch.einsum("l,lbpd->bpd", mix[index].to(every.dtype), every)
                own.append(keys_and_values(layer, c, mixed, rotation))
    return said
