"""The pipeline round says what plain decoding says, whatever its source gives and when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from kit.static_tree import StaticTreeConfig
from kit.ticks import watch_ticks
from kits.native import needs_kernels
from kits.state import eagle, lyanna
from kits.tiny import EOS, VOCAB, alone, assemble, draft_model, ids, run, streams, tiny_config, tiny_decoder

from paceline import LLM
from paceline.core.errors import CapabilityError, ConfigError
from paceline.core.sampling import SamplingParams
from paceline.draft.local_sessions import LocalGrowing, LocalSessions
from paceline.draft.sessions import Expand, NewNodes
from paceline.engine.base import RoundParts
from paceline.engine.engine import Engine
from paceline.engine.rounds import parse_round
from paceline.papers.specpipe.records import Tick
from paceline.papers.specpipe.round import PipelineRound

LAYERS = 8
CONFIG = tiny_config(num_layers=LAYERS)
DECODER = tiny_decoder(CONFIG)
PROMPTS = [[(7 * i + 3 * j) % (VOCAB - 10) + 10 for j in range(3 + 9 * i)] for i in range(4)]
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
PARAMS = {
    "eos": SamplingParams(temperature=0, max_tokens=60),
    "rules": SamplingParams(
        temperature=0.8, seed=5, top_p=0.9, repetition_penalty=1.2, presence_penalty=0.4, min_tokens=6, max_tokens=20
    ),
}


def drafter(noise: float = 0.03, **shape: Any) -> Any:
    return draft_model(noise=noise, target={"config": CONFIG} | shape)


def piped(draft: Any, stages: int = 4, options: str = "", **parts: Any) -> tuple[Engine, PipelineRound, list[Tick]]:
    engine = assemble(draft, round=f"pipeline,stages={stages}{options}", **{"decoder": DECODER} | parts)
    assert isinstance(engine.round, PipelineRound)
    return engine, engine.round, watch_ticks(engine.round)


def plain(jobs: Sequence[Any]) -> list[list[int]]:
    return ids(alone(DECODER, jobs))


def test_a_batch_with_chunks_preemption_and_ends_in_flight() -> None:
    """In a pool so small that sequences are preempted with levels in flight, and prompts are computed in chunks."""
    for name in ("eos", "rules"):
        jobs = [(prompt, PARAMS[name]) for prompt in PROMPTS]
        engine, round_, ticks = piped(drafter(), 4, kv_tokens=112, block_size=4, max_batch_rows=20)
        outputs = run(engine, jobs)
        assert ids(outputs) == plain(jobs)
        assert sum(output.stats.preemptions for output in outputs)
        assert sum(tick.hits for tick in ticks) > 5 and round_.failure is None
        assert engine.pool.idle and not round_.busy
    assert any(output.outputs[0].token_ids[-1] == EOS for output in outputs)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "float32"])
def test_on_compiled_layers_ids_and_probabilities_are_those_of_plain_decoding(dtype: torch.dtype) -> None:
    shape = {"dtype": dtype, "compiled": True}
    decoder = tiny_decoder(CONFIG, **shape)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    for prompt in PROMPTS[1:3]:
        engine, _, ticks = piped(drafter(**shape), 4, decoder=decoder)
        (said,) = run(engine, [(prompt, params)])
        (expected,) = alone(decoder, [(prompt, params)])
        assert said.outputs[0].token_ids == expected.outputs[0].token_ids
        assert said.outputs[0].logprobs == expected.outputs[0].logprobs  # to the last bit
        assert said.prompt_logprobs == expected.prompt_logprobs
        assert sum(tick.hits for tick in ticks) > 5


class Late(LocalSessions):
    """Sessions that take some ticks for each level."""

    def __init__(self, inner: Any, ticks: int) -> None:
        super().__init__(inner)
        self.ticks, self.left = ticks, 0

    def begin(self, asks: Sequence[Expand]) -> LocalGrowing:
        self.left = self.ticks
        self.growth = super().begin(asks)
        self.growth.done = False
        return self.growth

    def look(self) -> None:
        self.left -= 1
        self.growth.done = self.left < 0


def test_a_source_that_is_late_costs_ticks_and_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, counts = [(PROMPTS[1], GREEDY)], []
    for late in (0, 1, 2, 9):
        engine, round_, ticks = piped(drafter(0.0), 4)
        assert round_.source is not None
        round_.source.sessions = Late(round_.source.sessions.inner, late)  # type: ignore[attr-defined]
        monkeypatch.setattr(round_.stage_line, "rest", lambda: False)  # by ticks, not by time
        assert ids(run(engine, jobs)) == plain(jobs)
        assert any(tick.waits for tick in ticks) == (late > 0)
        counts.append(len(ticks))
    assert counts == sorted(counts) and counts[-1] == 40 * 4  # as if there were no source
    assert counts[0] < counts[1] < counts[2] < counts[3]


def test_a_level_that_is_waited_for_keeps_its_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a source that is slower than a look, late siblings do not take the place of the next level."""
    engine, round_, ticks = piped(drafter(0.02), 4, ",width=6,children=4")
    assert round_.source is not None
    round_.source.sessions = Late(round_.source.sessions.inner, 1)  # type: ignore[attr-defined]
    line, ahead, looks = round_.stage_line, list[int](), list[int]()
    tick = line.tick

    def counted(frame: Any) -> Any:
        looks[:] = [1, 1, 1]  # so many more while a tick lasts
        for running in round_._running.values():
            if (flight := running.flight) is not None:
                places = [node.place for node in flight.nodes.values() if node.row >= 0]
                ahead.append(max(places, default=flight.place) - flight.place)
        return tick(frame)

    monkeypatch.setattr(line, "tick", counted)
    monkeypatch.setattr(line, "rest", lambda: bool(looks and looks.pop()))
    assert ids(run(engine, [(PROMPTS[1], GREEDY)])) == plain([(PROMPTS[1], GREEDY)])
    assert sum(ahead) / len(ahead) > 1.2  # levels in flight beyond the root
    assert len(ticks) <= 84 and sum(one.late for one in ticks) < 15


