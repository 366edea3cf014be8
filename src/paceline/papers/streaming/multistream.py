"""Train speculative streams over whole packed rows: what `passes` computes token by token, with gradients.

Main rows [B, T] run unchanged up to layer N - Ns. From there each carrier has gamma streams next to it: stream j of row
t attends to the main keys of its document up to t and to streams 1 .. j of the same row (eq. 2). In shared mode a
carrier attends to its own streams, too (eq. 3), and the adapters serve the main rows.

The reference, one dense attention, is with the studies (`studies/kit/dense_streams.py`). Shapes as in
`train.carriers`.

Source: Speculative Streaming, sections 2.1 and 2.4, appendix I.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ...train.carriers import CarrierRows, group_attention
from ...train.data import TokenBatch
from ...train.network import Delta, KeyValues, Network, Projected, Rotation, attend
from .model import StreamSet

# -- one layer


@dataclass(frozen=True, slots=True)
class StreamPass:
    """Describe what all layers of a pass of streams share."""

    network: Network
    trained: StreamSet
    carriers: CarrierRows
    rotation: Rotation  # of the stream rows' queries and keys [R, gamma, 1, dim]

    @property
    def delta(self) -> Delta | None:
        """Return the adapters."""
        return None if self.trained.adapters is None else self.trained.adapters.delta

    def layer(
        self, index: int, hidden: Tensor, k: Tensor, v: Tensor, q_main: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return layer ``index`` of streams.

        Args:
            hidden: [R, gamma, d].
            k, v: flat main keys and values.
            q_main: [R, H, D] queries of the carriers, where they attend to their streams (shared mode).

        Returns:
            [R, gamma, d]; and the carriers' attention [R, H * D] (of no rows in lossless mode).
        """
        net = self.network
        q, own_k, own_v = net.qkv(index, hidden, self.rotation, self.delta)  # [R, gamma, heads, D]
        extra = 0 if q_main is None else 1
        steps = torch.arange(1 - extra, hidden.shape[1] + 1, device=hidden.device)
        if q_main is not None:
            q = torch.cat((q_main[:, None], q), 1)
        attended = group_attention(q, (k, v), (own_k, own_v), self.carriers, steps, net.config.windows[index])
        # A linear layer multiplies rows one matrix a carrier where they lie separately, so they are brought together
        # first.
        rows = attended[:, extra:].contiguous()
        return net.finish_layer(index, hidden, rows, self.delta), attended[:, :extra].flatten(1)


def stream_pass(network: Network, trained: StreamSet, carriers: CarrierRows) -> StreamPass:
    """Return rotations of the streams of ``carriers``: stream j of a row at t is at position t + j."""
    steps = torch.arange(1, trained.config.gamma + 1, device=carriers.index.device)
    return StreamPass(network, trained, carriers, network.rotation(carriers.positions[:, None] + steps))


# -- lossless mode: main rows once, without gradients; then segments of streams


@dataclass(frozen=True, slots=True)
class MainPass:
    """Describe what the streams read from the main rows."""

    states: tuple[Tensor, ...]  # [B * T, d] M after layer N - Ns - 1 and after each MSA layer, before the final norm
    final: Tensor  # [B * T, d] after the final norm
    keys: tuple[KeyValues, ...]  # of each MSA layer


@torch.no_grad()
def main_pass(network: Network, batch: TokenBatch, insertion: int) -> MainPass:
    """Run the main rows of the frozen base model; ``insertion`` is N - Ns."""
    hidden, _ = network.run(network.embed(batch.tokens), 0, insertion, batch)
    projected: list[Projected] = []
    final, inputs = network.run(hidden, insertion, network.config.num_layers, batch, keep=projected)
    keys = tuple((k.flatten(0, 1), v.flatten(0, 1)) for _, k, v in projected)
    states = tuple(x.flatten(0, 1) for x in (*inputs, final))
    return MainPass(states, network.final(final).flatten(0, 1), keys)


def lossless_streams(
    network: Network, trained: StreamSet, main: MainPass, carriers: CarrierRows
) -> tuple[Tensor, list[Tensor]]:
    """Return streams of ``carriers`` over the main rows of `main_pass`.

    Returns:
        [R, gamma, d] after the final norm; and the states [R, gamma, d] at the start and after each layer.
    """
    run = stream_pass(network, trained, carriers)
    hidden = trained.begin(main.states[0][carriers.index])
    states = [hidden]
    for offset, (k, v) in enumerate(main.keys):
        hidden, _ = run.layer(trained.config.insertion + offset, hidden, k, v)
        states.append(hidden)
    return network.final(hidden), states


# -- shared mode: main rows and streams together, with gradients


@dataclass(frozen=True, slots=True)
class SharedPass:
    """Outputs of main rows and streams."""

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
) -> SharedPass:
    """Return main rows with adapters on all layers, carriers attending to their streams (eq. 3).

    Args:
        carriers: with streams, all rows that are generated: others would see what they do not see in decoding.
        segment: carriers whose streams are inside a layer at a time; their activations are then recomputed in the
            backward pass, and only states between layers are kept. None: all at once, and all is kept.
    """
    delta = None if trained.adapters is None else trained.adapters.delta
    config, layers = trained.config, network.config.num_layers
    start = config.insertion if config.gamma else layers
    hidden, _ = network.run(network.embed(batch.tokens), 0, start, batch, delta)
    states = [hidden.flatten(0, 1)]
    if not len(carriers) or not config.gamma:
        hidden, _ = network.run(hidden, start, layers, batch, delta)
        final = network.final(hidden).flatten(0, 1)
        return SharedPass(tuple(states), final, final.new_zeros(0, config.gamma, final.shape[1]), ())
    parts = list(carriers.segments(segment))
    passes = [stream_pass(network, trained, part) for part in parts]
    held = [[trained.begin(states[0][part.index])] for part in parts]  # states of each part
    rotation, masks = network.rotation(batch.positions), network.masks(batch, start)
    for index in range(start, layers):
        q, k, v = network.qkv(index, hidden, rotation, delta)
        attended = attend(q, k, v, masks[index]).flatten(0, 1)  # [B * T, H * D]
        flat = [x.flatten(0, 1) for x in (q, k, v)]
        for run, states_held in zip(passes, held, strict=True):
            inputs = (index, states_held[-1], flat[1], flat[2], flat[0][run.carriers.index])
            again = segment is not None
            state, seen = checkpoint(run.layer, *inputs, use_reentrant=False) if again else run.layer(*inputs)
            states_held.append(state)
            attended = attended.index_copy(0, run.carriers.index, seen.to(attended.dtype))
        hidden = network.finish_layer(index, hidden, attended.view(*hidden.shape[:2], -1), delta)
        states.append(hidden.flatten(0, 1))
    streams = [torch.cat(of_layer) for of_layer in zip(*held, strict=True)]
    finals = network.final(states[-1]), network.final(streams[-1])
    return SharedPass(tuple(states), *finals, tuple(streams))
