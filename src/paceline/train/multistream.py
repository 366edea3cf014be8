"""Speculative streams with gradients, over whole packed rows: what `engine/draft_verify.py` computes token by token.

Main rows [B, T] run unchanged up to layer N - Ns. From there each *carrier*, a main row whose next token is
generated, has gamma streams beside it: stream j of row t attends to the main keys of its document up to t and to
streams 1 .. j of the same row (Speculative Streaming, eq. 2, `stream_sees`). In shared mode a carrier attends to its
own streams, too (eq. 3, `main_sees`), and the adapters serve the main rows.

Streams never see each other across rows. So their attention is not one of T (1 + gamma) rows by as many keys: it
is done document by document, the main keys once for all streams, and gamma keys more for each carrier. Carriers can
be cut into *segments* that are run one after the other (appendix I), so that memory is bounded by a segment.
The reference for this, one dense attention, lies with the studies (`studies/kit/dense_streams.py`).

Shapes: B rows, T tokens, R carriers, gamma streams, H heads, D head_dim, d d_model; "flat" is [B * T], of keys and
values [B * T, kv_heads, D].
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from ..papers.streaming.layer_rows import rotate_values, value_rotation
from ..papers.streaming.model import StreamSet
from ..papers.streaming.visibility import main_sees, stream_sees
from .data import TokenBatch
from .network import Delta, KeyValues, Network, Projected, Rotation, attend

# -- carriers: which main rows have streams


# Carriers of one document, as rows of a part's carriers, and the main rows that they may attend to, flat: from the
# document's first token to the block's last carrier.
Block = tuple[slice, slice]


@dataclass(frozen=True, slots=True)
class CarrierRows:
    """Main rows that carry streams, in order."""

    index: Tensor  # [R] int64 flat
    positions: Tensor  # [R] int64 within the document
    blocks: tuple[Block, ...]

    def __len__(self) -> int:
        return len(self.index)

    def segments(self, size: int | None) -> Iterator[CarrierRows]:
        """The carriers, at most ``size`` at a time; None: all at once."""
        step = max(1, len(self) if size is None else size)
        for start in range(0, len(self), step):
            stop = min(start + step, len(self))
            yield make_carriers(self.index[start:stop], self.positions[start:stop])


def generated(batch: TokenBatch) -> Tensor:
    """[B, T] bool: rows whose next token exists and is generated, not part of a prompt."""
    follows = torch.zeros_like(batch.documents, dtype=torch.bool)
    follows[:, :-1] = batch.documents[:, :-1] == batch.documents[:, 1:]
    return follows & (batch.documents >= 0) & (batch.positions >= batch.prompts - 1)


def choose_carriers(batch: TokenBatch, fraction: float = 1.0, generator: torch.Generator | None = None) -> CarrierRows:
    """All rows of `generated`, or a random ``fraction`` of them."""
    index = generated(batch).flatten().nonzero()[:, 0]
    if fraction < 1.0:
        count = max(1, round(fraction * len(index)))
        index = index[torch.randperm(len(index), generator=generator)[:count].sort().values.to(index.device)]
    return make_carriers(index, batch.positions.flatten()[index])


def make_carriers(index: Tensor, positions: Tensor) -> CarrierRows:
    """Carriers at ``index`` [R] flat, ascending, with ``positions`` [R]."""
    if not len(index):
        return CarrierRows(index, positions, ())
    starts = (index - positions).tolist()  # flat index of the document's first token
    last = index.tolist()
    cuts = [i for i in range(1, len(starts)) if starts[i] != starts[i - 1]]
    edges = zip([0, *cuts], [*cuts, len(starts)], strict=True)
    blocks = tuple((slice(a, b), slice(starts[a], last[b - 1] + 1)) for a, b in edges)
    return CarrierRows(index, positions, blocks)


# -- attention of a block


class _GroupAttention(torch.autograd.Function):
    """Attention of P carriers' G queries each over K keys that all share and gamma keys of the carrier's own.

    The scores of a block exist twice at most, in the forward pass and again in the backward pass; what is kept
    between them is the weights, in the dtype of the queries. Gradients of the shared keys are made only where wanted.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,  # [H, P, G, D]
        k: Tensor,  # [H, K, D]
        v: Tensor,  # [H, K, D]
        own_k: Tensor,  # [H, P, gamma, D]
        own_v: Tensor,  # [H, P, gamma, D]
        hidden_keys: Tensor,  # [P, 1 or G, K] bool: not to be seen
        hidden_own: Tensor,  # [G, gamma] bool
        scale: float,
    ) -> Tensor:  # [H, P, G, D]
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        far = torch.bmm(q.flatten(1, 2), k.mT).to(wide).unflatten(1, q.shape[1:3])
        far = far.mul_(scale).masked_fill_(hidden_keys, -torch.inf)  # [H, P, G, K]
        close = (q @ own_k.mT).to(wide).mul_(scale).masked_fill_(hidden_own, -torch.inf)  # [H, P, G, gamma]
        top = torch.maximum(far.amax(-1, keepdim=True), close.amax(-1, keepdim=True))
        far.sub_(top).exp_()
        close.sub_(top).exp_()
        total = far.sum(-1, keepdim=True) + close.sum(-1, keepdim=True)
        far, close = far.div_(total).to(q.dtype), close.div_(total).to(q.dtype)
        out = torch.bmm(far.flatten(1, 2), v).view_as(q) + close @ own_v
        ctx.save_for_backward(q, k, v, own_k, own_v, far, close, out)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, own_k, own_v, far, close, out = ctx.saved_tensors
        grad = grad.to(q.dtype).contiguous()
        mean = (grad * out).sum(-1, keepdim=True)  # [H, P, G, 1]
        slope = torch.bmm(grad.flatten(1, 2), v.mT).view_as(far)
        slope = slope.sub_(mean).mul_(far).mul_(ctx.scale)  # d loss / d scores
        near = (grad @ own_v.mT).sub_(mean).mul_(close).mul_(ctx.scale)
        by_q = torch.bmm(slope.flatten(1, 2), k).view_as(q) + near @ own_k
        needs = ctx.needs_input_grad
        by_k = torch.bmm(slope.flatten(1, 2).mT, q.flatten(1, 2)) if needs[1] else None
        by_v = torch.bmm(far.flatten(1, 2).mT, grad.flatten(1, 2)) if needs[2] else None
        return by_q, by_k, by_v, near.mT @ q, close.mT @ grad, None, None, None


