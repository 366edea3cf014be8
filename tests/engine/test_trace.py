"""What a request's steps did, where it asks to see them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kits.tiny import VOCAB, assemble, draft_model, hybrid, streams, tiny_decoder

from paceline.core.sampling import SamplingParams
from paceline.core.speculation import Speculation
from paceline.draft.ngram import NgramConfig
from paceline.engine.engine import Engine

pytestmark = pytest.mark.timeout(120)
TARGET = tiny_decoder()
PARAMS = SamplingParams(temperature=1, seed=5, max_tokens=24, ignore_eos=True)
PROMPT = torch.randint(10, VOCAB, (9,), generator=torch.Generator().manual_seed(1)).tolist() * 2
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "model": {"drafter": draft_model(depth=5)},
    "ngram": {"drafter": NgramConfig()},
    "hybrid": {"drafter": hybrid()},
    "streams": {"drafter": streams()},
    "mirror": {"drafter": draft_model(depth=4), "round": "mirror"},
    "pipeline": {"drafter": draft_model(depth=4), "round": "pipeline,stages=2"},
}


def finish(engine: Engine) -> None:
    while engine.busy:
        engine.step()


@pytest.mark.parametrize("name", OPTIONS)
def test_a_trace_says_all_of_an_output(name: str) -> None:
    engine = assemble(decoder=TARGET, **OPTIONS[name])
    live, other = (
        engine.live[engine.submit(PROMPT, PARAMS, speculation=wish)] for wish in (Speculation(trace=True), None)
    )
    sequence = live.sequences[0]
    finish(engine)
    trace, ids = sequence.trace, sequence.output_ids
    assert trace and other.sequences[0].trace is None
    assert ids == other.sequences[0].output_ids
    known = [*PROMPT, *ids]
    for step, following in zip(trace, [*trace[1:], None], strict=True):
        at = len(PROMPT) + step.first
        assert step.tokens[0] == known[at - 1] and step.parents[0] == -1
        assert [step.parents[n] for n in step.path] == [0, *step.path][: len(step.path)]
        assert [step.tokens[n] for n in step.path] == known[at : at + len(step.path)]
        assert following is None or following.first == step.first + step.emitted
        assert len({len(step.tokens), len(step.parents), len(step.sources)}) == 1
        assert step.why and step.verify_ms > 0 and step.batch_size in (1, 2)
    origins = [origin for step in trace for origin in step.origins()]
    assert len(origins) == len(ids)
    assert ["drafted" if depth else "target" for _, depth in origins] == sequence.origins
    accepted: dict[str, int] = {}
    for source, depth in origins:
        assert (source is None) == (depth == 0)
        if source is not None:
            accepted[source] = accepted.get(source, 0) + 1
    counted = {name: part.accepted for name, part in sequence.stats.sources.items() if part.accepted}
    assert accepted == counted and (name == "plain") == (not counted)
