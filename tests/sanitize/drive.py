"""Drives the compiled layers over odd shapes, in a process that `sanitizers.py` has put under sanitizers.

Every weight, cache layer, state, mask, list of keys and product is an allocation of its own, and each pass runs in a
thread of its own, whose scratch memory starts empty: whatever is read or written beyond an end is beyond an
allocation. What the sanitizers cannot see is looked for here: slots that no key names hold NaN, which shows
in whatever is computed from them and is gone where something was written.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import random
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from kits.tiny import tiny_config, tiny_decoder, tiny_streams, tiny_weights
from torch import Tensor

from paceline import kernels
from paceline.core.sampling import SamplingParams, SequenceSampler
from paceline.kernels.calls import NativeTaps, RowSpan, TokenPass
from paceline.kernels.drafts import (
    ChainStart,
    NativeFuse,
    NativeHeads,
    RingChain,
    SampleStart,
    TreeStart,
    grow,
    recall,
    roll,
    sample,
    sparse_view,
    token_info,
    write_keys,
)
from paceline.kernels.linear import NativeLinear, top
from paceline.kernels.lookup import SuffixTexts
from paceline.kernels.memory import Arena
from paceline.kv.ring import RingCache
from paceline.kv.views import SinkWindow
from paceline.model.adapters import LINEARS, AdapterConfig, AdapterRange, LowRank, linear_shapes
from paceline.model.attention.base import Segment
from paceline.model.base import ForwardState
from paceline.model.decoder import Decoder
from paceline.model.rope import RopeConfig, RopeTable
from paceline.papers.streaming.native import StreamCarrier, StreamRun, decide_streams
from paceline.weights.blocks import GROUPED, StoredRows

KINDS = ("float32", "bfloat16", "int8", "q4_0")
EDGES = (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 95, 96, 97, 127, 129, 160)  # of keys
RANKS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 33)
NORMS = {"qk_norm": True, "post_norms": True, "activation": "gelu_tanh"}
SHAPES: list[dict[str, Any]] = [
    {"d_model": 72, "d_ff": 112, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "vocab_size": 203},
    {"d_model": 33, "d_ff": 16, "num_heads": 5, "num_kv_heads": 1, "head_dim": 16, "vocab_size": 17},
    {"d_model": 40, "d_ff": 48, "num_heads": 3, "num_kv_heads": 3, "head_dim": 48, "vocab_size": 1},
    {"d_model": 64, "d_ff": 80, "num_heads": 2, "num_kv_heads": 1, "head_dim": 64, "vocab_size": 16, "tied": True},
    {"d_model": 7, "d_ff": 32, "num_heads": 2, "num_kv_heads": 2, "head_dim": 80, "vocab_size": 65, "qkv_bias": True},
    {"d_model": 97, "d_ff": 176, "num_heads": 6, "num_kv_heads": 2, "head_dim": 96, "vocab_size": 50, "qk_norm": True},
    {"d_model": 31, "d_ff": 64, "num_heads": 1, "num_kv_heads": 1, "head_dim": 128, "vocab_size": 129},
    {"d_model": 16, "d_ff": 16, "num_heads": 1, "num_kv_heads": 1, "head_dim": 256, "vocab_size": 37},
    {"d_model": 8, "d_ff": 16, "num_heads": 3, "num_kv_heads": 1, "head_dim": 32, "vocab_size": 31, "mlp_bias": True},
    {"d_model": 20, "d_ff": 43, "num_heads": 2, "num_kv_heads": 1, "head_dim": 24, "vocab_size": 19, "qk_norm": True},
    {"d_model": 24, "d_ff": 5, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "vocab_size": 33},
    {"d_model": 40, "d_ff": 35, "num_heads": 2, "num_kv_heads": 1, "head_dim": 48, "vocab_size": 29, **NORMS},
]
GAMMA = 3  # streams of a row
RIDERS = AdapterConfig(rank=5, layers=(1,))
PRODUCTS = [(1, 1), (16, 32), (17, 7), (5, 8), (64, 9), (37, 50), (65, 257), (130, 688)]  # outputs, inputs


class Cache(SimpleNamespace):
    """K and V whose layers are allocations of their own; NaN where nothing was put."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__

    def __init__(self, decoder: Decoder, slots: int) -> None:
        count, heads, width = decoder.cache_shape
        layers = [torch.full((heads, slots, width), torch.nan, dtype=decoder.dtype) for _ in range(2 * count)]
        super().__init__(k=layers[:count], v=layers[count:], slots=slots)

    def put(self, slots: Tensor) -> None:
        """Numbers into some slots."""
        for layer in (*self.k, *self.v):
            layer[:, slots] = torch.randn(layer.shape[0], len(slots), layer.shape[2]).to(layer.dtype)

    def check(self, named: Tensor) -> None:
        """Nothing was written but to the slots named, and numbers are in those."""
        free = torch.ones(self.slots, dtype=torch.bool).index_fill(0, named, False)
        for layer in (*self.k, *self.v):
            assert layer[:, free].isnan().all(), "a slot was written that no row has"
            assert not layer[:, ~free].isnan().any(), "a key is no number"


