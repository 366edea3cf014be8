"""Nothing that comes from outside makes compiled code read or write where it must not: ids, positions, slots, keys."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kits.draft import text, view, want
from kits.native import Text, blank_pool, decoder_of, needs_kernels, tokens_of
from kits.tiny import assemble, run, tiny_config, tiny_decoder

from paceline import kernels
from paceline.core.sampling import SamplingParams
from paceline.draft.base import Drafter
from paceline.draft.draft_model import DraftModel, DraftModelConfig
from paceline.draft.hybrid import HybridConfig
from paceline.draft.registry import DrafterContext
from paceline.kernels.drafts import ChainStart, RingChain, recall, roll, sparse_view, write_keys
from paceline.kernels.layers import unsupported
from paceline.kernels.linear import NativeLinear, top
from paceline.kv.pool import KVPool
from paceline.kv.ring import RingCache
from paceline.kv.views import SinkWindow
from paceline.model.adapters import AdapterConfig, AdapterRange, LowRank, linear_shapes
from paceline.model.attention.base import Segment
from paceline.model.base import ForwardState
from paceline.model.decoder import Decoder
from paceline.model.rope import Rotation

CPU = torch.device("cpu")

PIECES = 80  # of the text; the draft's embedding has no more rows, the target's has 96
TOKENIZER = SimpleNamespace(get_vocab=lambda: {f"piece{i}": i for i in range(PIECES)}, name_or_path="")
UNKNOWN = 90  # an id that the target alone has
KERNELS = [pytest.param(True, marks=needs_kernels, id="compiled"), pytest.param(False, id="torch")]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def narrow_draft(compiled: bool) -> Any:
    config = tiny_config(head_dim=16, vocab_size=PIECES)
    return SimpleNamespace(
        folder=None,
        decoder=tiny_decoder(config, dtype=torch.float32, compiled=compiled),
        tokenizer=TOKENIZER,
        name="narrow",
    )


def narrow(compiled: bool, **options: Any) -> DraftModel:
    """A draft model that knows `PIECES` ids."""
    return DraftModel(DraftModelConfig(model="narrow", **options), narrow_draft(compiled))


def narrow_hybrid(compiled: bool) -> Drafter:
    loaded = narrow_draft(compiled)
    context = DrafterContext(load_model=lambda name, dtype: loaded, dtype=torch.float32, device=CPU)
    return HybridConfig(parts="suffix;depth=6;max_tokens=0+draft_model:narrow;depth=3").build(context)


def bound(drafter: DraftModel) -> DraftModel:
    drafter.bind(tiny_decoder().info("tiny", TOKENIZER), 4, 1000, CPU)
    return drafter


def known(length: int, seed: int = 0) -> list[int]:
    return [token % PIECES for token in text(length, seed)]


@pytest.mark.parametrize("compiled", KERNELS)
@pytest.mark.parametrize("make", [lambda compiled: narrow(compiled, depth=3), narrow_hybrid], ids=["draft", "hybrid"])
def test_other_requests_draft_on_and_the_drafter_stays(
    compiled: bool, make: Callable[[bool], Drafter], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_decoder(tiny_config(head_dim=16), dtype=torch.float32, compiled=compiled)
    info = target.info
    monkeypatch.setattr(target, "info", lambda name: info(name, TOKENIZER))
    prompts = [[UNKNOWN, *known(10)], known(12, 1), [*known(8, 2) * 3, UNKNOWN, *known(8, 2) * 2]]
    # Its answer leaves what the draft knows after a few tokens.
    rules = [GREEDY, replace(GREEDY, logit_bias=dict.fromkeys(range(PIECES, 96), -100.0)), GREEDY]
    requests = [*zip(prompts, rules, strict=True), ([5, 6, 7], replace(GREEDY, logit_bias={UNKNOWN: 100.0}))]
    plain = run(assemble(decoder=target), requests)
    engine = assemble(make(compiled), decoder=target)
    for _ in range(2):
        found = run(engine, requests)
        assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in plain]
        assert engine.round.failure is None
        drafted = [o.stats.sources.get("draft_model") for o in found]
        assert drafted[1] is not None and drafted[1].drafted > 0
        assert not any(d is not None and d.drafted for d in (drafted[0], drafted[2]))
    if engine.round.drafter.spec.name == "hybrid":  # type: ignore[attr-defined]
        assert found[2].stats.sources["suffix"].drafted > 0, "its look-up goes on"


def test_every_token_is_looked_at_once() -> None:
    class Counted(list[int]):
        asked: list[int] = []

        def __getitem__(self, index: Any) -> Any:
            if isinstance(index, int) and index >= 0:
                self.asked.append(index)
            return super().__getitem__(index)

    drafter = bound(narrow(False, depth=2))
    sequence = view(known(40))
    sequence.tokens = Counted(sequence.tokens)
    for _ in range(5):
        drafter.draft(want([sequence]))
        sequence.tokens.append(4)
    assert sorted(Counted.asked) == [*range(44)]
    sequence.tokens.append(UNKNOWN)
    for _ in range(3):
        drafter.draft(want([sequence]))
        sequence.tokens.append(4)
    assert max(Counted.asked) == 45 and Counted.asked.count(45) == 3, "nothing behind the unknown one matters"


class Cache(SimpleNamespace):
    """K and V of two layers, with an identity, as a pool has."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


