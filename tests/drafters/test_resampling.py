"""Re-sampling for any drafter with level logits: what is left over, who gets which rows, one tree of both, refusals."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kits.draft import Paths, paths, paths_of, text, view, want
from kits.medusa import medusa, random_heads, taught_heads
from kits.native import needs_kernels
from kits.tiny import VOCAB, assemble, run, streams, tiny_config, tiny_decoder, tiny_streams
from torch import Tensor

from paceline.core.errors import CapabilityError
from paceline.core.sampling import SamplingParams
from paceline.core.sequence import Sequence
from paceline.draft import registry
from paceline.draft.base import LevelScores, StepFeatures
from paceline.draft.levels import best_levels, cut, product_trees
from paceline.draft.resampling import AGAIN, FRESH

LEVELS, K = 3, 4
RULES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "warm": {"temperature": 0.8},
    "cut": {"temperature": 1.1, "top_k": 9, "top_p": 0.9},
    "penalised": {"temperature": 0.9, "frequency_penalty": 0.7},
}


def draw(seed: int, levels: int = LEVELS) -> Tensor:
    """[levels, VOCAB] logits."""
    return 2 * torch.randn(levels, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_hand(seen: Sequence, logits: Tensor, coupled: bool, k: int = K) -> Paths:
    """Every path through the k best tokens of each level, and the sum of its log q."""
    first, sampler = len(seen.tokens), seen.sampler
    if sampler.plain:
        scores = logits
    elif coupled:
        scores = sampler.scores(logits, None, [first + j for j in range(len(logits))])
    else:
        scores = sampler.process(logits)
    log_q = scores.log_softmax(-1)
    best = [row.topk(k).indices.tolist() for row in log_q]
    found: Paths = {}
    for depth in range(1, len(logits) + 1):
        for path in itertools.product(*best[:depth]):
            score = sum(float(log_q[j, token]) for j, token in enumerate(path))
            if score > float("-inf"):
                found[path] = score
    return found


def likeliest(whole: Paths, most: int) -> Paths:
    return {path: whole[path] for path in sorted(whole, key=lambda path: -whole[path])[:most]}


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("coupled", [False, True])
def test_product_trees_are_ranked_by_the_rules_and_noise_of_their_places(rules: str, coupled: bool) -> None:
    views = [view(text(7, key), key, **RULES[rules]) for key in range(3)]
    rows = [(views[0], draw(0), 9), (views[1], None, 9), (views[2], draw(2, 2), 5)]
    found = [paths(proposal) for proposal in product_trees(rows, K, coupled)]
    for (seen, logits, nodes), tree in zip(rows, found, strict=True):
        assert tree == pytest.approx({} if logits is None else likeliest(by_hand(seen, logits, coupled), nodes))
    short = best_levels([(views[0], draw(0))], K + 2, coupled)[0]
    assert paths(product_trees([(views[0], short, 9)], K, coupled)[0]) == found[0]
    assert cut(short, 1) == (short[0][1:], short[1][1:])


def streams_rig(**options: Any) -> tuple[Any, Callable[[Sequence, LevelScores], None]]:
    drafter = streams(k=K, nodes=10, **options)

    def tell(seen: Sequence, said: LevelScores) -> None:
        drafter.observe(StepFeatures([seen], [[seen.tokens[-1]]], levels=[said]))

    return drafter, tell


def medusa_rig(**options: Any) -> tuple[Any, Callable[[Sequence, LevelScores], None]]:
    drafter = medusa(random_heads(), nodes=10, topk=K, **options)
    drafter._k = K

    def tell(seen: Sequence, said: LevelScores) -> None:
        short = SimpleNamespace(best=lambda *call: [said])
        drafter._pass = SimpleNamespace(  # type: ignore[assignment]
            native=None if isinstance(said, Tensor) else short, logits=lambda states: [said]
        )
        shown = {-1: torch.zeros(1, 4)}
        drafter.observe(StepFeatures([seen], [[]], shown, [slice(0, 1)], [len(seen.tokens) - 2]))

    return drafter, tell


RIGS = {"streams": streams_rig, "medusa": medusa_rig}


@pytest.mark.parametrize(
    ("rules", "short"),  # compiled code, where levels in short come from, knows no penalties
    [(rules, short) for rules in RULES for short in (False, True) if not short or rules != "penalised"],
)
@pytest.mark.parametrize("form", ["top", "equal", "alone"])
@pytest.mark.parametrize("name", RIGS)
def test_levels_behind_a_rejection_are_used_once_more(name: str, form: str, rules: str, short: bool) -> None:
    """Below the new root, with the noise of their places, which levels in short had when they were made; beside the
    fresh draft or in its place. A path that both have is verified once, as a fresh one."""
    both, met = 0, set()
    for seed, (accepted, budget) in enumerate(itertools.product(range(4), (64, 12, 8, 1))):
        threshold, coupled = seed % 2, (seed + accepted) % 4 < 2
        proposes = "coupled" if coupled else "point"
        drafter, tell = RIGS[name](resample=form, threshold=threshold, extra=5, proposes=proposes)
        plain, tell_plain = RIGS[name](proposes=proposes)
        seen = view(text(20, seed), key=1, **RULES[rules])

        def said(logits: Tensor, seen: Sequence = seen, coupled: bool = coupled) -> LevelScores:
            return best_levels([(seen, logits)], K, coupled)[0] if short else logits

        first = draw(seed)
        tell(seen, said(first))
        assert {*drafter.draft(want([seen]))[0].marks} == {FRESH}
        seen.tokens += text(accepted + 1, seed)
        second = draw(seed + 1000)
        second[: max(0, LEVELS - accepted - 1)] += first[accepted + 1 :]  # the same places, better known now
        tell(seen, said(second))
        tell_plain(seen, said(second))
        [tree] = drafter.draft(want([seen], budget))
        tree.check()
        marks = dict(zip(paths(tree), tree.marks, strict=True))
        assert len(marks) <= budget
        left = first[accepted + 1 :]
        room = {"top": max(0, min(5, budget - 10)), "equal": max(0, min(5, budget - 5)), "alone": min(5, budget)}[form]
        room = room if len(left) > threshold else 0
        again = likeliest(by_hand(seen, left[:room], coupled), room) if room else {}
        own = 0 if form == "alone" and room else min(10, budget) - (room if form == "equal" else 0)
        fresh = paths_of(plain.draft(want([seen], own)))
        assert {path for path, mark in marks.items() if mark == FRESH} == fresh.keys()
        assert {path for path, mark in marks.items() if mark == AGAIN} == again.keys() - fresh.keys()
        if form == "alone" and room:
            assert paths(tree) == pytest.approx(again)
            assert drafter._resampling._drafted == {}  # not a third time
        else:
            assert 1 in drafter._resampling._drafted
        both += len(again.keys() & fresh.keys())
        met.add((len(left) > threshold, bool(room)))
        drafter.release([1])
        assert not drafter._resampling._drafted
    assert met == {(True, True), (True, False), (False, False)} - ({(True, False)} if form == "alone" else set())
    assert both or form == "alone"  # duplicates were merged


CONFIG = tiny_config(head_dim=16)
PROMPTS = [[*range(20, 62)], [*range(30, 41)], [8], [*range(20, 54), 3, 9]]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=4, max_tokens=20, ignore_eos=True, frequency_penalty=0.5),
]


def made(name: str, dtype: torch.dtype, **options: Any) -> Any:
    if name == "medusa":
        return medusa(taught_heads(CONFIG, tuple(map(tuple, PROMPTS))), dtype, nodes=8, extra=24, **options)
    return streams(trained=tiny_streams(CONFIG, dtype=dtype), k=12, nodes=12, extra=24, **options)


@needs_kernels
@pytest.mark.parametrize("name", RIGS)
def test_levels_in_short_draft_what_logits_do(name: str) -> None:
    """Node for node over whole answers: what the compiled pass says, and what its parts say one by one."""
    decoder = tiny_decoder(CONFIG, dtype=torch.float32, compiled=True)
    drafts = []
    for compiled in (True, False):
        drafter = made(name, torch.float32, resample="top")
        engine = assemble(drafter, decoder=decoder)
        if name == "streams":
            engine.round.compiled = compiled  # type: ignore[attr-defined]
        elif not compiled:
            drafter._pass.native = None
        told: list[tuple[list[int], list[int], list[int]]] = []
        kept: set[type] = set()
        draft = drafter.draft

        def watched(request: Any, draft: Any = draft, told: Any = told, kept: Any = kept) -> Any:
            kept |= {type(said) for _, said in drafter._resampling._drafted.values()}  # noqa: B023
            trees = draft(request)
            told += [(tree.tokens, tree.parents, tree.marks) for tree in trees]
            return trees

        drafter.draft = watched
        run(engine, [(prompt, PARAMS[i % 2]) for i, prompt in enumerate(PROMPTS)])
        assert kept == {tuple if compiled else Tensor} and any(AGAIN in marks for _, _, marks in told)
        drafts.append(told)
    assert drafts[0] == drafts[1]


@pytest.mark.parametrize("spec", ["eagle:folder,resample=top", "draft_model:folder,topk=3,resample=equal"])
@pytest.mark.parametrize("form", ["{}", "hybrid:suffix+{}"])
def test_drafters_whose_logits_depend_on_drafted_tokens_refuse_with_the_reason(spec: str, form: str) -> None:
    asked = form.format(spec if form == "{}" else spec.replace(",", ";"))
    with pytest.raises(CapabilityError, match="logits of a level depend on the tokens drafted in front of it"):
        registry.build(registry.parse(asked))  # type: ignore[arg-type]
    with pytest.raises(CapabilityError, match="Leave extra out, or use a drafter that has it"):
        registry.parse(f"{spec.partition(',')[0]},extra=3")