def alone(work: Callable[[], None]) -> None:
    """Run in a new thread: scratch memory is a thread's own, and starts empty there."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            with torch.inference_mode():
                work()
        except BaseException as error:  # shown below: a thread's own would be lost
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def networks(draw: random.Random, shapes: list[dict[str, Any]]) -> Iterator[Decoder]:
    """Every shape in every kind of weights, with windows and rotations of all sorts."""
    for shape in shapes:
        for kind in KINDS:
            dim = shape["head_dim"]
            rotated = draw.choice([dim, dim - 2, 2])
            windows = draw.choice([(None, 5), (1, None), (16, 33), (None, None)])
            rope = RopeConfig(dim=rotated)
            ropes = draw.choice([(), (rope, None), (replace(rope, theta=50.0), rope)])
            config = tiny_config(**shape, num_layers=2, windows=windows, rope=rope, ropes=ropes)
            yield tiny_decoder(
                config,
                dtype=torch.float32 if kind == "float32" else torch.bfloat16,
                quant=quant_of(kind),
                compiled=True,
            )


def one_pass(decoder: Decoder, draw: random.Random, widths: list[int]) -> None:
    """A packed pass of several sequences: chains and trees, contiguous and gathered, with and without adapters."""
    cache = Cache(decoder, sum(widths) + len(widths) * 3 + sum(draw.choice(EDGES) for _ in widths))
    segments, slots, positions = [], [], []
    free, start = torch.randperm(cache.slots), 0
    for index, rows in enumerate(widths):
        room = len(free) - sum(widths[index + 1 :])
        count = min(room, rows + draw.choice((0, *EDGES)))
        keys, free = free[:count], free[count:]
        if len(widths) == 1 and draw.random() < 0.5:  # contiguous, up to the last slot
            keys = torch.arange(cache.slots - count, cache.slots)
        segments.append(segment(draw, start, rows, keys, len(widths) == 1))
        slots.append(keys[count - rows :])
        positions.append(row_positions(segments[-1], rows, count))
        start += rows
    named = torch.cat([key_slots(s) for s in segments])
    cache.put(named)
    state = ForwardState(
        torch.randn(start, decoder.config.d_model).to(decoder.dtype),
        torch.cat(positions),
        placed(draw, torch.cat(slots)),
        None,
    )
    state.attn = decoder.plan(segments, state.positions)
    state.adapters = adapters(decoder, draw, start)
    cut = draw.choice([1, 2])
    for begin, end in ((0, cut), (cut, 2)):
        state = decoder.run_layers(state, begin, end, cache)
    assert not state.hidden.isnan().any(), "a row is no number"
    assert not decoder.logits(state).isnan().any()
    cache.check(named)


def segment(draw: random.Random, start: int, rows: int, keys: Tensor, alone: bool) -> Segment:
    """A chain or a tree of ``rows`` rows at the end of ``keys``."""
    count = len(keys)
    listed: slice | Tensor = keys.clone()
    if alone and count and bool((keys[1:] == keys[:-1] + 1).all()):
        listed = slice(int(keys[0]), int(keys[0]) + count)
    if draw.random() < 0.4:
        return Segment(start, start + rows, listed, count, count - rows, None, None)
    split = draw.randint(0, count - rows)  # committed keys in the block
    block = rows + split
    visible = torch.rand(rows, block) < draw.choice([0.05, 0.5, 0.95])
    visible[torch.arange(rows), split + torch.arange(rows)] = True
    visible = visible.tril(split)
    places = torch.arange(count - block, count) if draw.random() < 0.7 else None
    return Segment(start, start + rows, listed, count, count - block, visible, places)


def row_positions(s: Segment, rows: int, count: int) -> Tensor:
    return torch.arange(count - rows, count)


def key_slots(s: Segment) -> Tensor:
    return torch.arange(s.keys.start, s.keys.stop) if isinstance(s.keys, slice) else s.keys


def placed(draw: random.Random, slots: Tensor) -> slice | Tensor:
    """Where rows' K and V go: a slice where it can be one, or a list in which some rows have no place."""
    if bool((slots[1:] == slots[:-1] + 1).all()) and draw.random() < 0.5:
        return slice(int(slots[0]), int(slots[0]) + len(slots))
    kept = slots.clone()
    if draw.random() < 0.3:
        kept[torch.rand(len(kept)) < 0.3] = -1
    return kept


