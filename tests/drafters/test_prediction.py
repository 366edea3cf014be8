"""Predicted output: right, wrong and edited predictions; the tokens are the same with every one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kits.tiny import VOCAB, assemble, hybrid, run, tiny_decoder

from paceline.core.errors import CapabilityError, ConfigError
from paceline.core.outputs import RequestOutput
from paceline.core.sampling import SamplingParams
from paceline.core.speculation import Speculation
from paceline.draft.prediction import PredictionConfig
from paceline.engine.engine import Engine

pytestmark = pytest.mark.timeout(120)
TARGET = tiny_decoder()
WARM = SamplingParams(temperature=1, seed=5, max_tokens=40, ignore_eos=True)
PROMPT = torch.randint(10, VOCAB, (17,), generator=torch.Generator().manual_seed(2)).tolist()
SAID = run(assemble(decoder=TARGET), [(PROMPT, WARM)])[0].outputs[0].token_ids


def answer(engine: Engine, prediction: list[int], **options: Any) -> RequestOutput:
    wish = Speculation(prediction=tuple(prediction))
    live = engine.live[engine.submit(PROMPT, WARM, speculation=wish, **options)]
    while engine.busy:
        engine.step()
    assert engine.round.failure is None
    assert engine.output(live).outputs[0].token_ids == SAID
    return engine.output(live)


@pytest.mark.parametrize("round_", ["serial", "mirror", "pipeline,stages=2"])
@pytest.mark.parametrize("drafter", [PredictionConfig(depth=8), hybrid("prediction;depth=8+suffix;depth=6")])
def test_a_right_prediction_is_accepted_whole(drafter: Any, round_: str):
    engine = assemble(drafter, decoder=TARGET, round=round_)
    stats = answer(engine, SAID).stats
    source = stats.sources["prediction"]
    assert source.accepted == source.drafted >= 30 and (stats.passes <= 8 or "pipeline" in round_)
    plain = run(engine, [(PROMPT, WARM)])[0]
    assert plain.outputs[0].token_ids == SAID and "prediction" not in plain.stats.sources


def test_an_edited_prediction_is_found_again():
    edited = [*SAID[:12], 9, 9, 9, *SAID[15:]]
    source = answer(assemble(PredictionConfig(depth=8), decoder=TARGET), edited).stats.sources["prediction"]
    assert source.accepted >= 28 and source.drafted > source.accepted
    moved = [9, 8, 9, 8, *SAID]  # the answer begins later in it
    assert answer(assemble(PredictionConfig(depth=8), decoder=TARGET), moved).stats.accepted >= 25


def test_it_is_refused_where_nothing_reads_it():
    with pytest.raises(CapabilityError, match="prediction"):
        assemble(decoder=TARGET).submit(PROMPT, WARM, speculation=Speculation(prediction=SAID))
    engine = assemble(PredictionConfig(), decoder=TARGET)
    with pytest.raises(ConfigError, match="predicted token id"):
        engine.submit(PROMPT, WARM, speculation=Speculation(prediction=[VOCAB]))