def test_a_draft_that_is_always_right_gives_a_token_a_tick() -> None:
    """A pipeline of m stages takes m ticks for the first token, and one for each that follows."""
    for stages in (2, 4, 8):
        engine, _, ticks = piped(drafter(0.0), stages, ",width=1,children=1")
        assert ids(run(engine, [(PROMPTS[1], GREEDY)])) == plain([(PROMPTS[1], GREEDY)])
        assert len(ticks) == stages + GREEDY.max_tokens - 1


def test_a_broken_source_is_left_alone() -> None:
    class Broken(LocalSessions):
        def begin(self, asks: Sequence[Expand]) -> LocalGrowing:
            growth = LocalGrowing({}, done=True)
            foreign = NewNodes(parents=[0], nodes=[1], tokens=[VOCAB + 5], log_q=[0.0], sources=[0])
            growth.levels.append({asks[0].key: foreign})
            return growth

    engine, round_, _ = piped(drafter(), 4)
    assert round_.source is not None
    round_.source.sessions = Broken(round_.source.sessions)
    assert ids(run(engine, [(PROMPTS[1], GREEDY)])) == plain([(PROMPTS[1], GREEDY)])
    assert "vocabulary" in str(round_.failure)


@pytest.mark.parametrize("make", [eagle, lyanna])
def test_drafters_of_states_are_sources(make: Any) -> None:
    jobs = [(prompt, GREEDY) for prompt in PROMPTS[:2]]
    engine, round_, ticks = piped(make(config=CONFIG))
    assert ids(run(engine, jobs)) == plain(jobs)
    assert round_.failure is None and engine.pool.idle and round_.drafter.body._open == {}
    assert sum(tick.hits for tick in ticks) > 3