def adapters(decoder: Decoder, draw: random.Random, rows: int) -> list[AdapterRange]:
    """Ranges of rows with adapters of odd ranks, in some of the linear layers."""
    ranges, at = [], 0
    while draw.random() < 0.6 and at < rows:
        begin = draw.randint(at, rows - 1)
        at = draw.randint(begin + 1, rows)
        linears = tuple(x for x in LINEARS if draw.random() < 0.7) or ("up",)
        config = AdapterConfig(rank=draw.choice(RANKS), layers=draw.choice([(0,), (1,), (0, 1)]), linears=linears)
        made = LowRank(config, linear_shapes(decoder.config), dtype=decoder.dtype).start()
        for up in made.up.values():
            up.data.normal_(std=0.1)
        ranges.append(AdapterRange(begin, at, made))
    return ranges


def one_roll(decoder: Decoder, draw: random.Random) -> None:
    """Several chains at once, the last one up to the cache's end."""
    stack: Any = decoder.stack
    vocab = decoder.config.vocab_size
    sizes = [(draw.choice([0, 1, 15, 16, 40]), draw.choice([1, 2, 16, 33]), draw.choice([1, 2, 5])) for _ in range(3)]
    totals = [position + pending + steps - 1 for position, pending, steps in sizes]
    cache, chains, at = Cache(decoder, sum(totals)), [], 0
    order = torch.randperm(sum(totals))
    contiguous = draw.random() < 0.5
    for (position, count, steps), total in zip(sizes, totals, strict=True):
        keys: slice | Tensor = slice(at, at + total) if contiguous else order[at : at + total].clone()
        at += total
        cache.put(key_slots(Segment(0, 0, keys, total, 0, None, None))[:position])
        pending = [draw.choice([0, vocab - 1, draw.randrange(vocab)]) for _ in range(count)]
        rules = draw.choice([None, some_rules(draw, vocab)])
        view, scratch = some_view(draw, decoder, count, sum(totals))
        chains.append(ChainStart(pending, position, steps, keys, draw.choice([-torch.inf, -0.5]), rules, view, scratch))
    limit = draw.choice([1, vocab, max(1, vocab - 1)])
    for chain, found in zip(chains, roll(stack, chains, cache, limit), strict=True):
        assert 1 <= len(found) <= chain.steps and all(0 <= token < limit for token, _ in found)


def some_view(draw: random.Random, decoder: Decoder, pending: int, slots: int) -> tuple[Any, int]:
    """What the rows of a chain see, and where its sinks may be copied to, up to the cache's end."""
    assert decoder.config.rope is not None
    if pending > 1 or any(decoder.config.windows) or draw.random() < 0.3:
        return None, 0
    sinks, window = draw.choice([0, 1, min(3, slots)]), draw.choice([1, 2, 15, 2**31 - 1])
    table = RopeTable(decoder.config.rope, torch.float32, decoder.device)
    return sparse_view(sinks, window, table.reach(slots)), slots - sinks


def some_rules(draw: random.Random, vocab: int) -> bytes:
    """How a sequence draws its tokens."""
    params: dict[str, Any] = {"temperature": draw.choice([0.0, 0.5, 1.0])}
    params |= draw.choice([{}, {"top_k": draw.randint(1, vocab)}, {"top_p": draw.random()}, {"min_p": draw.random()}])
    params |= draw.choice([{}, {}, {"presence_penalty": 1.0}])
    return SequenceSampler(
        SamplingParams(**params), [0], seed=draw.randrange(9), sample_index=0, vocab_size=vocab
    ).rules


