"""The loop on a tiny target: many requests, little memory, bad guests; the answers never change."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from kits.tiny import VOCAB, alone, assemble, draft_model, random_prompts, run, tiny_decoder

from paceline.core.errors import ConfigError
from paceline.core.outputs import RequestOutput
from paceline.core.sampling import SamplingParams
from paceline.core.tree import TokenTree
from paceline.draft.base import Drafter, DrafterSpec, DraftRequest, StepFeatures
from paceline.engine.engine import Engine
from paceline.model.decoder import Decoder

pytestmark = pytest.mark.timeout(60)  # a loop that starves somebody would run for ever
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
WARM = SamplingParams(temperature=1, seed=5, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def target() -> Decoder:
    return tiny_decoder()


def ids(outputs: Sequence[RequestOutput]) -> list[list[list[int]]]:
    return [[sample.token_ids for sample in output.outputs] for output in outputs]


def plain(target: Decoder, jobs: Sequence[tuple[list[int], SamplingParams]]) -> list[list[list[int]]]:
    """Each request alone, in an engine of its own, without a drafter."""
    return ids(alone(target, jobs))


def consistent(output: RequestOutput) -> None:
    """The statistics tell the same story as the ids and the origins."""
    stats = output.stats
    origins = [origin for sample in output.outputs for origin in sample.origins]
    assert stats.emitted == sum(len(sample.token_ids) for sample in output.outputs) == len(origins)
    assert sum(stats.accepted_histogram) == stats.passes
    assert sum(n * count for n, count in enumerate(stats.accepted_histogram)) == stats.accepted
    assert stats.accepted == origins.count("drafted") <= stats.drafted
    assert stats.emitted <= stats.passes + stats.accepted
    assert sum(source.drafted for source in stats.sources.values()) == stats.drafted
    assert sum(source.accepted for source in stats.sources.values()) == stats.accepted
    assert sum(stats.depth_accepted) == stats.accepted
    assert all(a <= o for a, o in zip(stats.depth_accepted, stats.depth_offered, strict=True))
    assert stats.prompt_tokens == len(output.prompt_token_ids)
    assert stats.off_reason is None or stats.drafted == 0 or "failed" in stats.off_reason
    if output.finished and stats.emitted:
        assert stats.ttft_ms is not None and 0 < stats.ttft_ms <= stats.elapsed_ms


def test_abort_in_flight_disturbs_nobody(target: Decoder):
    jobs = [(prompt, WARM) for prompt in random_prompts(3)]
    engine = assemble(draft_model(depth=3), decoder=target, max_sequences=2)
    order = [engine.submit(*job) for job in jobs]
    for _ in range(4):
        engine.step()
    waiting = engine.abort(order[2])
    assert waiting is not None and waiting.outputs[0].token_ids == []
    output = engine.abort(order[0])
    engine.pool.check_integrity()
    assert output is not None and output.finished and output.outputs[0].finish_reason == "abort"
    consistent(output)
    assert engine.abort(order[0]) is None and engine.abort("nobody") is None
    expected = plain(target, jobs)
    got = output.outputs[0].token_ids
    assert 0 < len(got) < 24 and got == expected[0][0][: len(got)]
    done = []
    while engine.busy:
        done += [engine.output(live) for live in engine.step() if live.finished]
    assert ids(done) == [expected[1]]
    engine.pool.check_idle()


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], GREEDY, "an empty prompt"),
        ([5] * 32, GREEDY, "a prompt of 32 tokens"),
        ([5, VOCAB], GREEDY, f"prompt token id {VOCAB}"),
        ([5, -1], GREEDY, "prompt token id -1"),
        ([5], replace(GREEDY, logit_bias={VOCAB: 1.0}), "logit_bias"),
        ([5], replace(GREEDY, stop_token_ids=[VOCAB]), "stop_token_ids"),
        ([5], replace(GREEDY, logprobs=VOCAB + 1), "logprobs"),
    ],
)
def test_what_cannot_be_done_is_refused_at_submission(
    target: Decoder, prompt: list[int], params: SamplingParams, message: str
):
    engine = assemble(decoder=target, max_model_len=32)
    good = engine.submit([5, 6], GREEDY)
    with pytest.raises(ConfigError, match=message):
        engine.submit(prompt, params)
    assert list(engine.live) == [good]
    assert len(engine.scheduler.waiting) == 1
    assert ids([run_one(engine, good)]) == plain(target, [([5, 6], GREEDY)])


def run_one(engine: Engine, request: str) -> RequestOutput:
    done: dict[str, RequestOutput] = {}
    while engine.busy:
        done.update({live.id: engine.output(live) for live in engine.step() if live.finished})
        engine.pool.check_integrity()
    return done[request]


def test_an_id_in_use_is_refused(target: Decoder):
    engine = assemble(decoder=target)
    engine.submit([5], GREEDY, request_id="mine")
    with pytest.raises(ConfigError, match="it is in use"):
        engine.submit([6], GREEDY, request_id="mine")
    engine.abort("mine")
    assert engine.submit([6], GREEDY, request_id="mine") == "mine"


def test_a_request_that_can_never_fit_the_pool_is_refused(target: Decoder):
    engine = assemble(decoder=target, kv_tokens=32)
    with pytest.raises(ConfigError, match="the K/V pool holds 32"):
        engine.submit([5] * 10, GREEDY)  # 10 + 24 tokens: 33 rows
    (output,) = run(engine, [([5] * 9, GREEDY)])
    assert len(output.outputs[0].token_ids) == 24


class Guest(Drafter):
    """A drafter that proposes ``propose_tree`` and otherwise keeps to the contract."""

    def __init__(self, **spec: Any) -> None:
        self.spec = DrafterSpec(name="guest", **{"default_budget": 4, **spec})
        self.released: list[int] = []
        self.proposals = 0

    def bind(self, *_: object) -> None:
        pass

    def observe(self, step: StepFeatures) -> None:
        pass

    def release(self, keys: Sequence[int]) -> None:
        self.released += keys

    def draft(self, want: DraftRequest) -> list[TokenTree]:
        self.proposals += 1
        return self.trees(want)

    def trees(self, want: DraftRequest) -> list[TokenTree]:
        return chain(want, 3)


def chain(want: DraftRequest, depth: int, token: int = 50) -> list[TokenTree]:
    return [TokenTree([token] * depth, [*range(depth)]) for _ in want.budgets]


class Raises(Guest):
    def trees(self, want: DraftRequest) -> list[TokenTree]:
        if self.proposals < 3:
            return chain(want, 2)
        raise RuntimeError("lost my way")


class RaisesOnce(Guest):
    def trees(self, want: DraftRequest) -> list[TokenTree]:
        if self.proposals == 2:
            raise RuntimeError("lost my way")
        return chain(want, 2)


def test_a_drafter_that_failed_comes_back(target: Decoder, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("paceline.engine.drafting.REST_S", 0.02)
    guest = RaisesOnce()
    engine = assemble(guest, decoder=target)
    jobs = [(prompt, WARM) for prompt in random_prompts(3)]
    assert ids(run(engine, jobs)) == plain(target, jobs)
    assert len(guest.released) >= 3 + 1  # those that it failed on at once, beside all at their ends
    time.sleep(0.02)
    assert engine.round.failure is None
    [again] = run(engine, jobs[:1])
    assert again.stats.drafted and again.stats.off_reason is None


class RaisesInObserve(Guest):
    def observe(self, step: StepFeatures) -> None:
        if self.proposals > 1:
            raise KeyError("observe")


class RaisesInRelease(Guest):
    def release(self, keys: Sequence[int]) -> None:
        raise OSError("release")


class Says(Guest):
    """Proposes the same tree for everybody; without one it returns no list."""

    def __init__(self, *tree: list[int]) -> None:
        super().__init__()
        self.tree = tree

    def trees(self, want: DraftRequest) -> Any:
        return [TokenTree(*self.tree) for _ in want.budgets] if self.tree else None


FAILING: dict[str, tuple[Callable[[], Guest], str]] = {
    "raises": (Raises, "RuntimeError: lost my way"),
    "no tree": (Says, "TypeError"),
    "outside of the vocabulary": (lambda: Says([VOCAB, VOCAB], [0, 1]), "outside the vocabulary"),
    "parents in the future": (lambda: Says([50, 50], [2, 1]), "not an earlier one"),
    "few parents": (lambda: Says([50, 50], [0]), "columns have lengths"),
    "raises in observe": (RaisesInObserve, "KeyError: 'observe'"),
    "raises in release": (RaisesInRelease, "OSError: release"),
}


@pytest.mark.parametrize("kind", FAILING)
def test_a_drafter_that_fails_costs_no_request(target: Decoder, kind: str):
    make, said = FAILING[kind]
    guest = make()
    jobs = [(prompt, WARM) for prompt in random_prompts(3)]
    engine = assemble(guest, decoder=target, kv_tokens=160)
    outputs = run(engine, jobs)
    assert ids(outputs) == plain(target, jobs)
    failure = getattr(engine.round, "failure", None)
    assert failure is not None and said in failure and "'guest'" in failure
    for output in outputs:
        consistent(output)
        # One that ended before the failure has nothing to tell.
        assert output.stats.off_reason == failure or (output.stats.drafted and output.stats.off_reason is None)
    assert outputs[-1].stats.off_reason == failure or kind == "raises in release"
    engine.pool.check_idle()
    calls = guest.proposals
    assert ids(run(engine, jobs)) == ids(outputs)
    assert guest.proposals == calls  # it is not asked again


def test_every_sequence_is_released_when_it_ends_or_is_preempted(target: Decoder):
    guest = Guest()
    engine = assemble(guest, decoder=target, kv_tokens=160)
    outputs = run(engine, [(prompt, GREEDY) for prompt in random_prompts(6)])
    preempted = sum(output.stats.preemptions for output in outputs)
    assert preempted > 0
    assert len(guest.released) == 6 + preempted and len(set(guest.released)) == 6
