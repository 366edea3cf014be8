"""Streams in training as one dense attention: the reference for `train.multistream`, and the naive way to train."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.papers.streaming.model import StreamSet
from paceline.papers.streaming.recipe import StreamRecipe
from paceline.train.ahead import Aims
from paceline.train.data import TokenBatch
from paceline.train.multistream import CarrierRows, choose_carriers, sees_streams, stream_pass
from paceline.train.network import Network, attend


def eager_streams(
    network: Network,
    trained: StreamSet,
    batch: TokenBatch,
    carriers: CarrierRows,
    most: int | None = None,
    before: dict[int, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """One dense attention over main rows and streams of all carriers, T + R gamma rows: naive training.

    The reference that `lossless_streams` and `shared_pass` equal, in the mode of ``trained``.

    Args:
        before: is given the main rows [B * T, d] before every layer.

    Returns:
        main rows [B * T, d] and streams [R, gamma, d], after the final norm.
    """
    config, adapters = trained.config, trained.adapters
    shared = config.mode == "shared"
    on_main = adapters.delta if shared and adapters is not None else None
    hidden, below = network.run(network.embed(batch.tokens), 0, config.insertion, batch, on_main)
    main = hidden.flatten(0, 1)  # [B * T, d]
    seen_before = {layer: x.flatten(0, 1) for layer, x in enumerate(below)}
    count, gamma = len(main), config.gamma
    streams = trained.begin(main[carriers.index]).flatten(0, 1)  # [R * gamma, d]
    run = stream_pass(network, trained, carriers)
    steps = torch.arange(1, gamma + 1, device=main.device)
    places = torch.cat((batch.positions.flatten(), (carriers.positions[:, None] + steps).flatten()))
    rotations = network.rotation(places[:count]), network.rotation(places[count:])
    deltas = on_main, None if adapters is None else adapters.delta
    rows = [main, streams]
    seen = _dense_mask(batch, carriers, gamma, shared)
    for index in range(config.insertion, config.num_layers):
        seen_before[index] = rows[0]
        parts = [network.qkv(index, *part) for part in zip(rows, rotations, deltas, strict=True)]
        q, k, v = (torch.cat(part) for part in zip(*parts, strict=True))
        v = torch.cat((v[:count], run.rotated(v[count:].unflatten(0, (-1, gamma))).flatten(0, 1)))
        window = network.config.windows[index]
        mask = seen if window is None else seen & _near(places, count, window)
        if most is not None:
            mask = _few(q, k, mask, carriers, count, most)
        attended = attend(q[None], k[None], v[None], mask[None, None])[0].split([count, len(streams)])
        rows = [network.finish_layer(index, *part) for part in zip(rows, attended, deltas, strict=True)]
    if before is not None:
        before |= seen_before
    return network.final(rows[0]), network.final(rows[1]).unflatten(0, (-1, gamma))


def _dense_mask(batch: TokenBatch, carriers: CarrierRows, gamma: int, shared: bool) -> Tensor:
    """[rows, rows] bool over B * T main rows and R * gamma stream rows."""
    row = torch.arange(batch.tokens.numel(), device=batch.tokens.device) // batch.tokens.shape[1]
    document = row * (batch.documents.max() + 2) + batch.documents.flatten() + 1  # one number a document of a row
    order = torch.arange(len(document), device=row.device)
    owner = carriers.index.repeat_interleave(gamma)  # the main row of each stream row
    stream = torch.arange(1, gamma + 1, device=row.device).repeat(len(carriers))
    of = torch.cat((order, owner))
    step = torch.cat((torch.zeros_like(order), stream))
    on_main = (step == 0)[None] & (of[:, None] >= of[None]) & (document[of][:, None] == document[of][None])
    on_streams = sees_streams(of, step, of, step) & (step > 0)[None]
    return on_main | (on_streams if shared else on_streams & (step > 0)[:, None])


def _few(q: Tensor, k: Tensor, mask: Tensor, carriers: CarrierRows, count: int, most: int) -> Tensor:
    """[rows, rows] bool: ``mask``, streams without the main keys that their carriers' weights do not choose."""
    rows, size = carriers.index, len(mask)
    heads = [x.repeat_interleave(q.shape[1] // x.shape[1], 1).detach() for x in (q, k)]
    scores = torch.einsum("rhd,khd->hrk", heads[0][rows], heads[1]) * q.shape[2] ** -0.5
    weights = scores.masked_fill(~mask[rows], -torch.inf).softmax(-1).mean(0)[:, :count]
    weights = weights.masked_fill(~mask[rows, :count], -1.0).scatter(1, rows[:, None], torch.inf)
    best = torch.zeros_like(weights, dtype=torch.bool).scatter(1, weights.topk(min(most, count), 1).indices, True)
    chosen = torch.ones(size, size, dtype=torch.bool, device=q.device)
    chosen[count:, :count] = best.repeat_interleave((size - count) // max(1, len(rows)), 0)
    return mask & chosen


def _near(places: Tensor, count: int, window: int) -> Tensor:
    """[rows, rows] bool: main keys inside the window of each query; streams lie inside of it always."""
    near = places[:, None] - places[None] < window
    near[:, count:] = True
    return near


def eager_loss(recipe: StreamRecipe, batch: TokenBatch) -> Tensor:
    """The loss of a recipe through one dense attention per row of the batch: the reference for segments."""
    rows = [batch.rows(b, b + 1) for b in range(len(batch.tokens))]
    made = [(row, choose_carriers(row)) for row in rows]
    before: list[dict[int, Tensor]] = [{} for _ in made]
    most = recipe.options.attention_limit
    outputs = [
        eager_streams(recipe.network, recipe.module, row, carriers, most, kept)
        for (row, carriers), kept in zip(made, before, strict=True)
    ]
    carriers = choose_carriers(batch)
    aims = Aims.of(batch, carriers, recipe.module.config.gamma)
    final = torch.cat([main for main, _ in outputs])
    loss, _ = recipe._stream_loss(
        torch.cat([streams for _, streams in outputs]), aims, recipe._said(final.detach(), aims)
    )
    if recipe.options.factors[0]:
        loss = loss + recipe.options.factors[0] * recipe._main_loss(final, batch)
    joint = {layer: torch.cat([kept[layer] for kept in before]) for layer in before[0]}
    return loss + recipe._exit_loss(joint, carriers, aims)[0]