def group_attention(
    q: Tensor,  # [R, G, H, D]
    main: KeyValues,
    own: KeyValues,  # [R, gamma, kv_heads, D]
    carriers: CarrierRows,
    steps: Tensor,  # [G] 0 a main row, j stream j
    window: int | None,
    chosen: Sequence[Tensor] | None = None,
) -> Tensor:  # [R, G, H * D]
    """Streams (and their main rows, in shared mode) over main keys, all that their carriers see or those ``chosen`` by
    `best_keys`, and their own streams."""
    sizes = [rows.stop - rows.start for rows, _ in carriers.blocks]
    parts = zip(*(_heads(x, q.shape[2]).split(sizes, 1) for x in (q, *own)), strict=True)
    shared = zip(*(_pieces(_heads(x, q.shape[2]), carriers.blocks) for x in main), strict=True)
    order = torch.arange(1, own[0].shape[1] + 1, device=q.device)
    hidden = ~sees_streams(steps * 0, steps, order * 0, order)  # within one carrier: all have the same owner
    outputs = []
    for place, ((rows, _), (queries, own_k, own_v), (k, v)) in enumerate(
        zip(carriers.blocks, parts, shared, strict=True)
    ):
        unseen = _unseen(carriers.positions[rows], steps, k.shape[1], window)
        if chosen is not None:
            unseen = unseen | ((steps > 0)[:, None] & ~chosen[place][:, None])  # [P, G, K]
        outputs.append(_GroupAttention.apply(queries, k, v, own_k, own_v, unseen, hidden, q.shape[3] ** -0.5))
    return torch.cat(outputs, 1).permute(1, 2, 0, 3).flatten(2)


