"""Outputs under a grammar: what is drafted, in whatever batch, changes no token, and all of it is valid."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import jsonschema
import pytest
from kit.ticks import watch_ticks
from kits.grammars import SCHEMA

from paceline import LLM, SamplingParams
from paceline.core.errors import ConfigError
from paceline.core.grammar import Grammar
from paceline.core.speculation import Speculation
from paceline.engine.grammar import compiler
from paceline.engine.grammar.matcher import GrammarMatcher
from paceline.papers.specpipe.round import PipelineRound

PROMPTS = ("Question: How many names are there?\n", "name[The Mill], food[English]", "As JSON:")
GRAMMAR = Grammar("json_schema", json.dumps(SCHEMA))
DRAFTERS = ("grammar", "suffix", "hybrid:grammar+suffix", "draft_model:paceline-small-draft", "eagle", "medusa")
DRAFTERS = (*DRAFTERS, "lyanna", "streams", "hybrid:grammar+paceline-small-draft", "spire", "magicdec")


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM("paceline-small", exact=True)


@cache
def ids(llm: LLM, prompts: tuple[str, ...] = PROMPTS, **options: Any) -> list[list[int]]:
    params = SamplingParams(**{"max_tokens": 60, "seed": 5, "grammar": GRAMMAR, **options})
    return [o.outputs[0].token_ids for o in llm.generate(prompts, params)]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafts_change_no_token(plain: LLM, drafter: str) -> None:
    drafting = LLM("paceline-small", drafter=drafter, budget=8, exact=True, share=plain)
    for temperature in (0.0, 1.0):
        expected = ids(plain, temperature=temperature)
        assert ids(drafting, temperature=temperature) == expected
        assert ids(drafting, PROMPTS[:1], temperature=temperature) == expected[:1]
        for tokens in expected:
            jsonschema.validate(json.loads(plain.tokenizer.decode(tokens, skip_special_tokens=True)), SCHEMA)


@pytest.mark.parametrize("kind", ["regex", "choice", "json_object"])
def test_other_kinds(plain: LLM, kind: Any) -> None:
    text = {"regex": "[a-z]{3,9} [0-9]{2}", "choice": '["yes", "no", "perhaps"]', "json_object": ""}[kind]
    drafting = LLM("paceline-small", drafter="hybrid:grammar+suffix", budget=8, exact=True, share=plain)
    for temperature in (0.0, 1.0):
        options = {"grammar": Grammar(kind, text), "temperature": temperature}
        assert ids(drafting, **options) == ids(plain, **options)


def test_preemption_and_what_was_said_change_no_token(plain: LLM) -> None:
    expected = ids(plain, temperature=1.0)
    small = LLM(
        "paceline-small", drafter="hybrid:grammar+suffix", exact=True, share=plain, kv_memory="1800KB", max_model_len=96
    )
    assert ids(small, temperature=1.0) == expected
    params = SamplingParams(max_tokens=60, seed=5, grammar=GRAMMAR, temperature=1.0)
    said = expected[0][:7]
    engine = plain.engine
    prompt = plain.tokenizer.encode(PROMPTS[0])
    engine.submit(prompt, params, request_id="again", resume_tokens=[said])
    live = engine.live["again"]
    while not live.finished:
        engine.step()
    assert live.sequences[0].output_ids == expected[0]


def test_forced_tokens_are_drafted_and_come_true(plain: LLM) -> None:
    drafting = LLM("paceline-small", drafter="grammar", budget=8, exact=True, share=plain)
    params = SamplingParams(max_tokens=60, seed=5, grammar=GRAMMAR, temperature=0)
    [forced] = drafting.generate(PROMPTS[:1], params)
    [alone] = plain.generate(PROMPTS[:1], params)
    assert forced.stats.passes < 0.7 * alone.stats.passes
    assert forced.stats.accepted > 0.9 * forced.stats.drafted
    [free] = drafting.generate(PROMPTS[:1], SamplingParams(max_tokens=8, temperature=0))
    assert free.stats.drafted == 0


@pytest.mark.parametrize("drafter", ["draft_model:paceline-small-draft", "grammar", "hybrid:grammar+suffix"])
def test_rounds_that_draft_ahead_need_no_more_passes(plain: LLM, drafter: str) -> None:
    """A pass of a pipeline is a tick: as many as tokens, one to fill its stages, and one for each wrong draft."""
    passes, ticks = {}, list[Any]()
    for name in ("serial", "mirror", "pipeline,stages=2"):
        drafting = LLM("paceline-small", drafter=drafter, round=name, budget=8, exact=True, share=plain)
        if isinstance(drafting.engine.round, PipelineRound):
            watch_ticks(drafting.engine.round, ticks.append)
        [found] = drafting.generate(PROMPTS[:1], SamplingParams(max_tokens=60, grammar=GRAMMAR, temperature=0))
        assert found.outputs[0].token_ids == ids(plain, PROMPTS[:1], temperature=0)[0]
        passes[name], count = found.stats.passes, len(found.outputs[0].token_ids)
    assert passes["mirror"] <= passes["serial"] < 0.5 * count
    assert len(ticks) <= count + 1 + passes["serial"]


def test_a_grammar_that_cannot_be_drafted_from_turns_no_drafts_off(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: GrammarMatcher, output: list[int], most: int) -> list[int]:
        raise ConfigError("the next token under a grammar", "it takes too long", "use a simpler grammar")

    monkeypatch.setattr(GrammarMatcher, "forced", fails)
    drafting = LLM("paceline-small", drafter="hybrid:grammar+suffix", round="mirror", exact=True, share=plain)
    assert ids(drafting, PROMPTS[:1], temperature=0) == ids(plain, PROMPTS[:1], temperature=0)
    assert drafting.engine.round.failure is None


def test_drafts_outside_of_the_grammar_never_become_rows(plain: LLM) -> None:
    """The prompt repeats what the look-up then drafts, and no token of it is allowed."""
    drafting = LLM("paceline-small", drafter="suffix", budget=8, exact=True, share=plain)
    params = SamplingParams(max_tokens=12, temperature=0, grammar=Grammar("regex", "(ab ){12}"))
    prompt = "ab 123 ab 123 ab 123 ab 123 ab 123 ab"
    [found] = drafting.generate(prompt, params)
    assert found.stats.drafted == found.stats.accepted
    assert found.outputs[0].token_ids == ids(plain, (prompt,), max_tokens=12, temperature=0, grammar=params.grammar)[0]


def test_a_request_chooses_to_do_without(plain: LLM) -> None:
    drafting = LLM("paceline-small", drafter="grammar", budget=8, exact=True, share=plain)
    params = SamplingParams(max_tokens=60, seed=5, grammar=GRAMMAR, temperature=0)
    engine, prompt = drafting.engine, plain.tokenizer.encode(PROMPTS[0])
    engine.submit(prompt, params, request_id="alone", speculation=Speculation(enabled=False))
    live = engine.live["alone"]
    while not live.finished:
        engine.step()
    assert live.sequences[0].stats.drafted == 0
    assert live.sequences[0].output_ids == ids(plain, PROMPTS[:1], temperature=0)[0]


def test_a_parser_that_fails_ends_its_own_request(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = ids(plain, PROMPTS[1:], grammar=None)

    def fails(self: GrammarMatcher, output: list[int], words: Any) -> None:
        raise RuntimeError("it is broken")

    monkeypatch.setattr(GrammarMatcher, "fill", fails)
    params = [SamplingParams(max_tokens=60, seed=5, grammar=grammar) for grammar in (GRAMMAR, None, None)]
    broken, *others = plain.generate(PROMPTS, params)
    assert broken.outputs[0].finish_reason == "error" and "it is broken" in (broken.outputs[0].error or "")
    assert [one.outputs[0].token_ids for one in others] == expected


HEAVY = Grammar("regex", "(a|b|ab|ba|aab|[a-z]{1,40}){1,60} z")


@pytest.mark.parametrize("attribute", ["max_tokens=3", 'stop="q"', 'stop_capture="c",stop="q"'])
def test_lexemes_that_cannot_be_taken_back_work_beside_drafts(plain: LLM, attribute: str) -> None:
    """One client's grammar changes no answer, and turns drafts off for nobody else."""
    grammar = Grammar("lark", f'start: "x" t " mill"\nt[{attribute}]: /[a-z]*/')
    drafting = LLM("paceline-small", drafter="hybrid:grammar+suffix", budget=8, exact=True, share=plain)
    for temperature in (0.0, 1.0):
        options = {"grammar": grammar, "temperature": temperature, "max_tokens": 20}
        assert ids(drafting, **options) == ids(plain, **options)
    assert drafting.engine.round.failure is None
    [found] = drafting.generate(PROMPTS[:1], SamplingParams(max_tokens=40, seed=5, grammar=GRAMMAR))
    assert found.stats.accepted > 4


