"""Medusa's heads for tiny targets: random ones, and taught ones, whose drafts are accepted now and then."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kits.tiny import assemble, run, tiny_config, tiny_decoder
from paceline.core.sampling import SamplingParams
from paceline.draft.medusa import MedusaConfig, MedusaDrafter
from paceline.draft.medusa.heads import Heads, HeadsConfig
from paceline.kv.pool import KVPool
from paceline.model.attention.base import Segment
from paceline.model.base import Batch, Taps
from paceline.model.decoder import Decoder
from paceline.model.families import DecoderConfig

HEADS = 3


def states(decoder: Decoder, tokens: Sequence[int], layers: tuple[int, ...] = (-1,)) -> dict[int, Tensor]:
    """[tokens, d_model] after some layers, computed in one causal pass."""
    count = len(tokens)
    cache = KVPool(*decoder.cache_shape, count, decoder.dtype, decoder.device)
    places, taps, whole = torch.arange(count), Taps(layers), slice(0, count)
    segment = Segment(0, count, whole, count, 0, None, None)
    batch = Batch(torch.tensor(tokens), places, whole, decoder.plan([segment], places))
    with torch.inference_mode():
        decoder.run_layers(decoder.embed(batch), 0, decoder.num_layers, cache, taps)
    return taps.hidden


def random_heads(config: DecoderConfig | None = None, *, own: bool = False, size: float = 1.0, **shape: Any) -> Heads:
    """Heads that say anything."""
    config = config or tiny_config()
    values: dict[str, Any] = {"heads": HEADS, "d_model": config.d_model, "vocab_size": config.vocab_size, "own": own}
    heads = Heads(HeadsConfig(**values | shape), torch.float64)
    draw = torch.Generator().manual_seed(4)
    for parameter in heads.parameters():
        value = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
        parameter.data.copy_(size * parameter.shape[-1] ** -0.5 * value)
    return heads.requires_grad_(False)


@cache
def taught_heads(config: DecoderConfig | None = None, prompts: tuple[tuple[int, ...], ...] = ()) -> Heads:
    """Heads with output heads of their own, fitted by least squares to what the target says after these prompts and
    random ones, and calibrated on it."""
    config = config or tiny_config()
    decoder, draw = tiny_decoder(config), random.Random(3)
    asked = [*prompts, *([draw.randrange(config.vocab_size) for _ in range(draw.randint(1, 20))] for _ in range(12))]
    rules = [SamplingParams(temperature=t, seed=11, max_tokens=24, ignore_eos=True) for t in (0, 0.7)]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors this small are slower with more
    outputs = run(assemble(decoder=decoder, texts=None), [(prompt, rule) for prompt in asked for rule in rules])
    torch.set_num_threads(threads)
    rows: list[Tensor] = []
    wanted: list[list[int]] = []
    for output in outputs:
        begin, text = len(output.prompt_token_ids), [*output.prompt_token_ids, *output.outputs[0].token_ids]
        last = len(text) - HEADS - 1  # the last row all of whose heads have something to hit
        rows.append(decoder.handle().final(states(decoder, text)[-1])[begin - 1 : last])
        wanted += [text[t + 2 : t + 2 + HEADS] for t in range(begin - 1, last)]
    x, y = torch.cat(rows).double(), torch.tensor(wanted)  # [rows, d_model], [rows, HEADS]
    own = [_fit(x, y[:, j], config.vocab_size) for j in range(HEADS)]
    hits = [(x @ w.T).topk(8).indices == y[:, j, None] for j, w in enumerate(own)]
    rates = tuple(tuple(hit.double().mean(0).tolist()) for hit in hits)
    shape = {"heads": HEADS, "d_model": config.d_model, "vocab_size": config.vocab_size}
    heads = Heads(HeadsConfig(**shape, own=True, accuracies=rates), torch.float64)
    assert heads.weight is not None and heads.own is not None
    heads.weight.data.zero_()
    heads.bias.data.zero_()
    heads.own.data.copy_(torch.stack(own))
    return heads.requires_grad_(False)


def _fit(x: Tensor, y: Tensor, vocab: int, scale: float = 12.0) -> Tensor:
    """[vocab, d] of the linear map from states to tokens with the least squares, ridged."""
    square = x.T @ x + 1e-2 * len(x) * torch.eye(x.shape[1], dtype=x.dtype)
    aims = torch.nn.functional.one_hot(y, vocab).to(x.dtype)
    return scale * torch.linalg.solve(square, x.T @ (aims - aims.mean(0))).T


def medusa(heads: Heads, dtype: torch.dtype = torch.float64, **options: Any) -> MedusaDrafter:
    """A `MedusaDrafter` over these heads."""
    made = Heads(heads.config, dtype)
    made.load_state_dict({name: value.to(dtype) for name, value in heads.state_dict().items()})
    return MedusaDrafter(MedusaConfig(path="tiny", **options), made.requires_grad_(False))