def _pieces(x: Tensor, blocks: Sequence[Block]) -> Sequence[Tensor]:
    """The keys of each block [H, K, D] of all keys [H, flat, D]: cut at once, so that gradients are joined at once."""
    edges = [edge for _, keys in blocks for edge in (keys.start, keys.stop)]
    sizes = [b - a for a, b in zip([0, *edges], [*edges, x.shape[1]], strict=True)]
    return x.split(sizes, 1)[1::2]


@torch.no_grad()
def best_keys(
    q: Tensor,  # [R, H, D] of the carriers
    k: Tensor,  # flat main keys
    own_k: Tensor | None,  # [R, gamma, kv_heads, D] of their streams, where carriers attend to them
    carriers: CarrierRows,
    window: int | None,
    most: int,
) -> list[Tensor]:
    """Of each block [P, K] bool, the main keys that each carrier's streams may attend to (appendix H.1).

    They are those with the highest attention weights of the carrier, averaged over heads; its own is always among them.
    """
    chosen = []
    queries, keys = _heads(q, q.shape[1]), _heads(k, q.shape[1])  # [H, R, D], [H, B * T, D]
    own = None if own_k is None else _heads(own_k, q.shape[1])  # [H, R, gamma, D]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    for rows, seen in carriers.blocks:
        places = carriers.positions[rows, None]
        scores = (queries[:, rows] @ keys[:, seen].mT).to(wide)  # [H, P, K]
        count = scores.shape[2]
        unseen = _unseen(places[:, 0], places.new_zeros(1), count, window)[:, 0]  # [P, K]
        scores = scores.masked_fill(unseen, -torch.inf)
        if own is not None:
            scores = torch.cat((scores, (own[:, rows] @ queries[:, rows, :, None])[..., 0].to(wide)), -1)
        weights = scores.mul_(q.shape[2] ** -0.5).softmax(-1)[..., :count].mean(0)
        best = weights.scatter(1, places, torch.inf).topk(min(most, count), dim=1).indices
        chosen.append(torch.zeros_like(unseen).scatter(1, best, True))
    return chosen


def sees_streams(owner: Tensor, step: Tensor, key_owner: Tensor, key_stream: Tensor) -> Tensor:
    """[queries, keys] bool: streams by eq. 2; carriers, which have step 0, by eq. 3."""
    streams = stream_sees(owner, step, key_owner, key_stream)
    return torch.where(step[:, None] > 0, streams, main_sees(owner, key_owner))


def _unseen(positions: Tensor, steps: Tensor, keys: int, window: int | None) -> Tensor:
    """[P, 1 or G, keys] bool: keys after the carrier, or outside of the window of the query's own position."""
    places = torch.arange(keys, device=positions.device)
    later = (places > positions[:, None])[:, None]
    if window is None:
        return later
    return later | (places <= (positions[:, None] + steps - window)[..., None])


def _heads(x: Tensor, heads: int) -> Tensor:
    """Heads first, each key head as often as it is used: [..., kv_heads, D] -> [heads, ..., D]."""
    first = x.movedim(-2, 0)
    repeat = heads // first.shape[0]
    return (first if repeat == 1 else first.repeat_interleave(repeat, 0)).contiguous()


# -- one layer


