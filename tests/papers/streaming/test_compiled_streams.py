"""A fused pass in one compiled call says what the same pass says part by part: tokens, streams, and every K and V."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from kits.native import needs_kernels
from kits.tiny import EOS, assemble, run, streams, tiny_config, tiny_decoder, tiny_streams

from paceline.core.sampling import SamplingParams
from paceline.draft.base import Levels, StepFeatures
from paceline.draft.levels import best_levels
from paceline.engine.engine import Engine
from paceline.model.adapters import AdapterConfig
from paceline.model.decoder import Decoder
from paceline.papers.streaming.model import StreamSet
from paceline.papers.streaming.native import StreamCarrier, StreamRun, decide_streams

pytestmark = needs_kernels
# Heads of 8 and a feed-forward width of 45: the compiled layers pad both.
SHAPE = tiny_config(d_ff=45, num_layers=4, windows=(None, 24, None, 10))
KINDS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.bfloat16}
PROMPTS = [[*range(20, 62)], [*range(30, 41)], [8], [*range(20, 54), 3, 9], [*range(9, 90)]]
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
K = 8


def decoder_of(kind: str) -> Decoder:
    quant = "int8" if kind == "int8" else None
    return tiny_decoder(SHAPE, dtype=KINDS[kind], exact=kind == "int8", quant=quant, compiled=True)  # type: ignore[arg-type]


def trained(kind: str, **options: Any) -> StreamSet:
    layers = (2, 3)
    adapter = AdapterConfig(rank=4, layers=layers)
    return tiny_streams(SHAPE, dtype=KINDS[kind], layers=2, **{"adapter": adapter} | options)


@dataclass
class Heard:
    """All that came out of some answers."""

    answers: list[tuple[list[int], int, int, int]]
    said: dict[tuple[int, int], Levels]  # by sequence and length of its text: what the streams said there
    kv: list[torch.Tensor]
    stats: list[Any]
    layers: int


def play(engine: Engine, drafter: Any, requests: Sequence[tuple[list[int], SamplingParams]], compiled: bool) -> Heard:
    said: dict[tuple[int, int], Levels] = {}
    observe = drafter.observe

    def listen(step: StepFeatures) -> None:
        for view, scores in zip(step.sequences, step.levels, strict=True):
            if isinstance(scores, torch.Tensor):
                assert not compiled or len(requests) > len(PROMPTS)
                (scores,) = best_levels([(view, scores)], K, drafter.config.proposes == "coupled")
            if scores is not None:
                said[view.key, len(view.tokens)] = scores
        observe(step)

    drafter.observe = listen
    engine.round.compiled = compiled  # type: ignore[attr-defined]
    outputs = run(engine, requests)
    assert engine.round.failure is None
    pool = engine.pool
    kv = [part[:, : pool.num_tokens].clone() for part in (*pool.k, *pool.v)]
    answers = [(o.outputs[0].token_ids, o.stats.passes, o.stats.drafted, o.stats.accepted) for o in outputs]
    return Heard(answers, said, kv, [o.stats for o in outputs], sum(o.stats.row_layers for o in outputs))


CONDITIONS: dict[str, dict[str, Any]] = {
    "together": {},
    "one by one": {"max_sequences": 1},
    "few rows": {"max_batch_rows": 25},
    "tight pool": {"kv_tokens": 240, "block_size": 4},
}
RIDES = {"none": (9.0, 0.0, 1), "likely": (0.25, 0.07, 4), "tiles": (0.1, 0.02, 16), "all": (0.0, 0.0, 99)}


GRID = [(kind, ride, [*CONDITIONS][(i + 2 * j) % 4]) for i, kind in enumerate(KINDS) for j, ride in enumerate(RIDES)]


@pytest.mark.parametrize(("kind", "ride", "condition"), [*GRID, ("float32", "all", "one by one")])
def test_one_call_says_what_its_parts_say(
    kind: str, ride: str, condition: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids, counts, tokens and log q of every stream, and all K and V of main rows, bit for bit."""
    decoder = decoder_of(kind)
    assert decoder.stack is not None
    first, each, decoder.stack.free_rows = RIDES[ride]
    monkeypatch.setattr("paceline.papers.streaming.compiled.stream_prices", lambda *_: (first, each))
    for k in (K, 1):
        found = {}
        for compiled in (True, False):
            drafter = streams(trained=trained(kind), k=k, nodes=12)
            limits = CONDITIONS[condition]
            engine = assemble(drafter, decoder=decoder, **{"max_model_len": 200} | limits)
            found[compiled] = play(engine, drafter, [(p, GREEDY) for p in PROMPTS], compiled)
        same(found[True], found[False], k, budgets_vary=condition == "tight pool")
        rode, drafts = (sum(getattr(s, n) for s in found[True].stats) for n in ("rode", "stream_drafts"))
        assert drafts > 20
        assert {"none": rode == 0, "likely": rode <= drafts, "tiles": rode > 0}.get(ride, rode > 0)
        if ride == "all" and condition == "one by one":
            assert rode > drafts / 5


