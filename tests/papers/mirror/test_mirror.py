"""The mirror round: plain decoding's tokens, and serial speculation's windows, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.mirror_watch import WindowVerdict, watch
from kits.native import needs_kernels
from kits.spire import spire, whole
from kits.state import eagle, lyanna
from kits.tiny import (
    LOOKUP,
    MODEL,
    VOCAB,
    alone,
    assemble,
    draft_model,
    hybrid,
    hybrid_with_streams,
    ids,
    run,
    streams,
    tiny_decoder,
)

from paceline.api.assembly.drafting import make_budget
from paceline.api.config import LLMConfig
from paceline.core.errors import CapabilityError, ConfigError
from paceline.core.sampling import SamplingParams
from paceline.draft.base import DrafterSpec
from paceline.draft.sessions import Expand, NewNodes
from paceline.engine.budget import FixedBudget
from paceline.engine.engine import Engine
from paceline.engine.rounds import parse_round
from paceline.model.decoder import Decoder
from paceline.papers.mirror.exits import ExitHeads, ExitsConfig
from paceline.papers.mirror.round import MirrorRound

DECODER = tiny_decoder()
PROMPTS = [[(7 * i + 3 * j) % (VOCAB - 10) + 10 for j in range(3 + 9 * i)] for i in range(4)]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PARAMS = {
    "greedy": GREEDY,
    "warm": SamplingParams(temperature=1, seed=3, max_tokens=24, ignore_eos=True),
    "rules": SamplingParams(
        temperature=0.8, seed=5, top_p=0.9, repetition_penalty=1.2, presence_penalty=0.4, min_tokens=6, max_tokens=20
    ),
}
MIRROR = "mirror,kappa=6,exit=2"


def drafter(noise: float = 0.05, **options: Any) -> Any:
    return draft_model(noise=noise, **{"depth": 3} | options)


def mirrored(
    round_: str = MIRROR, noise: float = 0.05, depth: int = 3, **options: Any
) -> tuple[Engine, MirrorRound, list[WindowVerdict]]:
    engine = assemble(drafter(noise, depth=depth), round=round_, decoder=DECODER, **options)
    verdicts: list[WindowVerdict] = []
    assert isinstance(engine.round, MirrorRound)
    watch(engine.round, verdicts.append)
    return engine, engine.round, verdicts


def plain(jobs: Sequence[Any]) -> list[list[int]]:
    return ids(alone(DECODER, jobs))


@pytest.mark.parametrize("way", ["rollout=between", "rollout=beside"])
@pytest.mark.parametrize("name", ["warm", "rules"])
def test_it_says_what_plain_decoding_says(name: str, way: str) -> None:
    """A batch, in a pool so small that sequences are preempted and prompts are computed in chunks."""
    jobs = [(prompt, PARAMS[name]) for prompt in PROMPTS]
    engine, round_, verdicts = mirrored(f"{MIRROR},{way}", kv_tokens=96, block_size=4, max_batch_rows=20)
    outputs = run(engine, jobs)
    assert ids(outputs) == plain(jobs)
    assert sum(o.stats.accepted for o in outputs) > 5 and sum(o.stats.preemptions for o in outputs)
    told = [v for v in verdicts if v.told]
    assert any(v.reused for v in told) and any(not v.reused for v in told)
    assert any(v.accepted == len(v.window) > 0 for v in told)
    assert engine.pool.idle and round_.failure is None
    assert round_.sessions.inner.pool.idle  # type: ignore[attr-defined]


class SerialTrace:
    """Windows and verdicts of serial speculation, taken where the round checks its drafts."""

    def __init__(self, engine: Engine) -> None:
        self.steps: list[tuple[list[int], int, int]] = []
        inner = engine.round.emitter.emit  # type: ignore[attr-defined]

        def emit(p: Any) -> None:
            for i in p.generating:
                if p.works[i].rows == 1:
                    tree = p.spans[i].tree
                    window = [] if tree is None else tree.tokens
                    self.steps.append((window, len(p.paths[i]), p.tokens[i][len(p.paths[i])]))
            inner(p)

        engine.round.emitter.emit = emit  # type: ignore[attr-defined]


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "float32"])
def test_on_compiled_layers_ids_are_those_of_one_compiled_call(dtype: torch.dtype) -> None:
    """The pass in two pieces gives the bits that plain decoding's own compiled pass gives."""
    shape = {"dtype": dtype, "compiled": True}
    decoder = tiny_decoder(**shape)
    for params in PARAMS.values():
        jobs = [(prompt, params) for prompt in PROMPTS]
        engine = assemble(draft_model(noise=0.05, depth=3, target=shape), round=MIRROR, decoder=decoder)
        outputs = run(engine, jobs)
        assert ids(outputs) == ids(alone(decoder, jobs))
        assert sum(output.stats.accepted for output in outputs) > 5 and engine.round.failure is None