@dataclass(frozen=True, slots=True)
class StreamPass:
    """What all layers of a pass of streams share."""

    network: Network
    trained: StreamSet
    carriers: CarrierRows
    rotation: Rotation  # of the stream rows' queries and keys [R, gamma, 1, dim]
    of_values: tuple[Tensor, Tensor] | None  # their `value_rotation` [gamma, 1, 1]
    most: int | None = None  # main keys that a stream attends to; None: all that its carrier sees

    @property
    def delta(self) -> Delta | None:
        """The adapters."""
        return None if self.trained.adapters is None else self.trained.adapters.delta

    def rotated(self, values: Tensor) -> Tensor:
        """Values of streams [R, gamma, kv_heads, D], rotated where the set rotates them."""
        return values if self.of_values is None else rotate_values(values, self.of_values)

    def layer(
        self, index: int, hidden: Tensor, k: Tensor, v: Tensor, q_main: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Layer ``index`` of streams.

        Args:
            hidden: [R, gamma, d].
            k, v: flat main keys and values.
            q_main: [R, H, D] queries of the carriers, where they attend to their streams (shared mode) or choose keys.

        Returns:
            [R, gamma, d]; and the carriers' attention [R, H * D] (of no rows in lossless mode).
        """
        net = self.network
        q, own_k, own_v = net.qkv(index, hidden, self.rotation, self.delta)  # [R, gamma, heads, D]
        own_v = self.rotated(own_v)
        window, shared = net.config.windows[index], self.trained.config.mode == "shared"
        extra = 1 if shared else 0
        steps = torch.arange(1 - extra, hidden.shape[1] + 1, device=hidden.device)
        chosen = None
        if q_main is not None and self.most is not None:
            chosen = best_keys(q_main, k, own_k if shared else None, self.carriers, window, self.most)
        if q_main is not None and shared:
            q = torch.cat((q_main[:, None], q), 1)
        attended = group_attention(q, (k, v), (own_k, own_v), self.carriers, steps, window, chosen)
        # A linear layer multiplies rows one matrix a carrier where they lie apart, so they are brought together first.
        rows = attended[:, extra:].contiguous()
        return net.finish_layer(index, hidden, rows, self.delta), attended[:, :extra].flatten(1)


def stream_pass(network: Network, trained: StreamSet, carriers: CarrierRows, most: int | None = None) -> StreamPass:
    """Rotations of the streams of ``carriers``: stream j of a row at t is at position t + j."""
    gamma, angle = trained.config.gamma, trained.config.value_rotation
    steps = torch.arange(1, gamma + 1, device=carriers.index.device)
    values = None if angle is None else value_rotation(steps, angle, network.head_weight.dtype)
    return StreamPass(network, trained, carriers, network.rotation(carriers.positions[:, None] + steps), values, most)


# -- lossless mode: main rows once, without gradients; then segments of streams


@dataclass(frozen=True, slots=True)
class MainPass:
    """What the streams read from the main rows."""

    before: dict[int, Tensor]  # [B * T, d] M before layer N - Ns and each later one, and those below that were named
    states: tuple[Tensor, ...]  # [B * T, d] M after layer N - Ns - 1 and after each MSA layer, before the final norm
    final: Tensor  # [B * T, d] after the final norm
    keys: tuple[KeyValues, ...]  # of each MSA layer
    queries: tuple[Tensor, ...]  # [B * T, H, D] of each MSA layer


@torch.no_grad()
def main_pass(network: Network, batch: TokenBatch, insertion: int, exits: Collection[int] = ()) -> MainPass:
    """Main rows of the frozen base model; ``insertion`` is N - Ns, ``exits`` are layers before which states are kept,
    below that one."""
    hidden, below = network.run(network.embed(batch.tokens), 0, insertion, batch)
    kept: list[Projected] = []
    final, inputs = network.run(hidden, insertion, network.config.num_layers, batch, keep=kept)
    keys = tuple((k.flatten(0, 1), v.flatten(0, 1)) for _, k, v in kept)
    states = tuple(x.flatten(0, 1) for x in (*inputs, final))
    queries = tuple(q.flatten(0, 1) for q, _, _ in kept)
    before = _before(below, exits) | dict(enumerate(states[:-1], insertion))
    return MainPass(before, states, network.final(final).flatten(0, 1), keys, queries)


def _before(inputs: Sequence[Tensor], layers: Collection[int]) -> dict[int, Tensor]:
    """[B * T, d] inputs of some of the first layers."""
    return {layer: x.flatten(0, 1) for layer, x in enumerate(inputs) if layer in layers}


def lossless_streams(
    network: Network, trained: StreamSet, main: MainPass, carriers: CarrierRows, most: int | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Streams of ``carriers`` over the main rows of `main_pass`.

    Args:
        most: main keys that a stream attends to; see `best_keys`. None: all.

    Returns:
        [R, gamma, d] after the final norm; and the states [R, gamma, d] at the start and after each layer.
    """
    run = stream_pass(network, trained, carriers, most)
    hidden = trained.begin(main.states[0][carriers.index])
    states = [hidden]
    for offset, (k, v) in enumerate(main.keys):
        q = None if most is None else main.queries[offset][carriers.index]
        hidden, _ = run.layer(trained.config.insertion + offset, hidden, k, v, q)
        states.append(hidden)
    return network.final(hidden), states


# -- shared mode: main rows and streams together, with gradients


@dataclass(frozen=True, slots=True)
class SharedPass:
    """Outputs of main rows and streams."""

    before: dict[int, Tensor]  # [B * T, d] M before layer N - Ns and each later one, and those below that were named
    states: tuple[Tensor, ...]  # [B * T, d] main rows after layer N - Ns - 1 and after each MSA layer
    final: Tensor  # [B * T, d] main rows, after the final norm
    streams: Tensor  # [R, gamma, d] after the final norm
    stream_states: tuple[Tensor, ...]  # [R, gamma, d] at the start and after each MSA layer


def shared_pass(
    network: Network,
    trained: StreamSet,
    batch: TokenBatch,
    carriers: CarrierRows,
    segment: int | None = None,
    most: int | None = None,
    exits: Collection[int] = (),
) -> SharedPass:
    """Main rows with adapters on all layers, carriers attending to their streams (eq. 3).

    Args:
        carriers: with streams, all rows of `generated`: others would see what they do not see in decoding.
        segment: carriers whose streams are inside a layer at a time; their activations are then recomputed in the
            backward pass, and only states between layers are kept. None: all at once, and all is kept.
        most, exits: as for `lossless_streams` and `main_pass`.
    """
    delta = None if trained.adapters is None else trained.adapters.delta
    config, layers = trained.config, network.config.num_layers
    start = config.insertion if config.gamma else layers
    hidden, below = network.run(network.embed(batch.tokens), 0, start, batch, delta)
    states, before = [hidden.flatten(0, 1)], _before(below, exits)
    if not len(carriers) or not config.gamma:
        hidden, _ = network.run(hidden, start, layers, batch, delta)
        final = network.final(hidden).flatten(0, 1)
        return SharedPass(before, tuple(states), final, final.new_zeros(0, config.gamma, final.shape[1]), ())
    parts = list(carriers.segments(segment))
    passes = [stream_pass(network, trained, part, most) for part in parts]
    held = [[trained.begin(states[0][part.index])] for part in parts]  # states of each part
    rotation, masks = network.rotation(batch.positions), network.masks(batch, start)
    for index in range(start, layers):
        q, k, v = network.qkv(index, hidden, rotation, delta)
        attended = attend(q, k, v, masks[index]).flatten(0, 1)  # [B * T, H * D]
        flat = [x.flatten(0, 1) for x in (q, k, v)]
        for run, own in zip(passes, held, strict=True):
            inputs = (index, own[-1], flat[1], flat[2], flat[0][run.carriers.index])
            again = segment is not None
            state, seen = checkpoint(run.layer, *inputs, use_reentrant=False) if again else run.layer(*inputs)
            own.append(state)
            attended = attended.index_copy(0, run.carriers.index, seen.to(attended.dtype))
        hidden = network.finish_layer(index, hidden, attended.view(*hidden.shape[:2], -1), delta)
        states.append(hidden.flatten(0, 1))
    streams = [torch.cat(of_layer) for of_layer in zip(*held, strict=True)]
    before |= dict(enumerate(states[:-1], start))
    finals = network.final(states[-1]), network.final(streams[-1])
    return SharedPass(before, tuple(states), *finals, tuple(streams))