def test_heavy_patterns_end_alike(plain: LLM) -> None:
    drafting = LLM("paceline-small", drafter="hybrid:grammar+paceline-small-draft", budget=8, exact=True, share=plain)
    params = [SamplingParams(max_tokens=40, seed=seed, grammar=HEAVY) for seed in range(6)]
    found, expected = drafting.generate(["Once"] * 6, params), plain.generate(["Once"] * 6, params)
    for one, own in zip(found, expected, strict=True):
        assert one.error is own.error is None and one.outputs[0].token_ids == own.outputs[0].token_ids
    assert sum(one.stats.accepted for one in found) > 15


def test_a_kept_grammar_keeps_no_failure(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request may do the same work, also behind one that asked for too much, or beside it."""
    monkeypatch.setattr(compiler, "STEP_FUEL", 70_000)
    grammar = Grammar("regex", f"{HEAVY.text} ")
    options = {"max_tokens": 40, "grammar": grammar}
    ends = [plain.generate("Once", SamplingParams(seed=seed, **options))[0].outputs[0] for seed in (0, 0, 2, 0)]
    assert {one.finish_reason for one in ends} == {"error"} and "too many expressions" in str(ends[0].error)
    assert len(ends[0].token_ids) > 1
    assert ends[0].token_ids == ends[1].token_ids == ends[3].token_ids
