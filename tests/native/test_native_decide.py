"""A greedy pass in one compiled call chooses what the same pass chooses part by part: shapes, trees, batches, slots."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from kits.native import SHAPES, Text, blank_pool, decoder_of, forward, make, needs_kernels, tokens_of

from paceline import SamplingParams, kernels
from paceline.core.sampling import SequenceSampler
from paceline.core.tree import TokenTree
from paceline.kernels.calls import NativeTaps, RowSpan, TokenPass
from paceline.kernels.linear import NativeLinear
from paceline.kv.pool import KVPool
from paceline.model.base import Taps
from paceline.model.decoder import Decoder
from paceline.model.packing import RowPacker

pytestmark = needs_kernels
PREFIX = 40  # committed tokens of each text: more than the windows


class Drafted:
    """A text with some pending tokens and a tree of drafts behind them."""

    def __init__(
        self, decoder: Decoder, pool: KVPool, pending: int, parents: Sequence[int], seed: int, scattered: bool
    ) -> None:
        self.text = Text(decoder, tokens_of(decoder, PREFIX + pending, seed), scattered=scattered, pool=pool)
        while self.text.cache.committed < PREFIX:
            self.text.advance(8)
        self.parents = list(parents)
        self.rows = pending + len(parents)
        self.tokens = [*self.text.tokens[PREFIX:], *tokens_of(decoder, len(parents), seed + 100)]
        root = PREFIX + pending - 1
        depths = TokenTree([0] * len(parents), [*parents]).depths()
        self.positions = [*range(PREFIX, root), *(root + depth for depth in depths)]
        self.nodes = range(pending - 1, self.rows)  # rows of the root and of the drafts
        self.text.cache.reserve(self.rows)

    def visible(self) -> torch.Tensor:
        """[rows, rows]: pending rows are a chain, a node sees the root's chain and its ancestors."""
        pending = self.rows - len(self.parents)
        mask = torch.ones(self.rows, self.rows, dtype=torch.bool).tril()
        for node, parent in enumerate(self.parents, start=1):
            row, above = pending - 1 + node, pending - 1 + parent
            mask[row] = mask[above]
            mask[row, row] = True
        return mask


def part_by_part(decoder: Decoder, pool: KVPool, drafted: Sequence[Drafted], wanted: Sequence[int]) -> list[int]:
    return forward(decoder, packed(decoder, drafted), pool)[list(wanted)].numpy().argmax(axis=-1).tolist()


def packed(decoder: Decoder, drafted: Sequence[Drafted]) -> RowPacker:
    packer = RowPacker(decoder, decoder.device)
    for d in drafted:
        cache, stop = d.text.cache, PREFIX + d.rows
        packer.add(
            d.tokens,
            d.positions,
            slots=cache.slots(PREFIX, stop),
            keys=cache.slots(0, stop),
            num_keys=stop,
            prefix=PREFIX,
            visible=d.visible(),
            block_positions=d.positions,
        )
    return packer


def one_pass(drafted: Sequence[Drafted], wanted: Sequence[int], *rest: Any) -> TokenPass:
    spans, slots, start = [], [], 0
    for d in drafted:
        cache, stop = d.text.cache, PREFIX + d.rows
        chain = d.parents == [*range(len(d.parents))]
        spans.append(RowSpan(start, start + d.rows, PREFIX, cache.slots(0, stop), None if chain else d.parents))
        where = cache.slots(PREFIX, stop)
        slots += range(where.start, where.stop) if isinstance(where, slice) else where.tolist()
        start += d.rows
    tokens = [t for d in drafted for t in d.tokens]
    positions = [p for d in drafted for p in d.positions]
    return TokenPass(tokens, positions, slots, spans, wanted, *rest)


def at_once(
    decoder: Decoder, pool: KVPool, drafted: Sequence[Drafted], wanted: Sequence[int], taps: NativeTaps | None = None
) -> list[int]:
    assert decoder.stack is not None
    return decoder.stack.decide(one_pass(drafted, wanted), pool, taps)