def one_growth(decoder: Decoder, draw: random.Random) -> None:
    """Several draft trees at once, the last one up to the cache's end."""
    stack: Any = decoder.stack
    vocab = decoder.config.vocab_size
    topk = draw.choice([1, 2, 4])
    factors = [draw.randint(1, 3) for _ in range(draw.randint(1, 4))]
    sizes = [(draw.choice([0, 1, 15, 40]), draw.choice([1, 2, 16]), draw.choice([0, 1, 7, 20])) for _ in range(3)]
    cache, seeds, at = Cache(decoder, sum(map(sum, sizes))), [], 0
    order = torch.randperm(sum(map(sum, sizes)))
    contiguous = draw.random() < 0.5
    for position, count, room in sizes:
        total = position + count + room
        keys: slice | Tensor = slice(at, at + total) if contiguous else order[at : at + total].clone()
        at += total
        cache.put(key_slots(Segment(0, 0, keys, total, 0, None, None))[:position])
        pending = [draw.choice([0, vocab - 1, draw.randrange(vocab)]) for _ in range(count)]
        levels, rules = draw.randint(1, len(factors)), draw.choice([None, some_rules(draw, vocab)])
        seeds.append(TreeStart(pending, position, room, keys, draw.randint(1, 30), levels, 4 + vocab * 20, rules))
    limit = draw.choice([1, vocab, max(1, vocab - 1)])
    floor = draw.choice([-math.inf, -3.0])
    trees = grow(stack, seeds, factors, topk, floor, cache, limit)
    for seed, (tree, forwarded, _) in zip(seeds, trees, strict=True):
        assert forwarded <= seed.room and all(0 <= token < limit for token in tree.tokens)
        assert all(0 <= parent <= node for node, parent in enumerate(tree.parents))


def one_state_draft(decoder: Decoder, draw: random.Random) -> None:
    """Lyanna's drafts and EAGLE's trees over a layer that borrows the decoder's ends, up to the cache's end."""
    d, vocab, dtype = decoder.config.d_model, decoder.config.vocab_size, decoder.dtype
    shape = replace(decoder.config, num_layers=1, windows=(None,), ropes=(), first_norm=draw.random() < 0.5)
    body = Decoder(shape, decoder.attention, dtype=dtype, native=True, ends_of=decoder.handle(), normed=True)
    tiny_weights(body)
    stack: Any = body.finish().stack
    rank = draw.choice(RANKS)
    both, state = (linear_of(n, d, dtype) for n in (2 * d, d))
    target = draw.choice([None, decoder.stack])
    fused = NativeFuse(both, state, torch.randn(1, d).to(dtype), draw.random() < 0.7, target)
    info = token_info(torch.randn(vocab, rank).to(dtype), linear_of(rank, vocab, dtype))
    sizes = [(draw.choice([0, 1, 15, 40]), draw.choice([1, 2, 16]), draw.choice([1, 2, 5])) for _ in range(3)]
    cache, order, at = Cache(body, sum(map(sum, sizes))), torch.randperm(sum(map(sum, sizes))), 0
    contiguous, sprouts, seeds = draw.random() < 0.5, [], []
    levels, topk = 5, draw.choice([1, 2, 4])
    for position, count, steps in sizes:
        total = position + count + steps - 1
        keys: slice | Tensor = slice(at, at + total) if contiguous else order[at : at + total].clone()
        at += total
        cache.put(key_slots(Segment(0, 0, keys, total, 0, None, None))[:position])
        pending = [draw.choice([0, vocab - 1, draw.randrange(vocab)]) for _ in range(count)]
        rules, place = draw.choice([None, some_rules(draw, vocab)]), position + count + 9
        left = draw.choice([None, torch.randn(draw.randint(1, 3), vocab)])
        states, most = torch.randn(len(pending), d).to(dtype), (draw.choice([1, 7, 999]), draw.choice([1, 7, 999]))
        at_root = draw.randrange(vocab), place, rules, states, left, most
        sprouts.append(SampleStart(pending, position, keys, steps, *at_root))
        seeds.append(TreeStart(pending, position, steps - 1, keys, 9, levels, 4 + vocab * 20, rules, 9, states))
    for branches in (1, topk, 2 * vocab):
        raw, found = sample(stack, sprouts, branches, True, fused, draw.choice([None, info]), cache)
        assert not raw.isnan().any()
        for sprout, trees in zip(sprouts, found, strict=True):
            assert [tree is not None for tree in trees] == [True, sprout.leftover is not None]
            for tree in filter(None, trees):
                assert all(0 <= token < vocab for token in tree.tokens)
                assert all(0 <= parent <= node for node, parent in enumerate(tree.parents))
    grown = grow(stack, seeds, [1] * levels, topk, -math.inf, cache, vocab, fused)
    assert all(forwarded <= seed.room for seed, (_, forwarded, _) in zip(seeds, grown, strict=True))