def small_pool(decoder: Decoder, slots: int = 64) -> Cache:
    c = decoder.config
    shape = (c.num_kv_heads, slots, c.head_dim)
    return Cache(**{n: [torch.zeros(shape, dtype=decoder.dtype) for _ in range(2)] for n in "kv"})


def states(decoder: Decoder, rows: int) -> ForwardState:
    places = torch.arange(rows)
    hidden = torch.ones(rows, decoder.config.d_model, dtype=decoder.dtype)
    return ForwardState(hidden, places, places.clone(), None)


def one(rows: int, **changes: Any) -> Segment:
    """A tree of ``rows`` rows behind four keys."""
    seen = torch.ones(rows, rows, dtype=torch.bool).tril()
    made = Segment(0, rows, torch.arange(rows + 4), rows + 4, 4, seen, torch.arange(4, rows + 4))
    return replace(made, **changes)


FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "a slot behind the cache": ({"slots": torch.tensor([0, 1, 64, 3, 4])}, "a slot outside"),
    "a slot far below": ({"slots": torch.tensor([0, 1, 2, -2, 4])}, "a slot outside"),
    "a slot that overflows": ({"slots": torch.tensor([0, 2**63 - 1, 2, 3, 4])}, "a slot outside"),
    "slots that end behind the cache": ({"slots": slice(60, 65)}, "a slot outside"),
    "slots before the cache": ({"slots": slice(-1, 4)}, "a slot outside"),
    "too few slots": ({"slots": torch.arange(4)}, "where torch.int64 .5. is read"),
    "narrow slots": ({"slots": torch.arange(5, dtype=torch.int32)}, "torch.int32"),
    "too few positions": ({"positions": torch.arange(4)}, "where torch.int64 .5. is read"),
    "a negative position": ({"positions": torch.tensor([0, 1, -7, 3, 4])}, "negative position -7"),
    "narrow states": ({"hidden": torch.ones(5, 71)}, "hidden states"),
    "wide states": ({"hidden": torch.ones(5, 72, dtype=torch.float64)}, "hidden states"),
}
SEGMENTS: dict[str, tuple[list[Segment], str]] = {
    "a key behind the cache": ([one(5, keys=torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 64]))], "a slot outside"),
    "a negative key": ([one(5, keys=torch.tensor([0, -1, 2, 3, 4, 5, 6, 7, 8]))], "a slot outside"),
    "keys that end behind the cache": ([one(5, keys=slice(56, 65))], "a slot outside"),
    "keys before the cache": ([one(5, keys=slice(-1, 8))], "a slot outside"),
    "too few keys": ([one(5, keys=torch.arange(8))], "where torch.int64 .9. is read"),
    "a mask of fewer rows": ([one(5, visible=torch.ones(4, 5, dtype=torch.bool))], "where torch.bool .5, 5. is read"),
    "a mask of numbers": ([one(5, visible=torch.ones(5, 5))], "torch.float32"),
    "too few places": ([one(5, positions=torch.arange(4, 8))], "where torch.int64 .5. is read"),
    "fewer keys than rows": ([one(5, num_keys=4, keys=torch.arange(4), visible=None, positions=None)], "segments that"),
    "a prefix beyond the keys": ([one(5, prefix=10, visible=None, positions=None)], "segments that"),
    "a negative prefix": ([one(5, prefix=-1, visible=None, positions=None)], "segments that"),
    "rows in no segment": ([one(4)], "segments that"),
    "rows that are not there": ([one(6)], "segments that"),
    "rows in two segments": ([one(5), one(1, start=4, stop=5)], "segments that"),
    "segments out of order": ([one(2, start=3, stop=5), one(3)], "segments that"),
}