def batch(decoder: Decoder, seed: int) -> tuple[KVPool, list[Drafted], list[int]]:
    """A tree behind one row, a tree behind several, a chain, a bare row; rows of interest."""
    draw, pool = random.Random(seed), blank_pool(decoder)
    shapes = [(1, [draw.randrange(n) for n in range(1, 9)]), (3, [0, 0, 1, 0, 3]), (2, [0, 1, 2]), (1, [])]
    drafted = [Drafted(decoder, pool, *shape, seed + i, scattered=False) for i, shape in enumerate(shapes)]
    start, wanted = 0, []
    for d in drafted:
        wanted += [start + n for n in d.nodes]
        start += d.rows
    return pool, drafted, wanted


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("name", ["base", *SHAPES])
def test_one_call_chooses_what_its_parts_choose(name: str, kind: str) -> None:
    decoder = decoder_of(name, kind)
    for seed in range(3):
        pool, drafted, wanted = batch(decoder, seed)
        oracle = part_by_part(decoder, pool, drafted, wanted)
        assert at_once(decoder, pool, drafted, wanted) == oracle
        assert at_once(decoder, pool, drafted, wanted[::2]) == oracle[::2]
        assert at_once(decoder, pool, drafted, ()) == []
    assert len({*oracle}) > 3 or decoder.config.vocab_size < 30


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_taps_of_one_call_are_those_of_its_parts(kind: str) -> None:
    decoder = make({"num_layers": 4, "windows": (None, 9, None, None)}, kind)
    pool, drafted, wanted = batch(decoder, 3)
    oracle, taps = part_by_part(decoder, pool, drafted, wanted), Taps((0, 2, -1))
    decoder.run_layers(decoder.embed(packed(decoder, drafted).batch()), 0, 4, pool, taps)
    every = sum(d.rows for d in drafted)
    for layers, rows in (([0, 2, 3], [1, 4, 4, 0]), ([3], [*range(every)]), ([0, 3], None), ([2], []), ([], [1])):
        count = every if rows is None else len(rows)
        room = torch.full((len(layers), count, decoder.config.d_model), torch.nan, dtype=decoder.dtype)
        given = NativeTaps(tuple(layers), rows, room)
        assert at_once(decoder, pool, drafted, wanted, given) == oracle
        assert given.ms >= 0
        for layer, states in zip(layers, room, strict=True):
            right = taps.hidden[layer if layer < 3 else -1]
            assert torch.equal(states, right if rows is None else right[rows])
    wrong: list[tuple[list[int], list[int] | None, int]] = [([4], [0], 1), ([-1], [0], 1), ([2, 2], [0], 1)]
    wrong += [([0], [every], 1), ([0], [-1], 1), ([0], [0], 2), ([0], None, every + 1)]
    for layers, rows, count in wrong:
        room = torch.full((len(layers), count, decoder.config.d_model), torch.nan, dtype=decoder.dtype)
        with pytest.raises(ValueError):
            at_once(decoder, pool, drafted, wanted, NativeTaps(tuple(layers), rows, room))
        assert room.isnan().all()


def drawn_at_once(
    decoder: Decoder, of: tuple[KVPool, list[Drafted], list[int]], samplers: Sequence[SequenceSampler]
) -> tuple[list[int], list[int], list[torch.Tensor]]:
    """Choices of a `batch`, by compiled code and by each sequence's own sampler, and the rows of logits of both."""
    pool, drafted, wanted = of
    assert decoder.stack is not None
    logits = torch.full((len(wanted), decoder.config.vocab_size), torch.nan)
    rules, masks = b"".join(sampler.rules for sampler in samplers), None
    if any(sampler.matcher is not None for sampler in samplers):
        masks = torch.full((len(wanted), (decoder.config.vocab_size + 31) // 32), -1, dtype=torch.int32)
        owners = [sampler for d, sampler in zip(drafted, samplers, strict=True) for _ in d.nodes]
        for row, sampler in zip(masks, owners, strict=True):
            if sampler.matcher is not None:
                sampler.matcher.fill([], row)
    found = decoder.stack.decide(one_pass(drafted, wanted, (), rules, logits, masks), pool)
    oracle, parts, begin = [], [], 0
    for d, sampler in zip(drafted, samplers, strict=True):
        parts.append(logits[begin : begin + len(d.nodes)])
        places = [d.positions[n] + 1 for n in d.nodes]
        oracle += sampler.choose(parts[-1], None, places).tolist()
        begin += len(d.nodes)
    return found, oracle, parts


def sampler_of(decoder: Decoder, params: dict[str, Any], seed: int = 1, index: int = 0, matcher: Any = None) -> Any:
    asked, vocab = SamplingParams(**{"temperature": 1.0} | params), decoder.config.vocab_size
    return SequenceSampler(asked, [1], seed=seed, sample_index=index, vocab_size=vocab, matcher=matcher)


def check_draws(decoder: Decoder, seeds: int, matcher: Callable[[int, int], Any]) -> None:
    """Under rules in turns, with the matcher that is given for a seed and a sequence: nearly all are chosen at once."""
    chosen: list[bool] = []
    for seed in range(seeds):
        made = batch(decoder, seed)
        rules = [TRUNCATED[(seed + i) % len(TRUNCATED)] for i in range(len(made[1]))]
        samplers = [sampler_of(decoder, own, seed, i, matcher(seed, i)) for i, own in enumerate(rules)]
        found, oracle, _ = drawn_at_once(decoder, made, samplers)
        assert all(mine in (-1, wanted) for mine, wanted in zip(found, oracle, strict=True))
        chosen += [mine >= 0 for mine in found]
    assert chosen.count(True) > 10 * chosen.count(False)


TRUNCATED: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 2.5, "top_k": 3},
    {"temperature": 1.0, "top_k": 40},
    {"temperature": 1.5, "top_p": 0.7},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 0.0},
]


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["base", "window"])
def test_what_is_drawn_at_once_is_what_samplers_draw(name: str, kind: str) -> None:
    check_draws(decoder_of(name if name in SHAPES else "base", kind), 12, lambda seed, i: None)


