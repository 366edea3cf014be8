"""Speculation by request: what is drafted for one changes neither its tokens nor what the others get."""

from __future__ import annotations

import json

import pytest
import torch
from kits.tiny import VOCAB, alone, assemble, draft_model, hybrid, ids, tiny_decoder

from paceline.core.errors import CapabilityError, ConfigError
from paceline.core.outputs import RequestOutput
from paceline.core.sampling import SamplingParams
from paceline.core.speculation import Speculation
from paceline.engine.engine import Engine

pytestmark = pytest.mark.timeout(120)
TARGET = tiny_decoder()
WARM = SamplingParams(temperature=1, seed=5, max_tokens=24, ignore_eos=True)
SEEDS = [torch.Generator().manual_seed(i) for i in range(4)]
PROMPTS = [torch.randint(10, VOCAB, (9 + i,), generator=seed).tolist() * 2 for i, seed in enumerate(SEEDS)]
PLAIN = ids(alone(TARGET, [(prompt, WARM) for prompt in PROMPTS]))


def answers(engine: Engine, wishes: list[Speculation | None], params: SamplingParams = WARM) -> list[RequestOutput]:
    lives = []
    for prompt, wish in zip(PROMPTS, wishes, strict=True):
        lives.append(engine.live[engine.submit(prompt, params, speculation=wish)])
    while engine.busy:
        engine.step()
        engine.pool.check_integrity()
    assert engine.round.failure is None
    return [engine.output(live) for live in lives]


OFF, FEW = Speculation(enabled=False), Speculation(max_nodes=2)


ROUNDS = pytest.mark.parametrize("round_", ["auto", "mirror", "pipeline,stages=2"])


@ROUNDS
def test_most_nodes_of_a_request(round_: str):
    engine = assemble(draft_model(depth=6), decoder=TARGET, round=round_)
    outputs = answers(engine, [FEW, None, OFF, Speculation(max_nodes=1)])
    assert ids(outputs) == PLAIN
    most = [len(output.stats.accepted_histogram) - 1 for output in outputs]
    assert most[0] <= 2 and most[2] == 0 and most[3] <= 1 and (most[1] > 2 or "pipeline" in round_)
    for i, nodes in ((0, 2), (3, 1)):
        assert 0 < outputs[i].stats.drafted <= nodes * outputs[i].stats.passes


@ROUNDS
def test_a_request_chooses_among_the_sources_of_hybrid(round_: str):
    engine = assemble(hybrid(), decoder=TARGET, round=round_)
    names = engine.round.sources
    assert names == ("suffix", "draft_model")
    wishes = [Speculation(sources=[name]) for name in names] + [Speculation(sources=names), None]
    outputs = answers(engine, wishes)
    assert ids(outputs) == PLAIN
    asked = [{name for name, part in output.stats.sources.items() if part.drafted} for output in outputs]
    assert asked[0] <= {"suffix"} and asked[1] == {"draft_model"} and asked[3] >= {"draft_model"}


def test_what_is_not_there_is_refused():
    engine = assemble(hybrid(), decoder=TARGET)
    with pytest.raises(ConfigError, match="Choose of suffix, draft_model"):
        engine.submit(PROMPTS[0], WARM, speculation=Speculation(sources=["medusa"]))
    for wish in (FEW, Speculation(sources=["ngram"])):
        with pytest.raises(CapabilityError, match="this engine has no drafter. Leave it out"):
            assemble(decoder=TARGET).submit(PROMPTS[0], WARM, speculation=wish)
    for bad in ({"max_nodes": 0}, {"max_nodes": True}, {"sources": []}, {"sources": "ngram"}, {"enabled": 1}):
        with pytest.raises(ConfigError):
            Speculation(**bad)
    alone = assemble(draft_model(depth=3), decoder=TARGET)
    outputs = answers(alone, [Speculation(sources=["draft_model"]), None, None, None])
    assert ids(outputs) == PLAIN and outputs[0].stats.drafted
    assert not engine.busy


def test_a_snapshot_counts_what_ended_and_what_runs():
    engine = assemble(hybrid(), decoder=TARGET, max_sequences=3)
    empty = engine.snapshot()
    assert (empty.running, empty.waiting, empty.steps, empty.kv_used, empty.stats.emitted) == (0, 0, 0, 0, 0)
    lives = [engine.live[engine.submit(prompt, WARM)] for prompt in PROMPTS]
    for _ in range(2):
        engine.step()
    now = engine.snapshot()
    assert (now.running, now.waiting, now.steps, now.ended) == (3, 1, 2, {})
    assert 0 < now.kv_used <= now.kv_tokens and now.stats.emitted > 0
    assert engine.snapshot() == now  # reading changes nothing
    engine.abort(lives[0].id)
    while engine.busy:
        engine.step()
    last, outputs = engine.snapshot(), [engine.output(live) for live in lives]
    assert last.ended == {"abort": 1, "length": 3} and (last.running, last.kv_used) == (0, 0)
    for name in ("emitted", "drafted", "accepted", "passes", "prompt_tokens"):
        assert getattr(last.stats, name) == sum(getattr(output.stats, name) for output in outputs)
    for name in ("suffix", "draft_model"):
        parts = [output.stats.sources[name] for output in outputs if name in output.stats.sources]
        assert last.stats.sources[name].accepted == sum(part.accepted for part in parts)
    assert last.prefix_queries == sum(map(len, PROMPTS)) and last.by_application.keys() == {""}
    said = json.loads(json.dumps(last.as_dict()))
    assert said["stats"]["depth_accepted"] == last.stats.depth_accepted
    assert json.loads(json.dumps(engine.describe_speculation()))["sources"] == ["suffix", "draft_model"]


@pytest.mark.parametrize("rows", [1, 7, "auto"])
def test_a_long_prompt_beside_others_changes_no_token(rows: int | str):
    long = torch.randint(10, VOCAB, (200,), generator=torch.Generator().manual_seed(9)).tolist()
    whole = ids(alone(TARGET, [(long, WARM)]))[0]
    engine = assemble(draft_model(depth=3), decoder=TARGET, max_prompt_rows=rows, max_batch_rows=128)
    first = engine.live[engine.submit(PROMPTS[0], WARM)]
    engine.step()
    second = engine.live[engine.submit(long, WARM)]
    widest = 0
    while engine.busy:
        before = 0 if second.sequences[0].cache is None else second.sequences[0].cache.committed
        beside = not first.finished
        engine.step()
        cache = second.sequences[0].cache
        if beside and cache is not None and cache.committed < len(long):
            widest = max(widest, cache.committed - before)
    assert [live.sequences[0].output_ids for live in (first, second)] == [PLAIN[0], whole]
    assert 0 < widest <= (128 if rows == "auto" else rows)