def test_what_is_reused_is_what_a_fresh_rollout_would_have_drafted() -> None:
    """Coupled drafts at temperature 1: the windows of serial speculation, too, since noise goes by position alone."""
    job = (PROMPTS[2], PARAMS["warm"])
    serial = assemble(drafter(), decoder=DECODER)
    trace = SerialTrace(serial)
    run(serial, [job])
    engine, _, verdicts = mirrored("mirror,kappa=8,exit=2")
    run(engine, [job])
    assert [(v.window, v.accepted, v.said) for v in verdicts] == trace.steps
    assert sum(v.reused for v in verdicts) > 2


class Dying:
    """Sessions that fail, or lie, after a number of levels."""

    def __init__(self, inner: Any, levels: int, lies: bool) -> None:
        self.inner, self.left, self.lies = inner, levels, lies

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def grow(self, asks: Sequence[Expand]) -> list[NewNodes]:
        grown = self.inner.grow(asks)
        self.left -= 1
        if self.left > 0:
            return grown
        if not self.lies:
            raise RuntimeError("gone")
        for answer in grown:
            answer.tokens = [VOCAB + 3 for _ in answer.tokens]
        return grown


@pytest.mark.parametrize("way", ["between", "beside"])
@pytest.mark.parametrize("lies", [False, True], ids=["dies", "lies"])
def test_a_drafter_that_fails_costs_no_token(lies: bool, way: str) -> None:
    jobs = [(prompt, GREEDY) for prompt in PROMPTS]
    engine, round_, verdicts = mirrored(f"{MIRROR},rollout={way}")
    round_.sessions.inner = Dying(round_.sessions.inner, 9, lies)
    outputs = run(engine, jobs)
    assert ids(outputs) == plain(jobs)
    assert round_.failure is not None and ("outside the vocabulary" in round_.failure) is lies
    assert any(v.window for v in verdicts) and not verdicts[-1].window
    assert outputs[-1].stats.off_reason == round_.failure


