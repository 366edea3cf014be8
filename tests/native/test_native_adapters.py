"""Low-rank adapters in the compiled layers: torch's numbers, and a row's bits depend on nothing but its adapter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.native import BASE, KINDS, SHAPES, Text, blank_pool, error, make, needs_kernels, tokens_of
from torch import Tensor

from paceline import ConfigError
from paceline.model.adapters import LINEARS, AdapterConfig, AdapterRange, LowRank, linear_shapes
from paceline.model.decoder import Decoder
from paceline.model.linear import QUANTS, quantised
from paceline.model.packing import RowPacker
from paceline.weights.blocks import BY_NAME, dequantise, quantise

pytestmark = needs_kernels
RANKS = (1, 8, 33, 256)
PADDED = ("heads of 8", "heads of 24 with norms and biases")  # and a feed-forward width that is padded too
BOUND = {"float32": 1e-5, "bfloat16": 0.04, "int8": 0.06, "q4_0": 0.06}  # of `error` between two ways to round
FOUR = {"num_layers": 4, "windows": (None, 24, None, None)}


@cache
def decoder_of(name: str, kind: str, compiled: bool = True) -> Decoder:
    """One of `SHAPES`, or `BASE`, or a deeper one; made once."""
    return make({"four": FOUR}.get(name) or SHAPES.get(name), kind, compiled=compiled)


@cache
def adapters_of(name: str, rank: int, seed: int, layers: tuple[int, ...] = (0, 1), linears: Any = LINEARS) -> LowRank:
    """Random adapters that move a row by about a third of what the base computes."""
    shapes = linear_shapes(decoder_of(name, "float32").config)
    made = LowRank(AdapterConfig(rank=rank, alpha=12.0, layers=layers, linears=linears), shapes)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in made.tensors().values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * tensor.shape[1] ** -0.5)
        for up in made.up.values():
            up.mul_(0.3 / made.scale)
    return made


@torch.inference_mode()
def run(
    decoder: Decoder, texts: Sequence[tuple[Text, int]], ranges: Sequence[AdapterRange], cuts: Sequence[int] = ()
) -> list[Tensor]:
    """Hidden states of the next rows of each text, all in one pass, which is cut before the layers named."""
    packer = RowPacker(decoder, decoder.device)
    for text, rows in texts:
        text.pack(packer, rows)
    state = decoder.embed(packer.batch())
    state.adapters = ranges
    edges = [0, *cuts, decoder.num_layers]
    pool = texts[0][0].pool
    for start, stop in zip(edges, edges[1:], strict=False):
        decoder.run_layers(state, start, stop, pool)
    pool.commit([(text.cache, range(rows)) for text, rows in texts])
    return list(state.hidden.split([rows for _, rows in texts]))


def alone(decoder: Decoder, tokens: Sequence[int], adapter: LowRank | None, width: int) -> Tensor:
    """[tokens, d_model] of one text, ``width`` rows a pass, all of them with the adapter."""
    text, parts = Text(decoder, tokens), []
    while text.cache.committed < len(tokens):
        rows = min(width, len(tokens) - text.cache.committed)
        ranges = [] if adapter is None else [AdapterRange(0, rows, adapter)]
        parts += run(decoder, [(text, rows)], ranges)
    return torch.cat(parts)


class Adapted:
    """A linear layer of the torch decoder with the deltas of some rows, by the definition."""

    def __init__(self, base: Any, layer: int, linear: str, ranges: Sequence[AdapterRange]) -> None:
        self.base, self.layer, self.linear, self.ranges = base, layer, linear, ranges

    def __call__(self, x: Tensor) -> Tensor:
        y = self.base(x).clone()
        for r in self.ranges:
            pair = r.adapter.pair(self.layer, self.linear)
            if pair is not None:
                delta = x[r.start : r.stop].double() @ pair[0].double().T @ pair[1].double().T
                y[r.start : r.stop] += (r.adapter.scale * delta).to(y.dtype)
        return y

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return self(x) + residual


def reference(name: str, kind: str, tokens: Sequence[int], ranges: Sequence[AdapterRange]) -> Tensor:
    """[rows, d_model] of one text in one pass, on torch; stored weights as the float32 numbers that they stand for."""
    changes = {"four": FOUR}.get(name) or SHAPES.get(name)
    decoder = make(changes, "float32" if kind in QUANTS else kind, compiled=False)
    for index, layer in enumerate(decoder.layers):
        for linear in LINEARS:
            base: Any = getattr(layer, linear)
            if kind in QUANTS:
                base.weight = stands_for(kind, base.weight.bfloat16())
            object.__setattr__(layer, linear, Adapted(base, index, linear, ranges))
    return run(decoder, [(Text(decoder, tokens), len(tokens))], [])[0]


def stands_for(kind: str, weight: Tensor) -> Tensor:
    """The numbers that a stored weight has."""
    if kind == "int8":
        whole, scale = quantised(weight)
        return whole.float() * scale.float()[:, None]
    padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % 32))
    return torch.from_numpy(dequantise(BY_NAME[kind], quantise(kind, padded)))[:, : weight.shape[1]].contiguous()


def somewhere(name: str, rank: int) -> list[AdapterRange]:
    """Ranges in the middle, at the edge of a chunk, neighbours, and two adapters more than once."""
    first, second = adapters_of(name, rank, 1), adapters_of(name, max(1, rank // 2), 2)
    spans = ((2, 5, first), (9, 16, second), (16, 17, first), (20, 41, second), (41, 44, first), (46, 60, first))
    return [AdapterRange(*span) for span in spans]


@pytest.mark.parametrize("name", ["base", "qwen3", "gemma3", "every bias", "heads of 80", "heads of 96", *PADDED])
@pytest.mark.parametrize("rank", RANKS)
def test_the_hidden_states_are_those_of_torch(name: str, rank: int):
    tokens, ranges = tokens_of(decoder_of(name, "float32"), 64), somewhere(name, rank)
    oracle = reference(name, "float32", tokens, ranges)
    decoder = decoder_of(name, "float32")
    (ours,) = run(decoder, [(Text(decoder, tokens), 64)], ranges)
    torch.testing.assert_close(ours, oracle, atol=2e-4, rtol=1e-4)
    without = alone(decoder, tokens, None, 64)
    assert error(without[2:], oracle[2:]) > 0.1 and torch.equal(without[:2], ours[:2])


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
@pytest.mark.parametrize(("name", "rank"), [*(("base", rank) for rank in RANKS), *((name, 8) for name in PADDED)])
def test_narrow_weights_round_no_worse_than_torch(kind: str, name: str, rank: int):
    tokens, ranges = tokens_of(decoder_of(name, kind), 64), somewhere(name, rank)
    torchs = error(reference(name, "bfloat16", tokens, ranges).float(), reference(name, "float32", tokens, ranges))
    decoder, oracle = (decoder_of(name, kind), reference(name, "int8" if kind == "int8" else "float32", tokens, ranges))
    (ours,) = run(decoder, [(Text(decoder, tokens), 64)], ranges)
    # Beside int8 weights the inputs may be rounded to bytes too.
    assert 0 < error(ours.float(), oracle) < (1.3 if kind == "bfloat16" else 2.0) * torchs


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("linears", [("qkv",), ("out",), ("up",), ("down",), ("out", "up")])
def test_a_linear_layer_without_an_adapter_is_the_base_s(kind: str, linears: tuple[str, ...]):
    tokens = tokens_of(decoder_of("base", kind), 30)
    ranges = [AdapterRange(3, 30, adapters_of("base", 8, 3, (1,), linears))]
    oracle = reference("base", kind, tokens, ranges).float()
    decoder = decoder_of("base", kind)
    (ours,) = run(decoder, [(Text(decoder, tokens), 30)], ranges)
    bound = BOUND[kind]
    assert error(ours.float(), oracle) < bound < error(alone(decoder, tokens, None, 30).float(), oracle)


@pytest.mark.parametrize("kind", KINDS)
def test_layers_count_from_the_bottom_of_the_model(kind: str):
    """Adapters of the upper layers alone, in a pass that is run in parts."""
    decoder = decoder_of("four", kind)
    tokens = tokens_of(decoder, 30)
    ranges = [AdapterRange(3, 30, adapters_of("four", 8, 4, (2, 3)))]
    (whole,) = run(decoder, [(Text(decoder, tokens), 30)], ranges)
    for cuts in ((2,), (1, 3), (1, 2, 3)):
        assert torch.equal(run(decoder, [(Text(decoder, tokens), 30)], ranges, cuts)[0], whole)
    oracle = reference("four", kind, tokens, ranges).float()
    assert error(whole.float(), oracle) < BOUND[kind]


def test_a_factor_that_is_forgotten_would_show():
    """The comparisons above can fail."""
    tokens = tokens_of(decoder_of("base", "float32"), 30)
    adapter = adapters_of("base", 8, 1)
    oracle = reference("base", "float32", tokens, [AdapterRange(0, 30, adapter)])
    wrong = LowRank(
        AdapterConfig(rank=8, alpha=13.0, layers=(0, 1)), linear_shapes(decoder_of("base", "float32").config)
    )
    wrong.load_state_dict(adapter.state_dict())
    assert (alone(decoder_of("base", "float32"), tokens, wrong, 30) - oracle).abs().max() > 1e-2


LENGTH = 70


@cache
def one_by_one(name: str, kind: str, seed: int, rank: int | None) -> Tensor:
    """[LENGTH, d_model] of a text, a row a pass."""
    decoder = decoder_of(name, kind)
    return alone(decoder, text_of(name, kind, seed), None if rank is None else adapters_of(name, rank, 1), 1)


def text_of(name: str, kind: str, seed: int) -> list[int]:
    return tokens_of(decoder_of(name, kind), LENGTH, seed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_bits_do_not_depend_on_width_nor_on_threads(kind: str, rank: int, count: int):
    before = torch.get_num_threads()
    tokens, expected = text_of("base", kind, 0), one_by_one("base", kind, 0, rank)
    torch.set_num_threads(count)
    try:
        for width in (2, 5, 16, 17, 33, LENGTH):
            found = alone(decoder_of("base", kind), tokens, adapters_of("base", rank, 1), width)
            assert torch.equal(found, expected), f"{width} rows a pass"
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["base", "qwen3", "gemma3"])
@pytest.mark.parametrize("kind", KINDS)
def test_bits_do_not_depend_on_the_rest_of_the_batch(name: str, kind: str):
    """Texts with adapters, others and none, in passes of many widths and in any order."""
    decoder = decoder_of(name, kind)
    pool = blank_pool(decoder)
    ranks = (None, 8, 33, 8, None)
    texts = [Text(decoder, text_of(name, kind, seed), pool=pool) for seed in range(len(ranks))]
    found: list[list[Tensor]] = [[] for _ in ranks]
    generator = torch.Generator().manual_seed(3)
    while any(text.cache.committed < LENGTH for text in texts):
        chosen, ranges, end = [], [], 0
        for place in torch.randperm(len(ranks), generator=generator).tolist():
            wanted = int(torch.randint(0, 14, (), generator=generator))
            rows, rank = min(wanted, LENGTH - texts[place].cache.committed), ranks[place]
            if rows:
                chosen.append((place, rows))
                if rank is not None:
                    ranges.append(AdapterRange(end, end + rows, adapters_of(name, rank, 1)))
                end += rows
        if chosen:
            parts = run(decoder, [(texts[place], rows) for place, rows in chosen], ranges)
            for (place, _), part in zip(chosen, parts, strict=True):
                found[place].append(part)
    for seed, rank in enumerate(ranks):
        assert torch.equal(torch.cat(found[seed]), one_by_one(name, kind, seed, rank)), f"text {seed}"


GAMMA = 4
PARENTS = (-1, 0, 1, 0, 3, 2, 5, 5, 4, 6, 6, 0, 10, 2, 12, 14, 15)  # of 17 main rows: more than a chunk


def ancestors(node: int) -> list[int]:
    """The path from the root to a node, both included."""
    return [] if node < 0 else [*ancestors(PARENTS[node]), node]


def stream_block() -> tuple[Tensor, list[int]]:
    """[rows, rows] the block's keys that each row sees, and each row's depth; main rows, then streams node-major."""
    nodes = len(PARENTS)
    rows = [ancestors(n) for n in range(nodes)]
    depths = [len(path) - 1 for path in rows]
    for node in range(nodes):
        first = nodes + node * GAMMA
        for j in range(GAMMA):
            rows.append([*ancestors(node), *range(first, first + j + 1)])
            depths.append(depths[node] + j + 1)
    visible = torch.zeros(len(rows), len(rows), dtype=torch.bool)
    for row, keys in zip(visible, rows, strict=True):
        row[keys] = True
    return visible, depths


@torch.inference_mode()
def through_layers(
    decoder: Decoder,
    text: Text,
    hidden: Tensor,  # [rows, d_model]
    depths: Sequence[int],
    visible: Tensor | None,
    ranges: Sequence[AdapterRange],
) -> Tensor:
    """[rows, d_model] after all layers of rows that start as ``hidden`` behind what the text has committed."""
    rows, prefix = len(depths), text.cache.committed
    text.cache.reserve(rows)
    packer = RowPacker(decoder, decoder.device)
    positions = [prefix + depth for depth in depths]
    packer.add(
        [0] * rows,
        positions,
        slots=text.cache.slots(prefix, prefix + rows),
        keys=text.cache.slots(0, prefix + rows),
        num_keys=prefix + rows,
        prefix=prefix,
        visible=visible,
        block_positions=None if visible is None else positions,
    )
    state = decoder.embed(packer.batch())
    state.hidden, state.adapters = hidden, ranges
    found = decoder.run_layers(state, 0, decoder.num_layers, text.pool).hidden
    text.cache.rollback()
    return found


@pytest.mark.parametrize("name", ["base", "qwen3", "gemma3", "heads of 48"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prefix", [5, 32, 63])
def test_a_stream_s_bits_are_those_of_a_chain_of_what_it_sees(name: str, kind: str, prefix: int):
    decoder = decoder_of(name, kind)
    visible, depths = stream_block()
    nodes, rows = len(PARENTS), len(depths)
    adapter = adapters_of(name, 8, 5)
    hidden = torch.randn(rows, decoder.config.d_model, generator=torch.Generator().manual_seed(1)).to(decoder.dtype)
    text = Text(decoder, tokens_of(decoder, prefix))
    text.advance(prefix)
    found = through_layers(decoder, text, hidden, depths, visible, [AdapterRange(nodes, rows, adapter)])
    assert not found.isnan().any()
    for node in range(nodes):
        path = [*ancestors(node), *range(nodes + node * GAMMA, nodes + (node + 1) * GAMMA)]
        own = [AdapterRange(len(path) - GAMMA, len(path), adapter)]
        alone = through_layers(decoder, text, hidden[path], range(len(path)), None, own)
        assert torch.equal(found[path], alone), f"node {node}"
    main = through_layers(decoder, text, hidden[:nodes], depths[:nodes], visible[:nodes, :nodes], [])
    assert torch.equal(found[:nodes], main)


def test_ranges_that_overlap_or_leave_the_pass_are_refused():
    decoder, a = decoder_of("base", "float32"), adapters_of("base", 8, 1)
    tokens = tokens_of(decoder, 10)
    for spans in (((0, 4), (3, 6)), ((4, 6), (0, 2)), ((2, 2),), ((8, 11),), ((-1, 2),), ((5, 3),)):
        with pytest.raises(ValueError, match="adapters for rows"):
            run(decoder, [(Text(decoder, tokens), 10)], [AdapterRange(*span, a) for span in spans])


def test_adapters_of_another_model_and_unloaded_ones_are_refused():
    decoder = decoder_of("base", "float32")
    shapes = linear_shapes(decoder.config)
    cases = {
        "the model has 2 layers": adapters_of("four", 8, 4, (2, 3)),
        "down and up are": LowRank(AdapterConfig(layers=(0,)), shapes | {"up": (8, 8)}).start(),
        "holds NaN": LowRank(AdapterConfig(layers=(1,), linears=("out",)), shapes),
    }
    for why, adapter in cases.items():
        with pytest.raises(ConfigError, match=why):
            alone(decoder, [1, 2, 3], adapter, 3)


@pytest.mark.full  # `test_native` asks the baseline build for one answer with every run
def test_without_instructions_of_particular_processors():
    """The baseline build runs the tests of numbers and bits of this file."""
    if os.environ.get("PACELINE_NATIVE") == "baseline":
        pytest.skip("this is that run")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k"]
    command += ["(torch and 8) or batch or cut or start_values or stream", str(Path(__file__))]
    env = os.environ | {"PACELINE_NATIVE": "baseline", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, text=True, capture_output=True, timeout=280)
    assert done.returncode == 0 and "passed" in done.stdout, done.stdout[-3000:] + done.stderr[-1000:]


assert BASE["num_layers"] == 2  # `adapters_of` speaks of layers 0 and 1