@torch.inference_mode()
def refused(decoder: Decoder, state: ForwardState, segments: list[Segment], message: str, stop: int = 2) -> None:
    """The pass raises, and nothing was written."""
    pool = small_pool(decoder)
    with pytest.raises(ValueError, match=message):
        state.attn = decoder.plan(segments, state.positions)
        decoder.run_layers(state, 0, stop, pool)
    assert not any(part.any() for part in (*pool.k, *pool.v))


@needs_kernels
@pytest.mark.parametrize("what", FIELDS)
def test_rows_that_cannot_be(what: str) -> None:
    decoder, (changes, message) = decoder_of("base", "float32"), FIELDS[what]
    state = states(decoder, 5)
    for name, value in changes.items():
        setattr(state, name, value)
    refused(decoder, state, [one(5)], message)


@needs_kernels
@pytest.mark.parametrize("what", SEGMENTS)
def test_segments_that_cannot_be(what: str) -> None:
    segments, message = SEGMENTS[what]
    refused(decoder_of("base", "float32"), states(decoder_of("base", "float32"), 5), segments, message)


@needs_kernels
def test_layers_that_are_not_there_and_what_is_fine() -> None:
    decoder = decoder_of("base", "float32")
    refused(decoder, states(decoder, 5), [one(5)], "a count, limit or range", stop=3)
    pool, state = small_pool(decoder), states(decoder, 5)
    state.attn = decoder.plan([one(5)], state.positions)
    with torch.inference_mode():
        decoder.run_layers(state, 0, 2, pool)
    assert all(part[:, :5].any() and not part[:, 5:].any() for part in (*pool.k, *pool.v))


@needs_kernels
def test_adapters_out_of_order_are_refused_below_python_too() -> None:
    """`Stack` looks at ranges itself; the library does so for whoever calls it otherwise."""
    decoder, wanted = decoder_of("base", "float32"), kernels.abi.CAdapterRange
    adapter = LowRank(AdapterConfig(layers=(0, 1)), linear_shapes(decoder.config)).start()
    stack: Any = decoder.stack
    table = ctypes.addressof(stack.adapters(adapter).table)
    for ranges in ([(3, 2)], [(0, 6)], [(0, 3), (2, 5)], [(-1, 2)]):
        made = (wanted * len(ranges))(*[wanted(start=a, stop=b, rank=8, adapter=table) for a, b in ranges])
        stack._ranges, kept = (lambda *_, made=made: made), stack._ranges
        try:
            state = states(decoder, 5)
            state.adapters = [AdapterRange(0, 5, adapter)]
            refused(decoder, state, [one(5)], "adapters for rows")
        finally:
            stack._ranges = kept


@needs_kernels
@pytest.mark.parametrize("change", ["dtype", "layers", "heads", "apart", "of other length"])
def test_caches_that_cannot_be(change: str) -> None:
    decoder = decoder_of("base", "float32")
    pool = small_pool(decoder)
    heads, slots, dim = pool.k[0].shape
    other = {
        "dtype": torch.zeros(heads, slots, dim, dtype=torch.bfloat16),
        "heads": torch.zeros(heads - 1, slots, dim),
        "apart": torch.zeros(heads, slots * 2, dim)[:, ::2],
        "of other length": torch.zeros(heads, slots - 1, dim),
    }
    if change == "layers":
        pool.v.pop()
    else:
        pool.v[1] = other[change]
    state = states(decoder, 5)
    state.attn = decoder.plan([one(5)], state.positions)
    with pytest.raises(ValueError, match="a cache of"):
        decoder.run_layers(state, 0, 2, pool)


def sparse(sinks: int = 2, window: int = 1, gaps: int = 9) -> Any:
    ones = torch.ones(gaps, 1, 8)
    return sparse_view(sinks, window, Rotation(ones, ones))


