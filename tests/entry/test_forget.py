"""A prompt asked after `LLM.forget` is answered as if it were the first, wherever the drafter keeps answers."""

from __future__ import annotations

import pytest

from paceline import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
PROMPT = "def read_lines(path):\n"
PLACES = {
    "in a part of a hybrid": {"drafter": "hybrid:suffix+ngram", "budget": 8},
    "in sessions beside a model": {
        "drafter": "hybrid:suffix;depth=6+draft_model:paceline-small-draft;depth=6",
        "round": "mirror,kappa=2",
    },
    "in another process": {"drafter": "suffix,depth=6", "round": "mirror,kappa=2,rollout=process"},
    "in a pipeline's source": {"drafter": "suffix", "round": "pipeline,stages=2"},
}


def answered(llm: LLM) -> tuple[list[int], int]:
    """The answer, and how many of its tokens were drafted."""
    [output] = llm.generate(PROMPT, GREEDY)
    stats = output.stats
    assert stats.off_reason is None
    return output.outputs[0].token_ids, stats.accepted


@pytest.mark.parametrize("place", PLACES)
def test_nothing_of_an_earlier_answer_is_found(place: str) -> None:
    llm = LLM("paceline-small", threads=1, max_model_len=256, **PLACES[place])
    first = answered(llm)
    llm.forget()
    assert answered(llm) == first
    said, accepted = answered(llm)
    assert said == first[0] and accepted > first[1]  # without forgetting, the answer is drafted from itself


def test_k_v_of_a_prompt_is_computed_anew() -> None:
    llm = LLM("paceline-small-draft", threads=1, max_model_len=256)
    computed = []
    for forgets in (False, False, True):
        if forgets:
            llm.forget()
        cache = llm.engine.pool.open(list(range(20, 120)))
        computed.append(cache.committed)
        cache.release()
        llm.generate({"prompt_token_ids": list(range(20, 120))}, GREEDY)
    assert computed[0] == computed[2] == 0 < computed[1]
