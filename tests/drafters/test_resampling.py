"""Re-sampling for any drafter with level logits: what is left over, who gets which rows, one tree of both, refusals."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from kits.draft import Paths, paths, paths_of, proposals, text, view, want
from kits.medusa import medusa, random_heads, taught_heads
from kits.native import needs_kernels
from kits.tiny import VOCAB, assemble, run, streams, tiny_config, tiny_decoder, tiny_streams
from torch import Tensor

from paceline.core.errors import CapabilityError, ConfigError
from paceline.core.sampling import SamplingParams
from paceline.drafters import registry
from paceline.drafters.base import Drafter, DrafterSpec, SequenceView, StepFeatures
from paceline.drafters.levels import Said, best_levels, count, cut, product_trees
from paceline.drafters.proposal import Proposal
from paceline.drafters.registry import DrafterConfig, option
from paceline.drafters.resampling import AGAIN, FRESH, Resampling, left_over, merge

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


# ---- the parts


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("levels", [1, 2, 3, 5])
def test_what_is_left_over_are_the_levels_behind_the_new_root(levels: int, short: bool) -> None:
    """After a tokens were accepted of a draft of N levels N - a - 1 are left (Algorithm 2)."""
    logits = draw(0, levels)
    said: Said = best_levels([(view([5]), logits)], K, True)[0] if short else logits
    drafted = 20, said
    assert left_over(None, 21, 0) is None and left_over(drafted, 20, 0) is None
    for accepted, threshold in itertools.product(range(levels + 1), range(levels)):
        rest = left_over(drafted, 21 + accepted, threshold)
        remaining = levels - accepted - 1
        if remaining <= threshold:
            assert rest is None
        elif short:
            assert rest == (said[0][accepted + 1 :], said[1][accepted + 1 :]) and count(rest) == remaining
        else:
            assert isinstance(rest, Tensor) and torch.equal(rest, logits[accepted + 1 :]) and count(rest) == remaining


@dataclass
class Options:
    """The three, of nobody in particular."""

    resample: Any
    extra: int = 4
    threshold: int = 0

    def require(self, name: str, holds: bool, rule: str) -> None:
        if not holds:
            raise ConfigError(name, rule, "")


@pytest.mark.parametrize(
    ("form", "most", "shares"),
    [
        ("off", 10, {0: (0, 0), 7: (7, 0), 20: (10, 0)}),
        ("top", 14, {0: (0, 0), 9: (9, 0), 10: (10, 0), 12: (10, 2), 14: (10, 4), 99: (10, 4)}),
        ("equal", 10, {0: (0, 0), 6: (6, 0), 7: (6, 1), 9: (6, 3), 10: (6, 4), 99: (6, 4)}),
        ("alone", 10, {0: (0, 0), 3: (0, 3), 4: (0, 4), 99: (0, 4)}),
    ],
)
def test_fresh_nodes_have_the_first_right_to_a_budget(form: str, most: int, shares: dict[int, tuple[int, int]]) -> None:
    made = Resampling(Options(form), 10, 3)
    assert made.most == most and made.on == (form != "off")
    for budget, share in shares.items():
        assert made.share(budget, again=False) == (min(10, budget), 0)
        if form != "off":
            assert made.share(budget, again=True) == share
            assert sum(share) <= budget
    assert Resampling(Options("alone", extra=30), 10, 3).most == 30


def test_what_is_left_over_is_used_next_or_never_and_as_far_as_there_is_room() -> None:
    logits, seen = draw(1, 5), view(text(9))
    made = Resampling(Options("top"), 10, 5)

    def kept() -> Resampling:
        made.keep(seen, logits)
        seen.tokens += [3, 4]
        return made

    for budget, depth, levels in ((99, 9, 3), (12, 9, 2), (99, 1, 1), (10, 9, 0), (99, 0, 0), (0, 9, 0)):
        rest = kept().take(seen, budget, depth)
        assert (0 if rest is None else count(rest)) == levels
        assert rest is None or torch.equal(rest, logits[2 : 2 + levels])  # type: ignore[arg-type]
        assert made.take(seen, 99, 9) is None  # never a second time
    kept().release([seen.key])
    assert made.take(seen, 99, 9) is None and not made._drafted
    off = Resampling(Options("off"), 10, 5)
    off.keep(seen, logits)
    assert not off._drafted  # off is free


@given(fresh=proposals(), again=proposals())
def test_both_trees_are_one_and_what_both_have_is_fresh(fresh: Proposal, again: Proposal) -> None:
    before, others = paths(fresh), paths(again)
    merged = merge(fresh, again)
    marks = merged.sources or [FRESH] * len(merged)
    found = paths(merged)
    assert paths(fresh) == before and found.keys() == before.keys() | others.keys()
    assert dict(zip(found, marks, strict=True)) == {path: FRESH if path in before else AGAIN for path in found}
    for path, score in found.items():
        if path in before:
            assert score == before[path]
        else:
            given_parent = others[path] - others.get(path[:-1], 0.0)
            assert score == pytest.approx(found.get(path[:-1], 0.0) + given_parent)
    assert merge(fresh, None) is merge(fresh, Proposal()) is fresh and not fresh.sources


def by_hand(seen: SequenceView, logits: Tensor, coupled: bool, k: int = K) -> Paths:
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


# ---- in both drafters: after any number of accepted tokens, however levels come


def streams_rig(**options: Any) -> tuple[Any, Callable[[SequenceView, Said], None]]:
    drafter = streams(k=K, nodes=10, **options)

    def tell(seen: SequenceView, said: Said) -> None:
        name = "stream_logits" if isinstance(said, Tensor) else "stream_levels"
        drafter.observe(StepFeatures([seen], [[seen.tokens[-1]]], [0], [[]], **{name: [said]}))  # type: ignore[arg-type]

    return drafter, tell


def medusa_rig(**options: Any) -> tuple[Any, Callable[[SequenceView, Said], None]]:
    drafter = medusa(random_heads(), nodes=10, topk=K, **options)
    drafter._k = K

    def tell(seen: SequenceView, said: Said) -> None:
        short = SimpleNamespace(best=lambda *call: [said])
        drafter._pass = SimpleNamespace(  # type: ignore[assignment]
            native=None if isinstance(said, Tensor) else short, logits=lambda states: [said]
        )
        shown = {-1: torch.zeros(1, 4)}
        drafter.observe(StepFeatures([seen], [[]], [0], [[]], shown, [slice(0, 1)], [len(seen.tokens) - 2]))

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

        def said(logits: Tensor, seen: SequenceView = seen, coupled: bool = coupled) -> Said:
            return best_levels([(seen, logits)], K, coupled)[0] if short else logits

        first = draw(seed)
        tell(seen, said(first))
        assert {*drafter.propose(want([seen])).sources[0][1:]} == {FRESH}
        seen.tokens += text(accepted + 1, seed)
        second = draw(seed + 1000)
        second[: max(0, LEVELS - accepted - 1)] += first[accepted + 1 :]  # the same places, better known now
        tell(seen, said(second))
        tell_plain(seen, said(second))
        tree = drafter.propose(want([seen], budget))
        tree.check()
        marks = dict(zip(paths_of(tree), tree.sources[0][1:], strict=True))
        assert len(marks) <= budget
        left = first[accepted + 1 :]
        room = {"top": max(0, min(5, budget - 10)), "equal": max(0, min(5, budget - 5)), "alone": min(5, budget)}[form]
        room = room if len(left) > threshold else 0
        again = likeliest(by_hand(seen, left[:room], coupled), room) if room else {}
        own = 0 if form == "alone" and room else min(10, budget) - (room if form == "equal" else 0)
        fresh = paths_of(plain.propose(want([seen], own)))
        assert {path for path, mark in marks.items() if mark == FRESH} == fresh.keys()
        assert {path for path, mark in marks.items() if mark == AGAIN} == again.keys() - fresh.keys()
        if form == "alone" and room:
            assert paths_of(tree) == pytest.approx(again)
            assert drafter._resampling._drafted == {}  # not a third time
        else:
            assert 1 in drafter._resampling._drafted
        both += len(again.keys() & fresh.keys())
        met.add((len(left) > threshold, bool(room)))
        drafter.release([1])
        assert not drafter._resampling._drafted
    assert met == {(True, True), (True, False), (False, False)} - ({(True, False)} if form == "alone" else set())
    assert both or form == "alone"  # duplicates were merged


def test_in_large_batches_streams_draft_the_best_path_alone() -> None:
    drafter, tell = streams_rig(resample="top", best_path_batch=2)
    views = [view(text(9, key), key) for key in range(2)]
    for step in range(3):
        for seen in views:
            tell(seen, draw(10 * step + seen.key))
        tree = drafter.propose(want(views if step else views[:1]))
        assert tree.counts == ([11] if not step else [1 + LEVELS] * 2) and not any(any(row[1:]) for row in tree.sources)
        for seen in views:
            seen.tokens.append(5)


def test_what_was_left_over_is_drafted_where_nothing_fresh_is_known() -> None:
    for rig in RIGS.values():
        drafter, tell = rig(resample="top")
        seen = view(text(9))
        tell(seen, draw(0))
        drafter.propose(want([seen]))
        seen.tokens.append(5)
        drafter.observe(
            StepFeatures([seen], [[5]], [0], [[]], stream_logits=[None])
        )  # a pass without states or streams
        tree = drafter.propose(want([seen]))
        assert tree.sources[0][1:] == [AGAIN] * 4


# ---- in the engine

CONFIG = tiny_config(head_dim=16)
PROMPTS = [[*range(20, 62)], [*range(30, 41)], [8], [*range(20, 54), 3, 9]]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=4, max_tokens=20, ignore_eos=True, frequency_penalty=0.5),
]
TIGHT = {"max_batch_rows": 60, "max_sequences": 5, "kv_tokens": 144, "block_size": 4}


def made(name: str, dtype: torch.dtype, **options: Any) -> Any:
    if name == "medusa":
        return medusa(taught_heads(CONFIG, tuple(map(tuple, PROMPTS))), dtype, nodes=8, extra=24, **options)
    return streams(trained=tiny_streams(CONFIG, dtype=dtype), k=12, nodes=12, extra=24, **options)


@pytest.mark.parametrize("way", ["float64", pytest.param("compiled", marks=needs_kernels)])
@pytest.mark.parametrize("form", ["top", "alone"])
@pytest.mark.parametrize("name", RIGS)
def test_answers_are_plain_ones_and_re_sampled_nodes_win_tokens(name: str, form: str, way: str) -> None:
    """With preemption, chunks and prefix hits; counted by depth."""
    dtype = torch.float64 if way == "float64" else torch.float32
    decoder = tiny_decoder(CONFIG, dtype=dtype, compiled=way == "compiled")
    jobs = [(prompt, PARAMS[i % 3]) for i, prompt in enumerate([*PROMPTS, *PROMPTS[::-1]])]
    drafter = made(name, dtype, resample=form)
    engine = assemble(drafter, decoder=decoder, **TIGHT)
    outputs = run(engine, jobs)
    assert engine.round.failure is None  # type: ignore[attr-defined]
    right = [o.outputs[0].token_ids for o in run(assemble(decoder=decoder), jobs)]
    assert [o.outputs[0].token_ids for o in outputs] == right
    assert sum(o.stats.preemptions for o in outputs) > 0 and not drafter._resampling._drafted
    stats = outputs[0].stats
    for o in outputs[1:]:
        stats = stats.merge(o.stats)
    assert stats.sources.keys() == {name, "re-sampled"}
    won, fresh = stats.sources["re-sampled"], stats.sources[name]
    assert won.accepted > 0 and fresh.accepted > 0 and sum(won.accepted_at) == won.accepted
    assert won.accepted + fresh.accepted == stats.accepted
    assert len(won.accepted_at) < LEVELS  # a level is gone when they are used


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
        propose = drafter.propose

        def watched(request: Any, propose: Any = propose, told: Any = told, kept: Any = kept) -> Any:
            kept |= {type(said) for _, said in drafter._resampling._drafted.values()}  # noqa: B023
            tree = propose(request)
            lists = tree
            told += zip(lists.tokens, lists.parents, [row[1:] for row in lists.sources], strict=True)
            return tree

        drafter.propose = watched
        run(engine, [(prompt, PARAMS[i % 2]) for i, prompt in enumerate(PROMPTS)])
        assert kept == {tuple if compiled else Tensor} and any(AGAIN in marks for _, _, marks in told)
        drafts.append(told)
    assert drafts[0] == drafts[1]


# ---- what is refused


@pytest.mark.parametrize("name", RIGS)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": 1}, "of no meaning without re-sampling"),
        ({"resample": "top", "threshold": 2}, "must be below the 2 levels that a draft of 3"),
        ({"resample": "equal", "extra": 10}, "must leave a fresh node: they are to be 10 together"),
        ({"resample": "top", "extra": 0}, "extra must be 1 or more"),
        ({"resample": "often"}, "resample"),
    ],
)
def test_options_that_cannot_be_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RIGS[name](**options)


def test_streams_refuse_what_has_one_path() -> None:
    with pytest.raises(ConfigError, match="a drawn chain has no second one"):
        registry.parse("streams,proposes=sampled,resample=top")
    with pytest.raises(ConfigError, match="the best path alone"):
        registry.parse("streams,chain=true,resample=top")


@pytest.mark.parametrize("spec", ["eagle:folder,resample=top", "draft_model:folder,topk=3,resample=equal"])
@pytest.mark.parametrize("form", ["{}", "hybrid:suffix+{}"])
def test_drafters_whose_logits_depend_on_drafted_tokens_refuse_with_the_reason(spec: str, form: str) -> None:
    asked = form.format(spec if form == "{}" else spec.replace(",", ";"))
    with pytest.raises(CapabilityError, match="logits of a level depend on the tokens drafted in front of it"):
        registry.build(registry.parse(asked))  # type: ignore[arg-type]
    with pytest.raises(CapabilityError, match="Leave extra out, or draft with lyanna, medusa or streams"):
        registry.parse(f"{spec.partition(',')[0]},extra=3")


def test_the_option_is_where_the_spec_has_level_logits() -> None:
    able = {row.name for row in registry.describe() if any(own.name == "resample" for own in row.options)}
    refusing = {name for name in registry.names() if "resample" in registry.config_class(name).refuses}
    assert able == {"lyanna", "medusa", "streams"} and refusing == {"eagle", "draft_model", "magicdec", "spire"}
    assert streams().spec.level_logits and medusa(random_heads()).spec.level_logits


@dataclass(frozen=True, kw_only=True)
class GuestConfig(DrafterConfig):
    """Of another package, which is mistaken about itself."""

    kind: ClassVar[str] = "guest"
    resample: str = option("off", help="")
    level_logits: bool = option(False, help="")

    def build(self, context: Any) -> Any:
        guest = Drafter()
        guest.spec = DrafterSpec(name="guest", level_logits=self.level_logits)
        return guest


def test_a_drafter_that_says_it_cannot_is_not_asked_to() -> None:
    with pytest.raises(CapabilityError, match="no level_logits"):
        registry.build(GuestConfig(resample="top"))
    for config in (GuestConfig(), GuestConfig(resample="top", level_logits=True)):
        assert registry.build(config).spec.name == "guest"
