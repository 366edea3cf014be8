"""The contract of every registered drafter, over the embedded model: what it proposes, costs and leaves behind."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from kits.contract import BUDGET, LIMITS, MODEL, PROMPTS, plain, reference, same

from paceline import LLM, ConfigError, PacelineError, SamplingParams, Speculation
from paceline.core.outputs import RequestOutput
from paceline.core.tree import TokenTree
from paceline.draft.base import DraftRequest
from paceline.draft.registry import describe, names

PEOPLE = {
    "type": "object",
    "properties": {"occupation": {"const": "a smith of the old town"}, "residence": {"const": "by the riverside"}},
    "required": ["occupation", "residence"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Case:
    """How a drafter is named, and the most passes that it needs for greedy answers of 48 tokens to `PROMPTS`."""

    drafter: str
    passes: int
    request: dict[str, Any] = field(default_factory=dict)  # of `SamplingParams`


CASES = {
    "ngram": Case("ngram", 130),
    "suffix": Case("suffix", 124),
    "prediction": Case("prediction", 25),
    "grammar": Case("grammar", 16, {"grammar": {"kind": "json_schema", "text": json.dumps(PEOPLE)}}),
    "draft_model": Case("draft_model", 63),
    "medusa": Case("medusa", 102),
    "hybrid": Case("hybrid:paceline-small-draft", 66),
    "streams": Case("streams", 89),
    "lyanna": Case("lyanna", 76),
    "eagle": Case("eagle", 75),
    "magicdec": Case("magicdec", 36),
    "spire": Case("spire", 76),
}
KINDS = pytest.mark.parametrize("kind", CASES)


def test_every_drafter_that_is_built_in_has_a_case() -> None:
    assert {row.name for row in describe() if row.origin == "built in"} - {"none"} == CASES.keys() <= {*names()}


def drafting(kind: str, **options: Any) -> LLM:
    return LLM(MODEL, drafter=CASES[kind].drafter, share=plain(), **LIMITS | {"budget": BUDGET} | options)


def params(kind: str, temperature: float = 0.0, **options: Any) -> SamplingParams:
    common = {"temperature": temperature, "seed": 5, "max_tokens": 48, "ignore_eos": not CASES[kind].request}
    return SamplingParams(**common | CASES[kind].request | options)


def answers(llm: LLM, kind: str, rules: SamplingParams) -> list[RequestOutput]:
    if kind == "prediction":
        wishes = [Speculation(prediction=tuple(o.outputs[0].token_ids)) for o in reference(rules)]
        jobs = [llm.job(p, rules, None, speculation=w) for p, w in zip(PROMPTS, wishes, strict=True)]
        outputs = llm._run(jobs, None)
    else:
        outputs = llm.generate(PROMPTS, rules)
    assert llm.engine.round.failure is None  # a drafter that fails costs no token: equal ids would not show it
    return outputs


@KINDS
def test_ids_are_those_of_plain_decoding_in_fewer_passes(kind: str) -> None:
    llm = drafting(kind)
    for temperature in (0.0, 1.0):
        rules = params(kind, temperature)
        outputs = answers(llm, kind, rules)
        same(outputs, reference(rules))
        drafted, passes = (sum(getattr(o.stats, name) for o in outputs) for name in ("accepted", "passes"))
        assert passes < sum(o.stats.passes for o in reference(rules))
        assert drafted == sum(o.outputs[0].origins.count("drafted") for o in outputs) > 0
        if temperature == 0:
            assert passes <= CASES[kind].passes, (kind, passes)


@KINDS
def test_proposals_are_trees_within_budget_and_depth(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = drafting(kind, budget=5)
    drafter, sizes = llm.engine.round.drafter, set()
    draft, release = drafter.draft, drafter.release
    open_keys: set[int] = set()

    def checked(want: DraftRequest) -> list[TokenTree]:
        trees = draft(want)
        for tree, (view, budget, deepest) in zip(trees, want.rows(), strict=True):
            tree.check()
            open_keys.add(view.key)
            assert len(tree) <= budget and tree.depth <= deepest
            assert len({*zip(tree.parents, tree.tokens, strict=True)}) == len(tree)  # no two siblings are one token
            assert all(0 <= token < plain().decoder.config.vocab_size for token in tree.tokens)
            sizes.add(len(tree))
        return trees

    def closed(keys: Sequence[int]) -> None:
        open_keys.difference_update(keys)
        release(keys)

    monkeypatch.setattr(drafter, "draft", checked)
    monkeypatch.setattr(drafter, "release", closed)
    same(answers(llm, kind, params(kind, max_tokens=30)), reference(params(kind, max_tokens=30)))
    assert max(sizes) > 0 and not open_keys


@KINDS
def test_preemption_and_prefix_hits_change_nothing(kind: str) -> None:
    """A pool for little more than one sequence; and one that has room for the texts of the requests before."""
    rules = params(kind, 0.8, max_tokens=36)
    for options, mark in (({"kv_memory": "3MiB", "max_model_len": 160}, "preemptions"), ({}, "cached_prompt_tokens")):
        llm = drafting(kind, **options)
        outputs = [*answers(llm, kind, rules), *answers(llm, kind, rules)]
        same(outputs, reference(rules) * 2)
        assert sum(o.stats.accepted for o in outputs)
        if mark == "preemptions" or llm.engine.round.drafter.spec.past == 0:  # else states are computed again
            assert sum(getattr(o.stats, mark) for o in outputs)


@KINDS
def test_ends_inside_of_accepted_paths(kind: str) -> None:
    """At some tokens that were drafted, as stop tokens, as a stop string and as the limit."""
    llm = drafting(kind)
    own, stopped = answers(llm, kind, params(kind))[-1].outputs[0], 0
    places = [i for i, origin in enumerate(own.origins) if origin == "drafted" and i > 2]
    stops = [params(kind, stop_token_ids=[own.token_ids[place]]) for place in places[:6:2]]
    for rules in (*stops, params(kind, max_tokens=places[2])):
        outputs = answers(llm, kind, rules)
        same(outputs, reference(rules))
        ends = [(o.outputs[0].finish_reason, o.outputs[0].origins[-1]) for o in outputs]
        stopped += ends.count(("stop", "drafted"))
    rules = params(kind, stop=[own.text[len(own.text) // 2 :][:4]])
    outputs = answers(llm, kind, rules)
    same(outputs, reference(rules))
    assert outputs[-1].outputs[0].finish_reason == "stop" and stopped


@KINDS
def test_samples_of_one_prompt_are_drafted_apart(kind: str) -> None:
    llm = drafting(kind)
    rules = params(kind, 1.0, n=3, max_tokens=24)
    outputs = answers(llm, kind, rules)
    same(outputs, reference(rules))
    assert sum(o.stats.accepted for o in outputs)


@KINDS
def test_after_forgetting_it_drafts_as_in_the_beginning(kind: str) -> None:
    """What is remembered of other requests makes drafts better, and no token another."""
    llm, rules = drafting(kind), params(kind, max_tokens=24)
    begun = [o.stats.passes for o in answers(llm, kind, rules)]
    answers(llm, kind, rules)
    llm.forget()
    assert [o.stats.passes for o in answers(llm, kind, rules)] == begun


@KINDS
def test_an_aborted_request_leaves_nothing(kind: str) -> None:
    llm, rules = drafting(kind), params(kind, max_tokens=24)
    stream = llm.stream(PROMPTS[0], rules)
    next(stream)
    stream.close()
    assert not llm.engine.live
    same(answers(llm, kind, rules), reference(rules))


ROWS = {row.name: row.options for row in describe() if row.origin == "built in"}


@pytest.mark.parametrize("kind", ROWS)
def test_options_that_cannot_be_are_refused_by_name_and_value(kind: str) -> None:
    with pytest.raises(ConfigError, match="nosuch"):
        LLM(MODEL, drafter=f"{kind},nosuch=1", share=plain())
    for option in ROWS[kind]:
        with pytest.raises(PacelineError) as refused:
            LLM(MODEL, drafter=f"{kind},{option.name}=-7.5x", share=plain())
        assert option.name in str(refused.value) or "-7.5x" in str(refused.value), option
