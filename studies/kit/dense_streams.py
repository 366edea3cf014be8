"""Train streams by one dense attention: the reference for `papers/streaming/multistream.py`, and the naive way."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.papers.streaming.ahead import Aims
from paceline.papers.streaming.model import StreamSet
from paceline.papers.streaming.recipe import StreamRecipe
from paceline.papers.streaming.visibility import main_sees, stream_sees
from paceline.train.carriers import CarrierRows, choose_carriers
from paceline.train.data import TokenBatch
from paceline.train.network import Network, attend


def eager_streams(
    network: Network,
    trained: StreamSet,
    batch: TokenBatch,
    carriers: CarrierRows,
) -> tuple[Tensor, Tensor, Tensor]:
    """One dense attention over main rows and streams of all carriers, T + R gamma rows: naive training.

    The reference that `lossless_streams` and `shared_pass` equal, in the mode of ``trained``.

    Returns:
        main rows [B * T, d] and streams [R, gamma, d], after the final norm; main rows where streams begin.
    """
    config, adapters = trained.config, trained.adapters
    shared = config.mode == "shared"
    on_main = adapters.delta if shared and adapters is not None else None
    hidden, _ = network.run(network.embed(batch.tokens), 0, config.insertion, batch, on_main)
    main = hidden.flatten(0, 1)  # [B * T, d]
    count, gamma = len(main), config.gamma
    streams = trained.begin(main[carriers.index]).flatten(0, 1)  # [R * gamma, d]
    steps = torch.arange(1, gamma + 1, device=main.device)
    places = torch.cat((batch.positions.flatten(), (carriers.positions[:, None] + steps).flatten()))
    rotations = network.rotation(places[:count]), network.rotation(places[count:])
    deltas = on_main, None if adapters is None else adapters.delta
    rows = [main, streams]
    seen = _dense_mask(batch, carriers, gamma, shared)
    for index in range(config.insertion, config.num_layers):
        parts = [network.qkv(index, *part) for part in zip(rows, rotations, deltas, strict=True)]
        q, k, v = (torch.cat(part) for part in zip(*parts, strict=True))
        window = network.config.windows[index]
        mask = seen if window is None else seen & _near(places, count, window)
        attended = attend(q[None], k[None], v[None], mask[None, None])[0].split([count, len(streams)])
        rows = [network.finish_layer(index, *part) for part in zip(rows, attended, deltas, strict=True)]
    return network.final(rows[0]), network.final(rows[1]).unflatten(0, (-1, gamma)), main


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
    on_streams = torch.where(step[:, None] > 0, stream_sees(of, step, of, step), main_sees(of, of)) & (step > 0)[None]
    return on_main | (on_streams if shared else on_streams & (step > 0)[:, None])


def _near(places: Tensor, count: int, window: int) -> Tensor:
    """[rows, rows] bool: main keys inside the window of each query; streams lie inside of it always."""
    near = places[:, None] - places[None] < window
    near[:, count:] = True
    return near


def eager_loss(recipe: StreamRecipe, batch: TokenBatch) -> Tensor:
    """The loss of a recipe through one dense attention per row of the batch: the reference for segments."""
    rows = [batch.rows(b, b + 1) for b in range(len(batch.tokens))]
    made = [(row, choose_carriers(row)) for row in rows]
    outputs = [eager_streams(recipe.network, recipe.module, row, carriers) for row, carriers in made]
    carriers = choose_carriers(batch)
    aims = Aims.of(batch, carriers, recipe.module.config.gamma)
    final, streams, before = (torch.cat(part) for part in zip(*outputs, strict=True))
    loss, _ = recipe._stream_loss(streams, aims, recipe._said(final.detach(), aims))
    if recipe.options.factors[0]:
        loss = loss + recipe.options.factors[0] * recipe._main_loss(final, batch)
    return loss + recipe._exit_loss(before, carriers, aims)[0]
