"""Drafters of states for the tiny target: fitted to it by least squares, so that they are right now and then.

The layer passes its input on (its attention and MLP add little), and the fusing map is the linear one that predicts the
target's next state best. Token-info is what a token says about the target's logits after it, fitted likewise.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from kits.tiny import tiny_config, tiny_decoder
from paceline.draft.eagle.drafter import EagleConfig, EagleDrafter
from paceline.draft.eagle.model import EagleFacts, EagleModel
from paceline.draft.states.head import StateHead, layer_json
from paceline.kv.pool import KVPool
from paceline.model.attention.base import Segment
from paceline.model.base import Batch, Taps
from paceline.model.decoder import Decoder
from paceline.model.families import DecoderConfig
from paceline.papers.lyanna.drafter import LyannaConfig, LyannaDrafter
from paceline.papers.lyanna.model import LyannaModel, LyannaShape
from paceline.train.network import finish, project, rotate

TEXTS, LENGTH = 4, 400
RANK = 12


def states_of(decoder: Decoder, tokens: list[int], raw: bool = False) -> Tensor:
    """[tokens, d] the target's last states, behind the final norm; raw: before it."""
    state = taps_of(decoder, tokens)[decoder.num_layers - 1]
    return state if raw else decoder.handle().final(state)


def taps_of(decoder: Decoder, tokens: list[int]) -> dict[int, Tensor]:
    """[tokens, d] the target's states behind every layer."""
    count = len(tokens)
    cache_ = KVPool(*decoder.cache_shape, count, decoder.dtype, decoder.device)
    places, whole = torch.arange(count), slice(0, count)
    plan = decoder.plan([Segment(0, count, whole, count, 0, None, None)], places)
    batch = Batch(torch.tensor(tokens), places, whole, plan)
    taps = Taps(tuple(range(decoder.num_layers)))
    decoder.run_layers(decoder.embed(batch), 0, decoder.num_layers, cache_, taps)
    return taps.hidden


@cache
def fit(config: DecoderConfig | None = None) -> tuple[DecoderConfig, Tensor, Tensor, Tensor]:
    """The target's config, the map [2d, d] from token and state to the next state, and token-info's factors."""
    config = config or tiny_config()
    with torch.inference_mode():
        decoder = tiny_decoder(config)
        draw, inputs, states = torch.Generator().manual_seed(0), [], []
        for _ in range(TEXTS):
            tokens = torch.randint(0, config.vocab_size, (LENGTH,), generator=draw)
            found = states_of(decoder, tokens.tolist())
            inputs.append(torch.cat((decoder.embedding[tokens[1:]], found[:-1]), 1))
            states.append(found[1:])
        x, y = torch.cat(inputs), torch.cat(states)
        logits = decoder.handle().logits(y, normed=True)
        embedded = x[:, : config.d_model]
        left, size, right = torch.linalg.svd(_solve(embedded, logits - logits.mean(0)), full_matrices=False)
        return config, _solve(x, y), left[:, :RANK] * size[:RANK], right[:RANK]


def _solve(x: Tensor, y: Tensor) -> Tensor:
    """[inputs, outputs] the least-squares map."""
    return torch.linalg.solve(x.T @ x + 1e-2 * torch.eye(x.shape[1], dtype=x.dtype), x.T @ y)


@torch.no_grad()
def _fill(head: StateHead, config: DecoderConfig | None) -> None:
    head.start(torch.Generator().manual_seed(7))
    head.fc.weight.copy_(fit(config)[1].T)


def eagle_model(config: DecoderConfig | None = None) -> EagleModel:
    made = EagleModel(layer_json(fit(config)[0]), EagleFacts(steps=3), dtype=torch.float64)
    _fill(made.head, config)
    return made


def lyanna_model(config: DecoderConfig | None = None, **shape: Any) -> LyannaModel:
    known, _, down, up = fit(config)
    values: dict[str, Any] = {"layer": layer_json(known), "rank": RANK}
    made = LyannaModel(LyannaShape(**values | shape), dtype=torch.float64)
    _fill(made.head, config)
    if made.info is not None:
        with torch.no_grad():
            made.info.down.copy_(down)
            made.info.up.copy_(up)
            made.info.gain.fill_(1.5)
    return made


def lyanna(*, config: DecoderConfig | None = None, model: LyannaModel | None = None, **options: Any) -> LyannaDrafter:
    """A `LyannaDrafter` for `tiny_decoder`.

    Args:
        config: of the target.
        model: the trained drafter; default: a fitted one.
        options: of `LyannaConfig`.
    """
    return LyannaDrafter(
        LyannaConfig(**{"path": "tiny", "width": 10, "nodes": 40} | options), model or lyanna_model(config)
    )


def eagle(*, config: DecoderConfig | None = None, model: EagleModel | None = None, **options: Any) -> EagleDrafter:
    """An `EagleDrafter` for `tiny_decoder`; arguments as for `lyanna`."""
    return EagleDrafter(EagleConfig(**{"path": "tiny", "topk": 8, "nodes": 40} | options), model or eagle_model(config))


def steps_by_hand(model: Any, features: Tensor, tokens: Tensor, anchor: int, steps: int, table: Tensor) -> list[Tensor]:
    """What a drafter does after the row ``anchor`` of a text, one row at a time: keys of the true rows, then its
    own."""
    head, c, keys, values = model.head, model.head.config, [], []

    def row(fed: Tensor, position: int) -> Tensor:
        cos, sin = head.rope.rows(torch.tensor([position]))
        q, k, v = project(head.layer, c, fed[None], None)
        keys.append(rotate(k, (cos, sin))[0])
        values.append(v[0])
        q = rotate(q, (cos, sin))[0].view(c.num_kv_heads, -1, c.head_dim)  # [kv_heads, group, head_dim]
        scores = torch.einsum("kgd,tkd->kgt", q, torch.stack(keys)) * c.head_dim**-0.5
        mixed = torch.einsum("kgt,tkd->kgd", scores.softmax(-1), torch.stack(values))
        return finish(head.layer, c, fed[None], mixed.reshape(1, -1))[0]

    state = torch.empty(0)
    for place in range(anchor + 1):
        following = table[tokens[place + 1]] if model.reads_tokens else None
        state = row(head.fuse(features[place], following), place)
    found = [state]
    for step in range(2, steps + 1):
        token = table[tokens[anchor + step]] if anchor + step < len(tokens) else table[tokens[anchor]]
        fed = head.fuse(state[None], token[None] if model.feeds_tokens else None)
        state = row(fed[0], anchor + step - 1)
        found.append(state)
    return found


def algorithm_1(logits: Tensor, table: Tensor, root: int, branches: int) -> dict[tuple[int, ...], float]:
    """Algorithm 1 as it is printed: path -> joint probability."""
    tree: dict[tuple[int, ...], float] = {}
    queue: list[tuple[int, ...]] = [()]
    for level in logits:
        following = []
        for path in queue:
            parent = path[-1] if path else root
            q = (level + table[parent]).softmax(-1)
            for token in q.topk(branches).indices.tolist():
                tree[(*path, token)] = tree.get(path, 1.0) * float(q[token])
                following.append((*path, token))
        queue = sorted(following, key=lambda path: -tree[path])[:branches]
    return tree