class SomeTokens:
    """A matcher that allows the same few tokens everywhere.

    Args:
        allowed: [V] bool.
    """

    def __init__(self, allowed: torch.Tensor) -> None:
        self.allowed = allowed

    def __call__(self, output: Sequence[int]) -> torch.Tensor:
        return self.allowed

    def fill(self, output: Sequence[int], words: torch.Tensor) -> None:
        bits = torch.zeros(len(words) * 32, dtype=torch.uint8)
        bits[: len(self.allowed)] = self.allowed
        words.copy_(torch.from_numpy(np.packbits(bits.numpy(), bitorder="little").view(np.int32)))

    def within(self, output: Sequence[int], paths: Sequence[Sequence[int]]) -> list[bool]:
        return [all(self.allowed[path]) for path in paths]

    def forced(self, output: Sequence[int], most: int) -> list[int]:
        return []


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("most", [1, 2, 20, 10**6])
def test_what_a_grammar_allows_is_drawn_at_once(kind: str, most: int) -> None:
    """Sequences with a mask of ``most`` tokens, at the ends of the vocabulary too, beside one in four without."""
    decoder, draw = decoder_of("base", kind), torch.Generator()
    vocab = decoder.config.vocab_size

    def some(seed: int, i: int) -> SomeTokens | None:
        allowed = torch.zeros(vocab, dtype=torch.bool)
        allowed[torch.randperm(vocab, generator=draw.manual_seed(4 * seed + i))[:most]] = True
        allowed[vocab - 1 if seed % 2 else 0] = True
        return SomeTokens(allowed) if i % 4 != 3 else None

    check_draws(decoder, 9, some)


def test_where_no_bit_is_set_the_sampler_is_asked() -> None:
    """As where a grammar's parser failed."""

    class Failed(SomeTokens):
        def fill(self, output: Sequence[int], words: torch.Tensor) -> None:
            words.zero_()

    decoder = decoder_of("base", "bfloat16")
    made = batch(decoder, 3)
    failed = Failed(torch.ones(decoder.config.vocab_size, dtype=torch.bool))
    for temperature in (0.0, 1.0):
        matchers = (failed, None, failed, None)
        samplers = [sampler_of(decoder, {"temperature": temperature}, matcher=matcher) for matcher in matchers]
        found, oracle, _ = drawn_at_once(decoder, made, samplers)
        first, second, third = (len(d.nodes) for d in made[1][:3])
        assert found[:first] == [-1] * first and found[first : first + second] == oracle[first : first + second]
        assert found[first + second : first + second + third] == [-1] * third and found[-1] == oracle[-1]


def test_rules_that_compiled_code_does_not_know_are_left_to_the_sampler() -> None:
    decoder = decoder_of("base", "bfloat16")
    made = batch(decoder, 3)
    rules: list[dict[str, Any]] = [{"logit_bias": {3: 1.0}}, {"repetition_penalty": 1.2}, {"temperature": 0.0}, {}]
    samplers = [sampler_of(decoder, own) for own in rules]
    found, oracle, parts = drawn_at_once(decoder, made, samplers)
    first, second = len(made[1][0].nodes), len(made[1][1].nodes)
    assert found[: first + second] == [-1] * (first + second)
    assert found[first + second :] == oracle[first + second :]
    assert not any(part.isnan().any() for part in parts)
    with pytest.raises(ValueError, match="bytes for 4 sequences"):
        drawn_at_once(decoder, made, samplers[:2] + samplers)


def choices_of(logits: torch.Tensor, params: dict[str, Any], seed: int) -> tuple[list[int], list[int]]:
    """Choices after each row of logits [n, V], by compiled code and by the sampler."""
    rows, vocab = logits.shape
    logits = logits.contiguous()
    sampler = SequenceSampler(SamplingParams(**params), [1], seed=seed, sample_index=0, vocab_size=vocab)
    library = kernels.library()
    assert library is not None
    chosen = (ctypes.c_int64 * rows)()
    places = (ctypes.c_int64 * rows)(*range(5, 5 + rows))
    assert library.pl_draw(logits.data_ptr(), rows, vocab, sampler.rules, places, chosen) == 0
    return list(chosen), sampler.choose(logits, None, list(places)).tolist()