CHAINS: dict[str, tuple[dict[str, Any], str]] = {
    "an id that the embedding lacks": ({"pending": [3, 203]}, "a token id without"),
    "a negative id": ({"pending": [-1]}, "a token id without"),
    "a huge id": ({"pending": [2**62]}, "a token id without"),
    "nothing pending": ({"pending": []}, "a count, limit"),
    "no steps": ({"steps": 0}, "a count, limit"),
    "a negative position": ({"position": -1}, "a position that is negative"),
    "keys behind the cache": ({"keys": slice(60, 66)}, "a slot outside"),
    "keys before it": ({"keys": slice(-3, 60)}, "a slot outside"),
    "too few keys": ({"keys": torch.arange(5)}, "where torch.int64 .6. is read"),
    "a key behind the cache": ({"keys": torch.tensor([0, 1, 2, 3, 64, 5])}, "a slot outside"),
    "more steps than slots": ({"steps": 70}, "a slot outside"),
    "a view for several pending tokens": ({"view": sparse()}, "a count, limit"),
    "a view without a window": ({"view": sparse(window=0), "pending": [3]}, "a count, limit"),
    "a view of less than no sinks": ({"view": sparse(sinks=-1), "pending": [3]}, "a count, limit"),
    "a window without end": ({"view": sparse(window=2**62), "pending": [3]}, "a count, limit"),
    "sinks behind the cache": ({"view": sparse(), "pending": [3], "scratch": 63}, "a slot outside"),
    "sinks before it": ({"view": sparse(), "pending": [3], "scratch": -1}, "a slot outside"),
    "a gap without an angle": ({"view": sparse(gaps=2), "pending": [3]}, "a position that is negative"),
}


@needs_kernels
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("what", CHAINS)
def test_chains_that_cannot_be(what: str, kind: str) -> None:
    decoder, (changes, message) = decoder_of("base", kind), CHAINS[what]
    assert decoder.stack is not None
    pool = small_pool(decoder)
    fine = ChainStart(pending=[3, 4], position=0, steps=5, keys=slice(0, 6), floor=-torch.inf)
    with pytest.raises(ValueError, match=message):
        roll(decoder.stack, [fine, replace(fine, **changes)], pool, 203)
    assert not any(part.any() for part in (*pool.k, *pool.v)), "the other chain was begun"
    assert len(roll(decoder.stack, [fine], pool, 203)[0]) == 5


RINGS: dict[str, tuple[dict[str, Any], str]] = {
    "a root that the embedding lacks": ({"root": 203}, "a token id without"),
    "a negative root": ({"root": -1}, "a token id without"),
    "a position that is negative": ({"position": -1}, "a position that is negative"),
    "a first token": ({"position": 0, "start": 0}, "a position that is negative"),
    "memory from behind the root on": ({"start": 21}, "a position that is negative"),
    "no memory at all": ({"start": 20, "ring": 1}, "a position that is negative"),
    "no steps": ({"steps": 0}, "a count, limit"),
    "more steps than a ring holds": ({"steps": 6}, "a count, limit"),
    "a ring that is not there": ({"ring": 3}, "a slot outside"),
    "a ring before the first": ({"ring": -1}, "a slot outside"),
    "a ring far behind": ({"ring": 2**62}, "a slot outside"),
}


@needs_kernels
@pytest.mark.parametrize("what", RINGS)
def test_chains_over_rings_that_cannot_be(what: str) -> None:
    decoder, (changes, message) = decoder_of("base", "float32"), RINGS[what]
    c, mix = decoder.config, torch.full((2, 3), 1 / 3)
    sinks = 0 if what == "no memory at all" else 2
    ring = RingCache((2, c.num_kv_heads, c.head_dim), SinkWindow(sinks, 8), 4, 2, decoder.dtype, CPU)
    fine = RingChain(root=3, position=20, steps=5, ring=0, start=15, rules=None)
    with pytest.raises(ValueError, match=message):
        recall(decoder.stack, ring, [fine, fine._replace(**changes)], mix, -math.inf, 203)  # type: ignore[arg-type]
    assert not any(part.any() for part in (*ring.k, *ring.v)), "the other chain was begun"
    assert len(recall(decoder.stack, ring, [fine], mix, -math.inf, 203)[0]) == 5  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a count, limit"):
        recall(decoder.stack, ring, [fine], mix, -math.inf, 0)  # type: ignore[arg-type]


