"""A run that is cut anywhere and goes on in another engine says what one run says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.tiny import EOS, TOY_TEXTS, VOCAB, assemble, draft_model, run, tiny_decoder

from paceline.core.errors import ConfigError
from paceline.core.outputs import RequestOutput
from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine
from paceline.engine.live import LiveRequest

pytestmark = pytest.mark.timeout(120)
TARGET = tiny_decoder()
PROMPT = torch.randint(10, VOCAB, (21,), generator=torch.Generator().manual_seed(3)).tolist()
GREEDY = SamplingParams(temperature=0, seed=1, max_tokens=14, ignore_eos=True)
WARM = SamplingParams(temperature=1, seed=5, max_tokens=14, n=3)
CASES = {
    "greedy": GREEDY,
    "samples": WARM,
    "rules": replace(
        WARM, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2, min_tokens=6, stop_token_ids=[20, 30]
    ),
    "logprobs": replace(GREEDY, logprobs=2, prompt_logprobs=1),
    "stop": replace(WARM, stop=["b", "cd"], n=2),
}


def engine(drafting: bool = False) -> Engine:
    return assemble(draft_model(depth=3) if drafting else None, decoder=TARGET, texts=TOY_TEXTS)


WHOLE = {name: run(engine(), [(PROMPT, params)])[0] for name, params in CASES.items()}


def finish(runner: Engine, live: LiveRequest) -> RequestOutput:
    while live.ended is None:
        runner.step()
    assert not runner.live and not runner.busy
    runner.pool.check_integrity()
    return runner.output(live)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(CASES)), st.data(), st.booleans())
def test_a_run_cut_anywhere_goes_on_with_the_same_tokens(name: str, data: st.DataObject, drafting: bool):
    whole, params = WHOLE[name], CASES[name]
    cuts = [data.draw(st.integers(0, len(sample.token_ids))) for sample in whole.outputs]
    runner = engine(drafting)
    said = [sample.token_ids[:cut] for sample, cut in zip(whole.outputs, cuts, strict=True)]
    live = runner.live[runner.submit(PROMPT, params, resume_tokens=said)]
    told = [""] * params.n
    told_ids: list[list[int]] = [[] for _ in told]
    heads = [live.sequences[i].checker.stable_text() for i in range(params.n)]
    while live.ended is None:
        runner.step()
        for chunk in runner.chunks(live):
            told[chunk.index] += chunk.text
            told_ids[chunk.index] += chunk.token_ids
    again = finish(runner, live)
    for i, (one, other) in enumerate(zip(again.outputs, whole.outputs, strict=True)):
        assert (one.token_ids, one.text) == (other.token_ids, other.text)
        assert (one.finish_reason, one.stop_reason, one.seed) == (other.finish_reason, other.stop_reason, other.seed)
        assert one.token_ids[: cuts[i]] + told_ids[i] == other.token_ids
        assert heads[i] + told[i] == other.text
        if params.logprobs is not None:
            assert one.logprobs is not None and other.logprobs is not None
            assert [*map(list, one.logprobs[cuts[i] :])] == [*map(list, other.logprobs[cuts[i] :])]
            assert not any(one.logprobs[: cuts[i]]) and (one.cumulative_logprob is None) == (cuts[i] > 0)
    if params.prompt_logprobs is not None and again.stats.passes:
        assert [row and [*row] for row in again.prompt_logprobs or ()] == [
            row and [*row] for row in whole.prompt_logprobs or ()
        ]
    assert again.stats.emitted == sum(len(s.token_ids) for s in whole.outputs) - sum(cuts)


def test_what_was_said_to_its_end_ends_at_once_and_is_told():
    whole, ended = WHOLE["greedy"].outputs[0], []
    runner = engine()
    request_id = runner.submit(PROMPT, GREEDY, resume_tokens=[whole.token_ids], on_end=ended.append)
    live = runner.live[request_id]
    assert runner.busy and not ended
    assert runner.step() == [live] == ended and live.ended is not None
    output = runner.output(live)
    assert output.outputs[0].finish_reason == "length" and output.stats.passes == 0 and not runner.busy


def test_a_drawn_seed_is_known_and_goes_on():
    params = replace(WARM, seed=None, n=1, ignore_eos=True)
    first = engine()
    live = first.live[first.submit(PROMPT, params)]
    whole = finish(first, live).outputs[0]
    second = engine()
    again = second.submit(PROMPT, replace(params, seed=live.seed), resume_tokens=[whole.token_ids[:5]])
    assert finish(second, second.live[again]).outputs[0].token_ids == whole.token_ids


@pytest.mark.parametrize(
    ("said", "params", "word"),
    [
        ([[1], [2]], GREEDY, "n=1"),
        ([[VOCAB]], GREEDY, "ids go from 0"),
        ([[20] * 15], GREEDY, "ends after 14"),
        ([[20, EOS, 20]], replace(GREEDY, ignore_eos=False), "ends after 2"),
    ],
)
def test_what_cannot_have_been_said_is_refused(said: list[list[int]], params: SamplingParams, word: str):
    runner = engine()
    with pytest.raises(ConfigError, match=word):
        runner.submit(PROMPT, params, resume_tokens=said)
    assert not runner.busy