@pytest.mark.parametrize("placement", [{"round": "pipeline,stages=3"}, {"pipeline": 2}], ids=str)
def test_states_of_middle_layers_come_along_with_the_frames(placement: dict[str, Any]) -> None:
    """SPIRe reads the states after the last but one and the last but two of the target's layers."""
    options: dict[str, Any] = {"kv_memory": "64MiB", "max_model_len": 256, "threads": 1}
    greedy = SamplingParams(temperature=0, max_tokens=24)
    prompts = ["The quick brown fox jumps over", "def add(a, b):"]
    llms = [LLM("paceline-small", drafter=name, **options, **placement) for name in ("none", "spire")]
    plain, drafted = [llm.generate(prompts, greedy) for llm in llms]
    assert [o.outputs[0].token_ids for o in plain] == [o.outputs[0].token_ids for o in drafted]
    assert sum(o.stats.accepted for o in drafted) > 20


def test_what_cannot_run_is_refused_with_the_reason() -> None:
    config = parse_round("pipeline,stages=5")
    assert config is not None
    beside = config.refusal(streams().spec)
    assert beside is not None and "drafts in the target's own pass" in beside[0]
    with pytest.raises(CapabilityError, match="drawn"):
        piped(drafter(), 4, verifier="rejection")
    with pytest.raises(CapabilityError, match="drafts for rejection"):
        piped(draft_model(proposes="sampled", target={"config": CONFIG}), 4)
    with pytest.raises(ConfigError, match="9 stages: the target has 8 layers"):
        piped(None, 9)
    cuts = (f"stages=3,layers={bad}" for bad in ("5x7", "5x0x7", "a"))
    for bad in ("stages=0", "width=0", "children=0", "rows=0", "texts=0", *cuts):
        with pytest.raises(ConfigError, match=bad.rpartition(",")[2].split("=")[0]):
            parse_round(f"pipeline,{bad}")
    named: Any = parse_round("pipeline,stages=3,layers=5x4x3")
    assert named.bounds(12) == [0, 5, 9, 12]
    with pytest.raises(ConfigError, match="12 layers, and the target has 8"):
        named.bounds(8)


@pytest.mark.parametrize("rows", [1, 3])
def test_requests_share_the_rows_of_a_level(rows: int) -> None:
    """SpecPipe-DB: levels of all requests in one tensor, never more rows than given but for texts, nobody starves."""
    jobs = [(prompt, GREEDY) for prompt in PROMPTS]
    engine, _, ticks = piped(drafter(0.03), 4, f",width=8,children=3,rows={rows}")
    outputs = run(engine, jobs)
    assert ids(outputs) == plain(jobs)
    assert max(tick.entered for tick in ticks[4:]) <= rows + len(PROMPTS)  # at most one text, or root, of each
    assert all(output.stats.accepted > (0 if rows == 1 else 5) for output in outputs)


def test_a_static_tree_enters_whole_and_the_next_is_drafted_meanwhile() -> None:
    """SpecInfer in the same stages: a tree goes through all stages before the next one enters."""
    jobs = [(PROMPTS[1], GREEDY)]
    draft = drafter(0.0)
    engine = assemble(draft, decoder=DECODER)
    engine.round = StaticTreeConfig(stages=4).build(RoundParts(target=DECODER, pool=engine.pool, drafter=draft))
    ticks = watch_ticks(engine.round)
    assert ids(run(engine, jobs)) == plain(jobs)
    assert {tick.count for tick in ticks} >= {0, 1, 9}
    entered = [tick.entered for tick in ticks if tick.entered]
    assert max(entered[1:]) == 21  # the root, 1 + 1 + 6 * 3 nodes
    assert len(ticks) == 4 * (1 + 5)  # the prompt; 5 trees of 9 tokens, the last one cut short
    assert engine.round.failure is None