@pytest.mark.parametrize("params", TRUNCATED)
def test_draws_from_logits_of_all_kinds(params: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(1)
    flat = torch.randn(40, 1000, generator=generator)
    kinds = {
        "flat": flat,
        "peaked": flat * 6,
        "narrow vocabulary": flat[:, :5],
        "odd width": flat[:, :77] * 2,
        "many equal": (flat * 2).round(),
        "wide": torch.randn(8, 40_000, generator=generator) * 3,
        "offset": flat + 300,
    }
    for name, logits in kinds.items():
        found, oracle = choices_of(logits, params, seed=len(name))
        assert all(mine in (-1, wanted) for mine, wanted in zip(found, oracle, strict=True)), name
        assert found.count(-1) <= len(found) // 4 or name == "many equal", name


def test_no_draw_from_what_is_no_number() -> None:
    logits = torch.randn(3, 50)
    logits[0, 7], logits[1, 49], logits[2, 3] = torch.nan, torch.inf, -torch.inf
    assert choices_of(logits, {"temperature": 1.0}, 1)[0] == [-1, -1, -1]


def test_logits_that_are_no_numbers_are_chosen_as_numpy_does() -> None:
    decoder = make({"tied": False}, "float32", compiled=True)
    for row, value in ((3, 3e38), (9, -3e38)):
        values = decoder.stack.head.packed.view(-1, decoder.config.d_model, 16)  # type: ignore[union-attr]
        values[row // 16, :, row % 16] = value
    pool, drafted, wanted = batch(decoder, 1)
    oracle = part_by_part(decoder, pool, drafted, wanted)
    assert at_once(decoder, pool, drafted, wanted) == oracle
    assert {*oracle} & {3, 9}


def test_what_cannot_be_is_refused_before_anything_is_written() -> None:
    decoder = decoder_of("base", "bfloat16")
    pool = blank_pool(decoder)
    d = Drafted(decoder, pool, 1, [0, 0, 1], 2, scattered=False)
    keys, where = d.text.cache.slots(0, PREFIX + 4), d.text.cache.slots(PREFIX, PREFIX + 4)
    before = [part.clone() for part in (*pool.k, *pool.v)]

    def call(**changes: Any) -> list[int]:
        given: dict[str, Any] = {
            "tokens": d.tokens,
            "positions": d.positions,
            "slots": where,
            "spans": [RowSpan(0, 4, PREFIX, keys, [0, 0, 1])],
            "choice_rows": [0, 1, 2, 3],
        } | changes
        assert decoder.stack is not None
        return decoder.stack.decide(TokenPass(**given), pool)

    vocab = decoder.config.vocab_size
    wrong: list[dict[str, Any]] = [
        {"tokens": [1, 2, vocab, 3]},
        {"tokens": [1, 2, -1, 3]},
        {"choice_rows": [1, 0]},
        {"choice_rows": [2, 2]},
        {"choice_rows": [4]},
        {"choice_rows": [-1]},
        {"spans": [RowSpan(0, 4, PREFIX, keys, [0, 2, 1])]},
        {"spans": [RowSpan(0, 4, PREFIX, keys, [-1, 0, 1])]},
        {"spans": [RowSpan(0, 4, PREFIX, keys, [0, 0, 1, 2, 3])]},
        {"spans": [RowSpan(0, 3, PREFIX, keys, [0, 0])]},
        {"slots": slice(10**6, 10**6 + 4)},
        {"positions": [PREFIX, -1, 0, 0]},
    ]
    for changes in wrong:
        with pytest.raises(ValueError):
            call(**changes)
    for part, old in zip((*pool.k, *pool.v), before, strict=True):
        assert torch.equal(part.nan_to_num(7.5), old.nan_to_num(7.5))
    assert len(call()) == 4


def test_blocks_of_inputs_that_no_scale_fits() -> None:
    """int8 products of inputs that are tiny, infinite or no number: nothing finite comes of the last two."""
    generator = torch.Generator().manual_seed(0)
    linear = NativeLinear(torch.randn(16, 64, generator=generator).bfloat16(), None, quant="int8")
    for value, finite in ((1e-38, True), (3e38, True), (torch.inf, False), (torch.nan, False)):
        x = torch.zeros(2, 64, dtype=torch.bfloat16)
        x[0, 5] = value
        y = linear(x)
        assert bool(y[0].isfinite().all()) == finite or value == 3e38  # whose product may overflow
        assert not y[1].any()
        if value == 1e-38:
            assert y[0].abs().max() < 1e-30