def same(one: Heard, parts: Heard, k: int, budgets_vary: bool = False, sampled: bool = False) -> None:
    """One call reads as many streams as the budget asks for, so that with another budget the next trees are others.
    Scores of sampled drafts come from other logarithms than torch's."""
    assert [ids for ids, *_ in one.answers] == [ids for ids, *_ in parts.answers]
    assert sum(accepted for *_, accepted in one.answers) > (5 if k > 1 else 1)  # chains are right less often
    for place in one.said.keys() & parts.said.keys():
        tokens, log_q = one.said[place]
        depth = len(tokens)
        wanted_tokens, wanted_q = parts.said[place]
        assert 1 <= depth <= len(wanted_tokens)
        assert tokens == [row[:k] for row in wanted_tokens[:depth]]
        if not sampled:
            assert log_q == [row[:k] for row in wanted_q[:depth]]
        for made, wanted in zip(log_q, wanted_q, strict=False):
            assert made == pytest.approx(wanted[:k], abs=1e-4)
    if not budgets_vary:
        assert one.answers == parts.answers and one.said.keys() == parts.said.keys()
        assert [s.stream_drafts for s in one.stats] == [s.stream_drafts for s in parts.stats]
        assert all(torch.equal(a, b) for a, b in zip(one.kv, parts.kv, strict=True))


def test_requests_of_other_kinds_in_between() -> None:
    """A step with a sampled request takes the long way, and the drafts go on from what it said."""
    hot = SamplingParams(temperature=0.9, seed=4, max_tokens=7, ignore_eos=True)
    penalised = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, repetition_penalty=1.3)
    requests = [(p, GREEDY) for p in PROMPTS] + [(PROMPTS[0], hot), (PROMPTS[1], penalised)]
    decoder = decoder_of("bfloat16")
    found = []
    for compiled in (True, False):
        drafter = streams(trained=trained("bfloat16"), k=K, nodes=8)
        engine = assemble(drafter, decoder=decoder, max_model_len=200)
        found.append(play(engine, drafter, requests, compiled))
    assert found[0].answers == found[1].answers


def test_no_draft_is_read_that_nobody_wants() -> None:
    """Behind the end of an answer, and where there is room for one more token."""
    decoder = decoder_of("float32")
    drafter = streams(trained=trained("float32"), k=K, nodes=6)
    engine = assemble(drafter, decoder=decoder, max_model_len=200)
    plain = run(assemble(decoder=decoder, max_model_len=200), [(PROMPTS[0], GREEDY)])[0].outputs[0].token_ids
    stop = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop_token_ids=[plain[9]])
    heard = play(engine, drafter, [(PROMPTS[0], stop), (PROMPTS[0], GREEDY)], True)
    assert len(heard.answers[0][0]) == plain.index(plain[9]) + 1
    lengths = [len(PROMPTS[0]) + len(ids) for ids, *_ in heard.answers]
    for key, length in zip(sorted({key for key, _ in heard.said}), lengths, strict=True):
        assert max(at for k, at in heard.said if k == key) < length - (length == max(lengths))
    assert EOS not in plain


def test_what_cannot_be_is_refused() -> None:
    decoder = decoder_of("bfloat16")
    stack = decoder.stack
    assert stack is not None
    pool = assemble(streams(trained=trained("bfloat16"), k=K), decoder=decoder).pool
    cache = pool.open()
    cache.reserve(4)
    from paceline.kernels.calls import RowSpan, TokenPass

    def call(carriers: Sequence[tuple[Any, ...]], **changes: Any) -> Any:
        rows = [StreamCarrier(*c) for c in carriers]
        riding = StreamRun(trained("bfloat16"), rows, K, pool.scratch(9))._replace(**changes)
        spans = [RowSpan(0, 4, 0, cache.slots(0, 4), [0, 0, 1])]
        asked = TokenPass([5, 6, 7, 8], [0, 1, 1, 2], cache.slots(0, 4), spans, [0, 1, 2, 3])
        return decide_streams(stack, asked, riding, pool)

    before = [part.clone() for part in (*pool.k, *pool.v)]
    for carriers in (
        [(1, 0, 3, 9, (), ())],  # no such span
        [(0, 1, 3, 9, (), ())],  # not the root
        [(0, 0, 3, 9, (), ()), (0, 0, 3, 9, (), ())],  # twice
        [(0, 0, 1, 9, (), [4])],  # no such node
        [(0, 0, 4, 9, (), ())],  # more streams than there are
        [(0, 0, 0, 9, (), ())],
        [(0, 0, 1, 9, (), [1, 0])],  # not ascending
        [(0, 0, 3, 9, (), range(4))],  # beyond the scratch slots
    ):
        with pytest.raises(ValueError):
            call(carriers)
    for changes in ({"k": 0}, {"k": 97}, {"scratch": slice(10**6, 10**6 + 9)}, {"scratch": slice(0, 2)}):
        with pytest.raises(ValueError):
            call([(0, 0, 3, 9, (), ())], **changes)
    assert all(torch.equal(a, b) for a, b in zip((*pool.k, *pool.v), before, strict=True))
    chosen, told, _ = call([(0, 0, 2, 9, (), [0, 2])])
    assert len(chosen) == 4 and told[0] is not None