def one_recall(decoder: Decoder, draw: random.Random) -> None:
    """K and V of given states, and chains that see them in rings, a ring's slots each to its end; over layers of the
    decoder's shape that see all that they are shown."""
    shape = replace(decoder.config, windows=(None,) * decoder.num_layers)
    body = Decoder(shape, decoder.attention, dtype=decoder.dtype, native=True)
    tiny_weights(body)
    stack: Any = body.finish().stack
    vocab, sinks, window, spare = decoder.config.vocab_size, *(draw.choice(x) for x in ([0, 1, 3], [1, 2, 33], [1, 5]))
    ring = RingCache(body.cache_shape, SinkWindow(sinks, window), spare, 3, decoder.dtype, decoder.device)
    cache = Cache(body, 3 * ring.size)
    ring.k, ring.v = cache.k, cache.v
    layers, chains, named = len(ring.k), [], []
    for index in range(3):
        position, steps = draw.choice([1, 2, window, 40, 63]), draw.randint(1, spare + 1)
        start = draw.randint(max(0, position - window), position - 1)
        first = min(sinks, position)
        known = [*range(first), *range(max(first, start), position)]
        named += ring.slots(index, [*known, *range(position, position + steps - 1)])
        states = torch.randn(layers, len(known) + 2, decoder.config.d_model).to(decoder.dtype)
        rows = [draw.randrange(len(known) + 2) for _ in known]
        write_keys(stack, ring, [*states], rows, known, ring.slots(index, known))
        rules = draw.choice([None, some_rules(draw, vocab)])
        chains.append(RingChain(draw.randrange(vocab), position, steps, index, start, rules))
    mix = torch.rand(layers, layers + 1)
    for chain, found in zip(chains, recall(stack, ring, chains, mix, -math.inf, vocab), strict=True):
        assert len(found) == chain.steps and all(0 <= token < vocab for token, _ in found)
    cache.check(torch.tensor(named))


def linear_of(inputs: int, outputs: int, dtype: torch.dtype = torch.float32) -> NativeLinear:
    return NativeLinear((inputs**-0.5 * torch.randn(outputs, inputs)).to(dtype), None)


