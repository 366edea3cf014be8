"""Every family against transformers on random tiny checkpoints: logits and layer ranges."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from checkpoints import CONTEXT, MAKERS, VOCAB, build
from torch import Tensor

from paceline.model.attention.base import Segment
from paceline.model.attention.reference import ReferenceAttention
from paceline.model.base import Batch, ForwardState, Taps
from paceline.model.decoder import Decoder
from paceline.weights.loader import load_model
from paceline.weights.source import resolve


class Cache:
    """K and V of one sequence, position = slot."""

    def __init__(self, decoder: Decoder) -> None:
        c = decoder.config
        shape = (c.num_kv_heads, CONTEXT, c.head_dim)
        self.k = [torch.zeros(shape, dtype=decoder.dtype) for _ in range(c.num_layers)]
        self.v = [torch.zeros(shape, dtype=decoder.dtype) for _ in range(c.num_layers)]


class Pair(NamedTuple):
    reference: Any
    decoder: Decoder


@pytest.fixture(scope="module", params=sorted(MAKERS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp(request.param)
    reference = build(request.param, folder, seed=1)
    return Pair(reference, load_model(resolve(folder, "float32"), attention=ReferenceAttention()))


def start(decoder: Decoder, tokens: list[int], first: int, slots_as_tensor: bool = False) -> ForwardState:
    """The state of ``tokens`` at positions first, first + 1, ... of the only sequence."""
    stop = first + len(tokens)
    positions = torch.arange(first, stop)
    segment = Segment(0, len(tokens), slice(0, stop), stop, first, None, None)
    plan = decoder.attention.plan([segment], positions, decoder.windows)
    slots = positions if slots_as_tensor else slice(first, stop)
    return decoder.embed(Batch(torch.tensor(tokens), positions, slots, plan))


@torch.inference_mode()
def logits(decoder: Decoder, cache: Cache, tokens: list[int], first: int = 0) -> Tensor:
    state = decoder.run_layers(start(decoder, tokens, first), 0, decoder.num_layers, cache)
    return decoder.logits(state)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed + length)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()


def test_logits_equal_those_of_transformers(pair: Pair):
    prompt = prompt_of(300)
    with torch.inference_mode():
        expected = pair.reference(torch.tensor([prompt])).logits[0]
    ours = logits(pair.decoder, Cache(pair.decoder), prompt)
    assert ours.dtype == torch.float32
    assert expected.std() > 0.5  # the weights are scaled so that there is something to compare
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


def test_a_wrong_position_would_show(pair: Pair):
    """The comparison above can fail: shifted by one position, the logits differ."""
    prompt = prompt_of(60)
    right = logits(pair.decoder, Cache(pair.decoder), prompt)
    shifted = start(pair.decoder, prompt, 0)
    shifted.rope.clear()
    state = start(pair.decoder, prompt, 0)
    moved = torch.arange(len(prompt)) * 2
    batch = Batch(torch.tensor(prompt), moved, state.slots, state.attn)
    with torch.inference_mode():
        state = pair.decoder.embed(batch)
        state = pair.decoder.run_layers(state, 0, pair.decoder.num_layers, Cache(pair.decoder))
        wrong = pair.decoder.logits(state)
    assert (wrong - right).abs().max() > 1e-2


@pytest.mark.parametrize(
    "pair", ["gemma3", "gemma3-scaled", "mistral", "phi3", "phi3-longrope", "qwen2"], indirect=True
)
def test_windows_matter(pair: Pair):
    """Where a family slides, the window hides keys at the lengths that are tested."""
    assert pair.decoder.windows != {None}
    prompt = prompt_of(60)
    state = start(pair.decoder, prompt, 0)
    full = [None] * pair.decoder.num_layers
    kept = [layer.window for layer in pair.decoder._run]
    with torch.inference_mode():
        state.attn = pair.decoder.attention.plan(state.attn.segments, state.positions, frozenset({None}))
        for layer, window in zip(pair.decoder._run, full, strict=True):
            layer.window = window
        wrong = pair.decoder.logits(pair.decoder.run_layers(state, 0, pair.decoder.num_layers, Cache(pair.decoder)))
    for layer, kept_window in zip(pair.decoder._run, kept, strict=True):
        layer.window = kept_window
    assert (wrong - logits(pair.decoder, Cache(pair.decoder), prompt)).abs().max() > 1e-2


@torch.inference_mode()
def test_layer_ranges_compose_bit_for_bit(pair: Pair):
    decoder, prompt = pair.decoder, prompt_of(33)
    whole = decoder.run_layers(start(decoder, prompt, 0), 0, decoder.num_layers, Cache(decoder)).hidden
    for cut in range(decoder.num_layers + 1):
        cache = Cache(decoder)
        state = decoder.run_layers(start(decoder, prompt, 0), 0, cut, cache)
        state = decoder.run_layers(state, cut, decoder.num_layers, cache)
        assert torch.equal(state.hidden, whole), f"cut at layer {cut}"


@torch.inference_mode()
def test_taps_are_the_hidden_states_after_the_layers_named(pair: Pair):
    decoder, prompt = pair.decoder, prompt_of(21)
    taps = Taps(layers=(0, 1, -1))
    state = decoder.run_layers(start(decoder, prompt, 0), 0, decoder.num_layers, Cache(decoder), taps)
    for layer in (0, 1):
        alone = decoder.run_layers(start(decoder, prompt, 0), 0, layer + 1, Cache(decoder)).hidden
        assert torch.equal(taps.hidden[layer], alone)
    assert torch.equal(taps.hidden[-1], state.hidden)
    assert not torch.equal(taps.hidden[0], taps.hidden[1])


@torch.inference_mode()
def test_logits_of_named_rows_and_scattered_slots(pair: Pair):
    decoder, prompt = pair.decoder, prompt_of(20)
    every = logits(decoder, Cache(decoder), prompt)
    cache = Cache(decoder)
    state = start(decoder, prompt, 0, slots_as_tensor=True)
    rows = torch.tensor([19, 3])
    some = decoder.logits(decoder.run_layers(state, 0, decoder.num_layers, cache), rows)
    torch.testing.assert_close(some, every[rows], atol=1e-5, rtol=1e-5)
    assert decoder.logits(state, rows[:0]).shape == (0, VOCAB)


def test_float64_is_float64_throughout(tmp_path: Path):
    """The oracle: no step of it may round to float32, so chunking changes nothing above 1e-12."""
    for family in ("llama3", "phi3", "llama-biased", "qwen3", "gemma3", "smollm3"):
        build(family, tmp_path / family, seed=2)
        decoder = load_model(resolve(tmp_path / family, "float64"), attention=ReferenceAttention())
        prompt = prompt_of(90)
        whole = logits(decoder, Cache(decoder), prompt)
        cache = Cache(decoder)
        pieces = [logits(decoder, cache, prompt[a : a + 9], a) for a in range(0, 90, 9)]
        assert whole.dtype == torch.float64
        torch.testing.assert_close(torch.cat(pieces), whole, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64", "int8"])
@pytest.mark.parametrize("family", ["llama3", "qwen3", "llama-biased", "gemma3"])
@torch.inference_mode()
def test_exact_bits_do_not_depend_on_the_width(family: str, dtype: str, tmp_path: Path):
    """All but attention: a pass over many one-token sequences against a pass over each alone."""
    build(family, tmp_path, seed=3)
    decoder = load_model(resolve(tmp_path, dtype), attention=_SelfAttention(), exact=True)
    tokens = torch.tensor(prompt_of(64))
    positions = torch.arange(64) % 7
    alone = torch.cat([_independent(decoder, tokens[i : i + 1], positions[i : i + 1]) for i in range(64)])
    for width in (2, 3, 4, 5, 8, 13, 31, 32, 33, 48, 64):
        for first in {0, 64 - width}:
            rows = slice(first, first + width)
            assert torch.equal(_independent(decoder, tokens[rows], positions[rows]), alone[rows]), f"{width} rows"


class _SelfAttention:
    """Every row attends to itself alone: the attention whose bits cannot depend on the width."""

    name = "self"

    def plan(self, segments: Any, positions: Tensor, windows: Any) -> None:
        return None

    def attend(self, plan: Any, query: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float, window: Any) -> Tensor:
        rows, heads = query.shape[:2]
        value = v_cache[:, :rows].transpose(0, 1).repeat_interleave(heads // v_cache.shape[0], dim=1)
        return (query * scale + value).flatten(1)


def _independent(decoder: Decoder, tokens: Tensor, positions: Tensor) -> Tensor:
    state = decoder.embed(Batch(tokens, positions, slice(0, len(tokens)), None))
    return decoder.logits(decoder.run_layers(state, 0, decoder.num_layers, Cache(decoder)))