@pytest.mark.parametrize(
    ("round_", "drafter_", "wrong"),
    [
        ("mirror", None, "it has nothing to draft with"),
        ("mirror", streams(), "drafts in the target's own pass"),
        ("mirror", hybrid_with_streams(), "drafts in the target's own pass"),
        ("mirror", hybrid(f"{LOOKUP}+draft_model:tiny-draft;proposes=point+{MODEL}"), "it has no draft sessions"),
        ("mirror", drafter(proposes="sampled"), "draws its drafts for rejection"),
        ("mirror,exit=3", drafter(), "the target has 3 layers"),
        ("mirror,exit=0", drafter(), "the target has 3 layers"),
        ("mirror,exit=half", drafter(), "neither a number of layers nor a share"),
        ("mirror,kappa=999999999999", drafter(), "the vocabulary has 96 tokens"),
        ("mirror,kappa=0", drafter(), "kappa must be 1 or more"),
        ("mirror,rollout=hope", drafter(), "rollout takes"),
    ],
)
def test_what_does_not_fit_is_refused(round_: str, drafter_: Any, wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        assemble(drafter_, round=round_, decoder=DECODER)


def test_drafters_that_cannot_draft_ahead_are_refused_with_the_reason() -> None:
    config, apart = parse_round("mirror"), parse_round("mirror,rollout=process")
    assert config is not None and apart is not None
    reason = config.refusal(DrafterSpec(name="table"))
    assert reason is not None and "it has no draft sessions" in reason[0]
    spec = eagle().spec
    assert config.refusal(spec) is None
    reason = apart.refusal(spec)
    assert reason is not None and "which stay in the target's process" in reason[0]


WHOLE = tiny_decoder(whole())


@pytest.mark.parametrize("where", ["between", "beside"])
@pytest.mark.parametrize("make", [eagle, lyanna, spire])
def test_drafters_of_states_draft_from_their_own_below_what_is_not_decided(make: Any, where: str) -> None:
    """The target's states replace them: about as many passes as with the serial round's chains."""
    decoder, chain = WHOLE, {"topk": 1, "depth": 3} if make is eagle else {"width": 1, "extra": 0}
    given = {"config": whole()} | ({"depth": 3} if make is spire else chain)
    drafting = assemble(make(**given), round=f"mirror,kappa=5,exit=2,rollout={where}", decoder=decoder)
    serial, round_ = assemble(make(**given), decoder=decoder), drafting.round
    passes = {serial: 0, drafting: 0}
    for params in (PARAMS["warm"], PARAMS["rules"]):
        jobs = [(prompt, params) for prompt in PROMPTS]
        expected = ids(alone(decoder, jobs))
        for engine in passes:
            outputs = run(engine, jobs)
            assert ids(outputs) == expected and engine.pool.idle
            passes[engine] += sum(output.stats.passes for output in outputs)
    assert round_.failure is None and round_.drafter.body._open == {}  # type: ignore[attr-defined]
    assert passes[drafting] < 1.1 * passes[serial]


def save_exits(folder: Path, decoder: Decoder = DECODER, **changes: Any) -> str:
    """Exits that nobody trained, behind the layers 1 and 2 of a target."""
    shape = decoder.config
    known = {"num_layers": shape.num_layers, "d_model": shape.d_model, "vocab_size": shape.vocab_size}
    config = ExitsConfig(**{"layers": (1, 2), **known, **changes})
    heads, generator = ExitHeads.fresh(config, torch.Generator().manual_seed(1)), torch.Generator().manual_seed(2)
    heads.up.data.normal_(generator=generator)
    heads.save(folder, torch.float32)
    return str(folder)


@pytest.mark.parametrize("layer", [1, 2])
def test_candidates_are_those_of_the_trained_exit(layer: int, tmp_path: Path) -> None:
    """Other candidates than the target's own head has there; the same tokens, and the windows of serial speculation."""
    folder, seen = save_exits(tmp_path), []
    serial = assemble(drafter(), decoder=DECODER)
    trace = SerialTrace(serial)
    (expected,) = run(serial, [(PROMPTS[2], GREEDY)])
    for heads in (f",heads={folder}", ""):
        engine, round_, verdicts = mirrored(f"mirror,kappa=3,exit={layer}{heads}")
        assert (round_.exit.heads is not None) is bool(heads) and round_.exit.layer == layer
        assert ids(run(engine, [(PROMPTS[2], GREEDY)])) == ids([expected]) and round_.failure is None
        assert [(v.window, v.accepted, v.said) for v in verdicts] == trace.steps
        seen.append([v.mass for v in verdicts if v.told])
    assert seen[0] != seen[1]


@pytest.mark.parametrize(
    ("changes", "options", "wrong"),
    [
        ({"num_layers": 5}, "exit=2", "trained for another model, and has num_layers=5"),
        ({"d_model": 64}, "exit=2", "and has d_model=64"),
        ({"vocab_size": 97}, "exit=2", "and has vocab_size=97"),
        ({"layers": (1,)}, "exit=2", "they lie after layers 1"),
        ({}, "exit=3", "the target has 3 layers"),
    ],
)
def test_exits_that_do_not_fit_are_refused(changes: Any, options: str, wrong: str, tmp_path: Path) -> None:
    folder = save_exits(tmp_path, **changes)
    with pytest.raises(ConfigError, match=wrong):
        mirrored(f"mirror,{options},heads={folder}")
    with pytest.raises(ConfigError, match="there is no such folder"):
        mirrored(f"mirror,exit=2,heads={tmp_path / 'nowhere'}")


def test_its_budget_is_fixed() -> None:
    """The automatic budget adds times that this round lets pass at once."""
    options: dict[str, Any] = {"model": "any", "drafter": "draft_model:any", "round": "mirror"}
    target: Any = None  # not asked
    assert make_budget(LLMConfig(**options), drafter(depth=3), target) == FixedBudget(3)
    assert make_budget(LLMConfig(**options, budget=2), drafter(depth=3), target).plan([], 1) == []
    with pytest.raises(CapabilityError, match="lets run at once"):
        make_budget(LLMConfig(**options, budget="auto"), drafter(depth=3), target)
    with pytest.raises(ConfigError, match="mirror has no option 'kapa'"):
        LLMConfig(**options | {"round": "mirror,kapa=3"})