def one_decision(decoder: Decoder, draw: random.Random) -> None:
    """A pass from token ids on: chains and trees, contiguous and gathered, up to the cache's end; half of them with
    streams, on some nodes or none."""
    stack: Any = decoder.stack
    vocab = decoder.config.vocab_size
    sizes = [(draw.choice([0, 1, 15, 40]), draw.choice([1, 2, 5]), draw.choice([0, 1, 8, 17])) for _ in range(3)]
    totals = [sum(size) for size in sizes]
    riding = draw.random() < 0.5
    spare = 170 if riding else 0  # scratch slots behind all others
    cache, at, start = Cache(decoder, sum(totals) + spare), 0, 0
    order = torch.randperm(sum(totals))
    carriers = []
    contiguous = draw.random() < 0.5
    tokens, positions, slots, spans, wanted = [], [], [], [], []
    for (prefix, pending, drafted), total in zip(sizes, totals, strict=True):
        keys: slice | Tensor = slice(at, at + total) if contiguous else order[at : at + total].clone()
        named = key_slots(Segment(0, 0, keys, total, 0, None, None))
        at += total
        cache.put(named[:prefix])
        rows = pending + drafted
        parents = [draw.randint(0, n) for n in range(drafted)] if draw.random() < 0.7 else None
        tokens += [draw.choice([0, vocab - 1, draw.randrange(vocab)]) for _ in range(rows)]
        positions += range(prefix, prefix + rows)
        slots += named[prefix:].tolist()
        spans.append(RowSpan(start, start + rows, prefix, keys, parents))
        if riding and draw.random() < 0.8:
            nodes = [n for n in range(drafted + 1) if draw.random() < 0.5]
            streams, most = draw.randint(1, GAMMA), draw.choice([-1, 0, 99])
            carriers.append(StreamCarrier(len(spans) - 1, start + pending - 1, streams, most, tokens[:1], nodes))
            wanted += range(start + pending - 1, start + rows)
        else:
            wanted += [start + r for r in range(rows) if draw.random() < 0.6]
        start += rows
    asked = TokenPass(tokens, positions, slots, spans, wanted, adapters(decoder, draw, start))
    rules, drawn = b"".join(some_rules(draw, vocab) for _ in spans), draw.random() < 0.5
    if not riding:
        if drawn:
            masks = torch.randint(-(2**31), 2**31, (len(wanted), (vocab + 31) // 32), dtype=torch.int32)
            masks = draw.choice([None, masks & draw.choice([-1, 1 << 31, 0])])
            asked = asked._replace(rules=rules, logits=torch.empty(len(wanted), vocab), masks=masks)
        found = stack.decide(asked, cache, some_taps(decoder, draw, start))
    else:
        rides = StreamRun(
            tiny_streams(
                decoder.config, gamma=GAMMA, dtype=decoder.dtype, adapter=draw.choice([None, RIDERS]), prune_rank=0
            ),
            carriers,
            draw.choice([1, vocab]),
            slice(sum(totals), sum(totals) + spare),
            draw.random() < 0.5,
        )
        if drawn:
            asked = asked._replace(rules=rules, logits=torch.empty(len(wanted) + rides.rows, vocab))
        found, told, _ = decide_streams(stack, asked, rides, cache, some_taps(decoder, draw, start))
        assert len(told) == len(carriers)
    assert len(found) == len(wanted) and all(-drawn <= token < vocab for token in found)


def some_taps(decoder: Decoder, draw: random.Random, rows: int) -> NativeTaps | None:
    """States of any rows after any layers, or none."""
    if draw.random() < 0.5:
        return None
    layers = tuple(sorted(draw.sample(range(decoder.num_layers), draw.randint(1, decoder.num_layers))))
    chosen = [draw.randrange(rows) for _ in range(draw.randint(0, rows))]
    room = torch.empty(len(layers), len(chosen), decoder.config.d_model, dtype=decoder.dtype)
    return NativeTaps(layers, chosen, room)


def guesses(decoder: Decoder, draw: random.Random, rows: int) -> None:
    """Medusa's heads, with output heads of their own or the target's, by rules or without."""
    stack: Any = decoder.stack
    (vocab, width), rows = stack.shape, max(1, rows)
    states, count = torch.randn(rows, width).to(decoder.dtype), draw.randint(1, 3)
    assert stack.final(states).shape == states.shape
    own = torch.randn(count, vocab, width) if draw.random() < 0.5 else None
    heads = NativeHeads(stack, torch.randn(count * width, width), torch.randn(count, width), own)
    rules = b"".join(some_rules(draw, vocab) for _ in range(rows)) if draw.random() < 0.5 else None
    for k in {1, vocab}:
        found = heads.best(states, k, range(rows), rules, draw.random() < 0.5)
        assert [[len(level) for level in tokens] for tokens, _ in found] == [[k] * count] * rows


def reads(decoder: Decoder, draw: random.Random, rows: int) -> None:
    """Logits, and the k best."""
    stack: Any = decoder.stack
    vocab = decoder.config.vocab_size
    hidden = torch.randn(rows, decoder.config.d_model).to(decoder.dtype)
    logits = stack.logits(hidden)
    for k in {1, min(3, vocab), max(1, vocab - 1), vocab}:
        best, _ = top(logits.clone(), k)
        assert [len({*row}) for row in best] == [k] * rows


def refusals(decoder: Decoder) -> None:
    """What cannot be is refused before anything is read."""
    stack: Any = decoder.stack
    vocab = decoder.config.vocab_size
    cache = Cache(decoder, 8)
    bad = [ChainStart([vocab], 0, 2, slice(0, 8), 0.0), ChainStart([-1], 0, 2, slice(0, 8), 0.0)]
    bad += [ChainStart([0], 0, 2, slice(7, 15), 0.0), ChainStart([0], 0, 9, slice(0, 8), 0.0)]
    bad += [ChainStart([0], 0, 2, torch.tensor([0, 8]), 0.0), ChainStart([0], 7, 3, slice(0, 8), 0.0)]
    for chain in bad:
        try:
            roll(stack, [chain], cache, vocab)
        except ValueError:
            continue
        raise AssertionError(f"{chain} was not refused")
    cache.check(torch.arange(0))


def look_ups(draw: random.Random) -> None:
    """Growing texts."""
    texts: list[list[int]] = [[] for _ in range(4)]
    suffixes = SuffixTexts(1, draw.randint(1, 9), draw.choice([0.5, 4.0]), 0.1, draw.choice([0, 40, 400]))
    for _ in range(60):
        for text in texts:
            text += draw.choices(range(3), k=draw.choice([1, 1, 2, 9]))
        asked = [(key, texts[key], draw.randint(1, 7)) for key in draw.sample(range(4), draw.randint(1, 4))]
        suffixes.draft([(key, texts[key], depth, 1 + depth % 3) for key, _, depth in asked])
        suffixes.followers(key := draw.randint(0, 3), texts[key], draw.choices(range(3), k=draw.randint(0, 4)), 3)
        if draw.random() < 0.2:
            suffixes.drop(key)
            suffixes.remember(texts[key])


def quant_of(kind: str) -> Any:
    """How one of `KINDS` is stored."""
    return {"int8": "int8", "q4_0": "q4_0"}.get(kind)


def products(draw: random.Random) -> int:
    """One product at a time; its number."""
    count = 0
    for outputs, inputs in PRODUCTS:
        for kind in KINDS:
            dtype = torch.float32 if kind == "float32" else torch.bfloat16
            linear = NativeLinear(torch.randn(outputs, inputs).to(dtype), torch.ones(outputs), quant_of(kind))
            for rows in (0, 1, 2, 3, 4, 5, 15, 16, 17, 33):
                x = torch.randn(rows, inputs).to(dtype)
                alone(lambda linear=linear, x=x: linear(x))  # type: ignore[misc]
                count += 1
    for group in GROUPED.values():
        for outputs, inputs in ((1, 128), (37, 384)):
            blocks = np.zeros((outputs, group.row_bytes(inputs)), np.uint8)
            plain = torch.empty(outputs, inputs, dtype=torch.bfloat16)
            linear = NativeLinear(plain, None, "stored", parts=[StoredRows(group, blocks, torch.arange(outputs))])
            for width in (1, 2, 4, 6, 8, 17):
                x = torch.randn(width, inputs).bfloat16()
                alone(lambda linear=linear, x=x: linear(x))  # type: ignore[misc]
                count += 1
    return count


def plant(name: str) -> None:
    """One step beyond an end; the process should not live to tell."""
    torch.set_num_threads(1)  # else it is a matter of chance which step comes first
    decoder = tiny_decoder(tiny_config(**SHAPES[0], num_layers=2), dtype=torch.float32, compiled=True)
    stack: Any = decoder.stack
    library: Any = kernels.library()
    linear = NativeLinear(torch.randn(37, 50), None)
    x, y = torch.randn(3, 50), torch.empty(3, 37)
    short = {"input": torch.randn(2, 50), "output": torch.empty(3 * 37 - 1), "weight": linear.packed[:-1].clone()}
    if name == "input":
        library.pl_linear(ctypes.byref(linear.struct), short[name].data_ptr(), 3, y.data_ptr(), 1)
    elif name == "output":
        library.pl_linear(ctypes.byref(linear.struct), x.data_ptr(), 3, short[name].data_ptr(), 1)
    elif name == "weight":
        linear.struct.weight = short[name].data_ptr()
        library.pl_linear(ctypes.byref(linear.struct), x.data_ptr(), 3, y.data_ptr(), 1)
    elif name == "keys":
        cache, keys = Cache(decoder, 16), torch.zeros(2 * 16 * 32 - 1)
        stack._addresses(cache)[0][0] = keys.data_ptr()  # K of the first layer
        one_chain(decoder, cache, 16)
    elif name == "scratch":
        adapter = LowRank(AdapterConfig(rank=40, layers=(0, 1)), linear_shapes(decoder.config)).start()
        stack.adapters(adapter).rank = 1  # less than its weights have
        one_chain(decoder, Cache(decoder, 16), 16, [AdapterRange(0, 16, adapter)])
    elif name == "buffer":
        kernels.abi.CLayer.from_address(stack._model.layers).out.k += 32  # reads behind 16 rows, within one allocation
        one_chain(decoder, Cache(decoder, 16), 16)
    else:
        library.pl_packed_size(2**63 - 1, 8, 0)  # an overflow, without touching memory


def one_chain(decoder: Decoder, cache: Cache, rows: int, ranges: list[AdapterRange] | None = None) -> None:
    """The only sequence of a pass, from its first token on."""
    places = torch.arange(rows)
    hidden = torch.randn(rows, decoder.config.d_model).to(decoder.dtype)
    state = ForwardState(hidden, places, slice(0, rows), None, adapters=ranges or ())
    state.attn = decoder.plan([Segment(0, rows, slice(0, rows), rows, 0, None, None)], places)
    decoder.run_layers(state, 0, decoder.num_layers, cache)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--plant")
    chosen = parser.parse_args()
    why = kernels.unavailable()
    assert why is None, why
    assert hasattr(ctypes.CDLL(None), "__asan_init"), "start this by sanitizers.py"
    torch.manual_seed(0)
    Arena.empty = lambda arena, numel, dtype: torch.empty(numel, dtype=dtype)  # type: ignore[method-assign]
    if chosen.plant:
        plant(chosen.plant)
        return
    print(sweep(random.Random(0), chosen.quick))


def sweep(draw: random.Random, quick: bool) -> str:
    """All shapes; what was done."""
    library: Any = kernels.library()
    counts = {"networks": 0, "passes": 0, "rolls": 0, "decisions": 0, "products": 0}
    for level in sorted({library.isa, library.isa - (library.isa == kernels.AMX)}):
        library.pl_init(level)
        torch.set_num_threads(2)
        counts["products"] += products(draw)
        alone(lambda: look_ups(draw))
        for decoder in networks(draw, [SHAPES[0], SHAPES[-1]] if quick else SHAPES):
            counts["networks"] += 1
            first = counts["networks"] <= len(KINDS)  # every width, in the first shape
            widths = [
                [rows]
                for rows in (range(1, 71) if first and not quick else draw.sample(range(1, 71), 6 if quick else 15))
            ]
            several = range(6 if quick else 20)
            widths += [[draw.choice([1, 3, 7, 16, 18]) for _ in range(draw.randint(2, 4))] for _ in several]
            for each in widths:
                torch.set_num_threads(draw.choice([1, 1, 3]))
                alone(lambda decoder=decoder, each=each: one_pass(decoder, draw, each))  # type: ignore[misc]
            for rows in (0, 1, 4, 5, 17):
                alone(lambda decoder=decoder, rows=rows: reads(decoder, draw, rows))  # type: ignore[misc]
                alone(lambda decoder=decoder, rows=rows: guesses(decoder, draw, rows))  # type: ignore[misc]
            for _ in range(4 if quick else 10):
                alone(lambda decoder=decoder: one_roll(decoder, draw))  # type: ignore[misc]
                alone(lambda decoder=decoder: one_growth(decoder, draw))  # type: ignore[misc]
                alone(lambda decoder=decoder: one_recall(decoder, draw))  # type: ignore[misc]
                alone(lambda decoder=decoder: one_state_draft(decoder, draw))  # type: ignore[misc]
                alone(lambda decoder=decoder: one_decision(decoder, draw))  # type: ignore[misc]
            alone(lambda decoder=decoder: refusals(decoder))  # type: ignore[misc]
            counts["passes"] += len(widths)
            counts["rolls"] += 4 if quick else 10
            counts["decisions"] += 4 if quick else 10
    done = ", ".join(f"{count} {name}" for name, count in counts.items())
    return f"nothing was found in {done} on {kernels.describe()}"


if __name__ == "__main__":
    sys.exit(main())
