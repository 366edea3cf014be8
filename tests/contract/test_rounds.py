"""The contract of every round, over the embedded model: plain decoding's ids in fewer passes, and nothing left."""

from __future__ import annotations

from typing import Any

import pytest
from kits.contract import BUDGET, LIMITS, MODEL, PROMPTS, plain, reference, same

from paceline import LLM, CapabilityError, ConfigError, SamplingParams
from paceline.engine.rounds import ROUNDS

CASES: dict[str, dict[str, Any]] = {
    "serial": {"drafter": "draft_model", "budget": BUDGET},
    "fused": {"drafter": "streams", "budget": BUDGET},
    "mirror": {"drafter": "draft_model,depth=3"},
    "pipeline,stages=2": {"drafter": "draft_model"},
}
KINDS = pytest.mark.parametrize("kind", CASES)


def test_every_round_has_a_case() -> None:
    assert {kind.split(",")[0] for kind in CASES} == ROUNDS.keys()


def drafting(kind: str, **options: Any) -> LLM:
    return LLM(MODEL, round=kind, share=plain(), **LIMITS | CASES[kind] | options)


def params(temperature: float = 0.0, **options: Any) -> SamplingParams:
    common = {"temperature": temperature, "seed": 5, "max_tokens": 40, "ignore_eos": True}
    return SamplingParams(**common | options)


@KINDS
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ids_are_those_of_plain_decoding_and_drafts_are_accepted(kind: str, temperature: float) -> None:
    llm, rules = drafting(kind), params(temperature)
    outputs = llm.generate(PROMPTS, rules)
    same(outputs, reference(rules))
    assert llm.engine.round.failure is None and llm.engine.round.name == kind.split(",")[0]
    drafted = sum(o.outputs[0].origins.count("drafted") for o in outputs)
    assert drafted > (10 if temperature else 30)
    if not kind.startswith("pipeline"):  # whose passes are ticks
        assert sum(o.stats.passes for o in outputs) + drafted <= 3 * 40


@KINDS
def test_preemption_samples_and_ends_change_nothing(kind: str) -> None:
    tight = drafting(kind, kv_memory="3MiB", max_model_len=160)
    rules = params(0.8, n=2, max_tokens=30)
    outputs = tight.generate(PROMPTS, rules)
    same(outputs, reference(rules))
    assert tight.engine.round.failure is None and sum(o.stats.preemptions for o in outputs)
    llm = drafting(kind)
    own = llm.generate(PROMPTS, params())[-1].outputs[0]
    stopped = 0
    for place in [i for i, origin in enumerate(own.origins) if origin == "drafted" and i > 2][:4:2]:
        rules = params(stop_token_ids=[own.token_ids[place]])
        outputs = llm.generate(PROMPTS, rules)
        same(outputs, reference(rules))
        stopped += [o.outputs[0].finish_reason for o in outputs].count("stop")
    assert stopped


@KINDS
def test_an_aborted_request_leaves_nothing(kind: str) -> None:
    llm, rules = drafting(kind), params(1.0)
    stream = llm.stream(PROMPTS[0], rules)
    next(stream)
    stream.close()
    assert not llm.engine.live
    same(llm.generate(PROMPTS, rules), reference(rules))


@pytest.mark.parametrize("kind", ["serial", "mirror", "mirror,rollout=process", "pipeline,stages=2"])
def test_after_forgetting_nothing_of_an_earlier_answer_is_found(kind: str) -> None:
    llm = LLM(MODEL, round=kind, share=plain(), **LIMITS | CASES.get(kind, {}) | {"drafter": "suffix"})
    stats = [llm.generate(PROMPTS[0], params())[0].stats for _ in range(2)]
    llm.forget()
    again = llm.generate(PROMPTS[0], params())[0].stats
    assert stats[0].accepted == again.accepted < stats[1].accepted  # which copies the first answer
    assert stats[0].cached_prompt_tokens == again.cached_prompt_tokens == 0 < stats[1].cached_prompt_tokens


@pytest.mark.parametrize("kind", ROUNDS)
def test_what_cannot_be_is_refused_by_name(kind: str) -> None:
    with pytest.raises(ConfigError, match="nosuch"):
        LLM(MODEL, round=f"{kind},nosuch=1", share=plain())
    with pytest.raises(CapabilityError):  # a drafter that it cannot run with
        LLM(MODEL, round=kind, share=plain(), drafter="medusa" if kind != "serial" else "streams")
