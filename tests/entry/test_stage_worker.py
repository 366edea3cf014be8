"""The stages of an `LLM`: split, loaded, placed and refused; and with real processes the same answers."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from kit.ticks import watch_ticks
from kits.tiny import ids

from paceline import LLM, ConfigError, SamplingParams
from paceline.api.assembly.engine import load_target
from paceline.api.config import LLMConfig
from paceline.kv.pool import KVPool
from paceline.model.stages import Frame, Stage, StageRows
from paceline.runtime.placement import Placement
from paceline.runtime.stage_worker import service, stage_spec

MODEL = "paceline-small"
LAYERS = 12
SMALL: dict[str, Any] = {"max_model_len": 256, "max_sequences": 4}
PROMPTS = ["Once upon a time there was a little", "SELECT name FROM players WHERE"]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
DRAFTER = "draft_model:paceline-small-draft"


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float64"])
def test_layers_in_two_parts_compute_what_they_compute_together(dtype: str) -> None:
    config = LLMConfig(model=MODEL, dtype=dtype, pipeline=2)
    source = config.resolve()
    whole, own = load_target(LLMConfig(model=MODEL, dtype=dtype), source).decoder, load_target(config, source)
    assert (
        config.round == "pipeline,stages=2"
        and source.shape.num_layers == LAYERS
        and own.decoder.num_layers == LAYERS // 2
    )
    pools = [KVPool(*d.cache_shape, 32, d.dtype, d.device) for d in (whole, own.decoder)]
    slots = pools[0].tensors.all_k.shape[2]
    part = {"start": 0, "stop": LAYERS // 2, "slots": slots}
    spec = stage_spec(config, 0, part, Placement(), source)
    made = service("cpu", **json.loads(json.dumps(spec.options)))
    assert made.facts == spec.expected and " layers)" in made.facts.weights
    assert sum(p.numel() for p in made.stage.decoder.parameters()) < sum(p.numel() for p in own.decoder.parameters())

    count = 9
    text = StageRows(0, 0, [5 * i for i in range(count)], [-1] * count, range(count), slice(0, count), count, 0)
    frame = Frame(0, [text])
    with torch.inference_mode():
        expected = Stage(whole, 0, LAYERS, pools[0].tensors).run(frame).hidden
        hidden = own.decoder.embed_tokens(torch.tensor(text.tokens))
        computed = made.stage.run(replace(frame, hidden=hidden))
        last = Stage(own.decoder, 0, own.decoder.num_layers, pools[1].tensors)
        found = last.run(replace(frame, hidden=computed.hidden)).hidden
        assert expected is not None and found is not None and torch.equal(found, expected)
        assert torch.equal(own.decoder.read(found), whole.read(expected))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (0, "stages must be 1 or more"),
        (True, "pipeline takes"),
        ("-2", "not a number of stages"),
        ("four", "not a number of stages"),
        ("a:1,b:2", "not a number of stages"),
        ("4,core=<0>", "no option 'core'"),
        ("2,threads=0", "threads must be 1 or more"),
        ("x" * 10_000, "characters"),
    ],
)
def test_splits_that_cannot_be(given: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        LLMConfig(model=MODEL, pipeline=given)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"pipeline": 2, "round": "serial"}, "by the pipeline round alone"),
        ({"pipeline": 2, "round": "pipeline,stages=3"}, "these are 2 stages"),
        ({"pipeline": 2, "applications": {"sql": "paceline-small-sql"}}, "without adapters"),
    ],
)
def test_what_does_not_fit_a_split(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        LLMConfig(model=MODEL, **options)
    assert LLMConfig(model=MODEL, pipeline=3, round="pipeline,width=4").round == "pipeline,width=4,stages=3"


@pytest.mark.timeout(600)
def test_processes_give_the_answers_of_one() -> None:
    """A stage and the source in processes; both are killed while they answer, and the stage is stopped."""
    expected = ids(LLM(MODEL, exact=True, **SMALL).generate(PROMPTS, GREEDY))
    llm = LLM(MODEL, pipeline=2, drafter=DRAFTER, round="pipeline,source=process", exact=True, **SMALL)
    assert ids(llm.generate(PROMPTS, GREEDY)) == expected
    stage_line: Any = llm.engine.round.stage_line  # type: ignore[attr-defined]
    source: Any = llm.engine.round.source.sessions._worker  # type: ignore[attr-defined]
    orders = {8: ("stage", signal.SIGKILL), 12: ("source", signal.SIGKILL), 24: ("stage", signal.SIGSTOP)}
    ticks: list[Any] = []

    def on_tick(tick: Any) -> None:
        ticks.append(tick)
        if len(ticks) in orders:
            name, number = orders.pop(len(ticks))
            os.kill((source if name == "source" else stage_line.workers[0]).pid, number)

    watch_ticks(llm.engine.round, on_tick)
    began = time.monotonic()
    for _ in range(2):
        assert ids(llm.generate(PROMPTS, GREEDY)) == expected
    assert not orders and time.monotonic() - began < 60
    killed, hung = stage_line.faults
    assert "stage 0" in killed and "killed by SIGKILL" in killed and "stage 0" in hung and "hangs: " in hung
    assert "worker draft" in source.faults[0] and llm.engine.round.failure is None
    with pytest.raises(ConfigError, match="Leave share out"):
        LLM(MODEL, share=llm, pipeline=2, exact=True, **SMALL)
    with pytest.raises(ConfigError, match="the shared target was loaded with"):
        LLM(MODEL, share=llm, **SMALL)
