"""Chains and trees drafted in one compiled call, against the same a pass at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from kits.draft import paths_of
from kits.native import Text

from paceline import kernels
from paceline.api.llm import LLM
from paceline.core.sampling import SamplingParams, SequenceSampler
from paceline.core.tree import TokenTree
from paceline.draft.base import DraftRequest
from paceline.draft.draft_model import DraftModel
from paceline.kernels.drafts import ChainStart, TreeStart, grow, roll
from paceline.kv.pool import KVPool
from paceline.model.decoder import Decoder

pytestmark = pytest.mark.skipif(kernels.unavailable() is not None, reason=str(kernels.unavailable()))
PROMPTS = ([5, 9, 200, 31, 77], [400, 12, 8], [1000, 1001, 1002, 1003, 1004, 1005, 1006])
STEPS = (12, 5, 1)


@pytest.fixture(scope="module", params=["float32", "bfloat16", "int8"])
def decoder(request: pytest.FixtureRequest) -> Decoder:
    return LLM("paceline-small-draft", dtype=request.param, kernels="native").decoder


def make_pool(decoder: Decoder) -> KVPool:
    return KVPool(*decoder.cache_shape, 512, decoder.dtype, decoder.device)


def one_by_one(
    decoder: Decoder, prompt: Sequence[int], steps: int, limit: int, sampler: SequenceSampler | None = None
) -> list[tuple[int, float]]:
    """The chain behind the prompt: the first token, then one a pass."""
    text = Text(decoder, prompt, pool=make_pool(decoder))
    logits = text.advance(len(prompt))[-1:, :limit]
    found = []
    for step in range(steps):
        scores = logits if sampler is None else sampler.scores(logits, None, [len(prompt) + step])
        best = scores.log_softmax(-1).max(-1)
        found.append((int(best.indices), float(best.values)))
        text.tokens.append(found[-1][0])
        logits = text.advance(1)[:, :limit]
    return found


def rolled(
    decoder: Decoder,
    steps: Sequence[int],
    floor: float,
    limit: int,
    scattered: bool,
    samplers: Sequence[SequenceSampler] | None = None,
) -> list[list[tuple[int, float]]]:
    """All prompts' chains in one call; of each prompt a different part is computed before."""
    assert decoder.stack is not None
    pool = make_pool(decoder)
    chains = []
    for index, (prompt, count) in enumerate(zip(PROMPTS, steps, strict=True)):
        text = Text(decoder, prompt, pool=pool)
        if index:
            text.advance(index)
        cache = text.cache
        pending = prompt[index:]
        cache.reserve(len(pending) + count)
        keys = cache.slots(0, len(prompt) + count - 1)
        if scattered:
            assert isinstance(keys, slice)
            keys = torch.arange(keys.start, keys.stop)
        rules = None if samplers is None else samplers[index].rules
        chains.append(ChainStart(pending, index, count, keys, floor, rules))
    return roll(decoder.stack, chains, pool, limit)


@pytest.mark.parametrize("limit", [8192, 3000])
def test_coupled_chains_are_drawn_with_the_samplers_noise(decoder: Decoder, limit: int) -> None:
    asked = [{"temperature": 1.0}, {"temperature": 0.7, "top_k": 50, "top_p": 0.9}, {"temperature": 0.0}]
    differ = 0
    for seed in range(3):
        samplers = [
            SequenceSampler(SamplingParams(**params), prompt, seed=seed, sample_index=0, vocab_size=limit)  # type: ignore[arg-type]
            for params, prompt in zip(asked, PROMPTS, strict=True)
        ]
        jobs = zip(PROMPTS, STEPS, samplers, strict=True)
        expected = [one_by_one(decoder, prompt, steps, limit, sampler) for prompt, steps, sampler in jobs]
        found = rolled(decoder, STEPS, -math.inf, limit, seed == 1, samplers)
        for one, many in zip(expected, found, strict=True):
            assert [t for t, _ in many] == [t for t, _ in one]
            assert [q for _, q in many] == pytest.approx([q for _, q in one], abs=1e-3)
        differ += [t for t, _ in found[0]] != [t for t, _ in one_by_one(decoder, PROMPTS[0], STEPS[0], limit)]
    assert differ


@pytest.mark.parametrize("scattered", [False, True], ids=["contiguous", "gathered"])
@pytest.mark.parametrize("limit", [8192, 3000])
def test_a_roll_is_the_chain_a_pass_at_a_time(decoder: Decoder, limit: int, scattered: bool) -> None:
    expected = [one_by_one(decoder, p, steps, limit) for p, steps in zip(PROMPTS, STEPS, strict=True)]
    found = rolled(decoder, STEPS, -math.inf, limit, scattered)
    for one, many in zip(expected, found, strict=True):
        assert [t for t, _ in many] == [t for t, _ in one]
        assert [q for _, q in many] == pytest.approx([q for _, q in one], abs=1e-4)