@needs_kernels
def test_k_and_v_that_cannot_be_written() -> None:
    decoder = decoder_of("base", "float32")
    c, ones = decoder.config, torch.ones(2, 3, 72)
    ring = RingCache((2, c.num_kv_heads, c.head_dim), SinkWindow(2, 8), 4, 2, decoder.dtype, CPU)
    slots = ring.k[0].shape[1]
    for states, rows, places, where, message in (
        (ones, [0, 1, 2], [0, 1, 2], [0, 1, slots], "a slot outside"),
        (ones, [0, 1, 2], [0, 1, 2], [0, -2, 1], "a slot outside"),
        (ones, [0, 1, 2], [0, 1, -2], [0, 1, 2], "a position that is negative"),
        (ones, [0, 1, 3], [0, 1, 2], [0, 1, 2], "a row that is not there"),
        (ones, [0, -1, 2], [0, 1, 2], [0, 1, 2], "a row that is not there"),
        (ones[:1], [0, 1, 2], [0, 1, 2], [0, 1, 2], "layers"),
        (ones, [0, 1, 2], [0, 1], [0, 1], "3 rows, 2 positions"),
        (ones.double(), [0, 1, 2], [0, 1, 2], [0, 1, 2], "is read"),
        ([ones[0], ones[1][:2]], [0, 1, 2], [0, 1, 2], [0, 1, 2], "is read"),
    ):
        with pytest.raises(ValueError, match=message):
            write_keys(decoder.stack, ring, states, rows, places, where)  # type: ignore[arg-type]
    assert not any(part.any() for part in (*ring.k, *ring.v))


@needs_kernels
def test_limits_and_counts_that_cannot_be() -> None:
    decoder = decoder_of("base", "float32")
    stack: Any = decoder.stack
    fine = ChainStart(pending=[3], position=0, steps=2, keys=slice(0, 6), floor=-torch.inf)
    for limit in (0, -1):
        with pytest.raises(ValueError, match="a count, limit"):
            roll(stack, [fine], small_pool(decoder), limit)
    with pytest.raises(ValueError, match="a count, limit"):
        top(torch.ones(2, 5), 0)
    assert len(top(torch.ones(2, 5), 1)[0]) == 2
    for states_of_another_shape in (torch.ones(2, 71), torch.ones(72), torch.ones(2, 72, dtype=torch.float64)):
        with pytest.raises(ValueError, match="hidden states"):
            stack.logits(states_of_another_shape)


@needs_kernels
def test_one_product_takes_rows_alone() -> None:
    linear = NativeLinear(torch.ones(4, 8), None)
    for shape in ((8,), (2, 2, 8)):
        with pytest.raises(ValueError, match="into a product of"):
            linear(torch.ones(shape))


@needs_kernels
def test_entry_points_say_what_they_refuse() -> None:
    """Without Python between: codes of `Refusal`, and nothing is touched (the addresses lead nowhere)."""
    path = kernels.library().path  # type: ignore[union-attr]
    bare = ctypes.CDLL(path)
    stack: Any = decoder_of("base", "float32").stack
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    assert bare.pl_top(pointer(), number(1), number(5), number(6), pointer(), pointer()) == 6
    assert bare.pl_top(pointer(), number(1), number(5), number(0), pointer(), pointer()) == 6
    model = ctypes.byref(stack._model)
    assert bare.pl_logits(model, pointer(), number(-1), pointer(), 1) == 6
    assert bare.pl_linear(ctypes.byref(stack.head.struct), pointer(), number(-1), pointer(), 1) == 6


def test_heads_that_cannot_share_k_and_v_are_not_compiled() -> None:
    config = tiny_config(head_dim=16, num_heads=5, num_kv_heads=2)
    assert "5 heads cannot share 2" in (unsupported(config, torch.float32, CPU) or "")


@needs_kernels
def test_a_pool_s_last_slot_and_scratch_are_inside() -> None:
    """What is allowed to the very end: nothing is refused that was fine."""
    decoder = decoder_of("base", "float32")
    c = decoder.config
    pool = KVPool(c.num_layers, c.num_kv_heads, c.head_dim, 32, decoder.dtype, CPU, scratch_slots=6)
    last = pool.k[0].shape[1]
    state = states(decoder, 6)
    state.slots = pool.scratch(6)
    assert state.slots.stop == last
    keys = torch.cat((torch.arange(4), torch.arange(last - 6, last)))
    state.attn = decoder.plan([one(6, keys=keys)], state.positions)
    with torch.inference_mode():
        assert not decoder.run_layers(state, 0, 2, pool).hidden.isnan().any()
    tokens = tokens_of(decoder, 20)
    assert len(Text(decoder, tokens, pool=blank_pool(decoder)).advance(20)) == 20