def test_a_roll_ends_below_its_floor(decoder: Decoder) -> None:
    expected = [one_by_one(decoder, p, 12, 8192) for p in PROMPTS]
    floor = sum(q for _, q in expected[0][:4]) - 1e-3  # the first chain's fourth token is just above it
    found = rolled(decoder, (12, 12, 12), floor, 8192, False)
    for chain, made in zip(expected, found, strict=True):
        scores = [sum(q for _, q in chain[: i + 1]) for i in range(12)]
        assert len(made) == next((i + 1 for i, score in enumerate(scores) if score < floor), 12)


TREES = {"dynamic": "topk=4,depth=4", "narrow": "topk=3,depth=5,nodes=6", "static": "branching=3x1x2"}


@pytest.mark.parametrize("shape", TREES)
def test_trees_grow_at_once_as_level_by_level(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tree of whole answers: greedy, coupled, and in batches of both, after accepted nodes of the one before."""
    llm = LLM("paceline-small", drafter=f"draft_model:paceline-small-draft,{TREES[shape]}", budget=12, threads=1)
    drafter = llm.engine.round.drafter  # type: ignore[attr-defined]
    assert isinstance(drafter, DraftModel)
    greedy, warm = (SamplingParams(temperature=t, seed=3, max_tokens=20, ignore_eos=True) for t in (0.0, 0.9))
    found: dict[bool, list[list[TokenTree]]] = {}
    answers = {}
    draft, sprout, calls = drafter.draft, drafter._sprout, []
    for compiled in (True, False):
        kept = found.setdefault(compiled, [])

        def spy(want: DraftRequest, kept: list[Any] = kept) -> list[TokenTree]:
            kept.append(draft(want))
            return kept[-1]

        monkeypatch.setattr(drafter, "draft", spy)
        monkeypatch.setattr(drafter, "_sprout", lambda *args: (calls.append(1), sprout(*args)))
        if not compiled:
            monkeypatch.setattr("paceline.draft.draft_model.compiles", lambda *_: False)
        outputs = llm.generate(["SELECT name FROM", "def f(x):\n    return x +"], greedy)
        outputs += llm.generate(["one two three four", "the cat sat on", "1 2 3"], [warm, greedy, warm])
        answers[compiled] = [(o.outputs[0].token_ids, o.stats.accepted, o.stats.drafted) for o in outputs]
        drafter.forget()
    assert answers[True] == answers[False] and sum(accepted for _, accepted, _ in answers[True]) > 10
    assert len(calls) == len(found[True]) == len(found[False])
    for mine, oracle in zip(found[True], found[False], strict=True):
        for tree, wanted in zip(mine, oracle, strict=True):
            assert paths_of([tree]) == pytest.approx(paths_of([wanted]), abs=1e-3)
    assert any(len({*tree.parents}) < len(tree.parents) for step in found[True] for tree in step)


def test_trees_that_cannot_grow_are_refused(decoder: Decoder) -> None:
    assert decoder.stack is not None
    pool = make_pool(decoder)
    cache = pool.open(expected=100)
    cache.reserve(30)
    fine = TreeStart([5, 6], 0, 6, cache.slots(0, 8), 9, 3, 40, None)
    ((tree, *counts),) = grow(decoder.stack, [fine], (1, 1, 1), 3, -math.inf, pool, 8192)
    assert len(tree) == 3 + 9 + 9 and counts == [6, 3]
    wrong = (
        {"pending": [8192]},
        {"pending": []},
        {"keys": torch.arange(10**6, 10**6 + 8)},
        {"max_depth": 4},
        {"max_depth": 0},
    )
    for changes in wrong:
        with pytest.raises(ValueError):
            grow(decoder.stack, [fine._replace(**changes)], (1, 1, 1), 3, -math.inf, pool, 8192)
    for factors, topk, most in (((1, 0, 1), 3, 40), ((1, 1, 1), 0, 40), ((1, 1, 1), 3, 5)):
        with pytest.raises(ValueError):
            grow(decoder.stack, [fine._replace(most=most)], factors, topk, -math.inf, pool, 8192)
    ((short, forwarded, _),) = grow(decoder.stack, [fine._replace(room=2)], (1, 1, 1), 3, -math.inf, pool, 8192)
    assert forwarded == 0 and len(short) == 3  # no slot for a further level
