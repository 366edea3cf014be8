"""One request never ends another: faults of one sequence's own rules, and calls that end in their middle."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from kits.tiny import TOY_TEXTS, VOCAB, ToyText, alone, assemble, draft_model, run, streams, tiny_decoder

import paceline
from paceline.core.errors import ConfigError
from paceline.core.outputs import RequestOutput
from paceline.core.sampling import SamplingParams
from paceline.draft.ngram import NgramConfig
from paceline.engine.engine import Engine
from paceline.model.decoder import Decoder

pytestmark = pytest.mark.timeout(120)
WARM = SamplingParams(temperature=1, seed=5, max_tokens=20, ignore_eos=True, repetition_penalty=1.1)
BAD = 2  # which of the prompts has the fault


class Fault(Exception):
    """What a rule of one request raises."""


@pytest.fixture(scope="module")
def target() -> Decoder:
    return tiny_decoder()


def prompts(count: int = 4, seed: int = 0) -> list[list[int]]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(10, VOCAB, (8 + 5 * i,), generator=draw).tolist() * 2 for i in range(count)]


DRAFTERS: dict[str, Callable[[], dict[str, Any]]] = {
    "none": dict,
    "ngram": lambda: {"drafter": NgramConfig()},
    "tree": lambda: {"drafter": draft_model(noise=0.3, topk=3, depth=3, nodes=9), "budget": 9},
    "coupled": lambda: {"drafter": draft_model(noise=0.3, depth=3)},
    "rejection": lambda: {"drafter": draft_model(noise=0.3, depth=3, proposes="sampled"), "verifier": "rejection"},
    "streams": lambda: {"drafter": streams()},
}


def finish(engine: Engine, order: Sequence[str], done: dict[str, RequestOutput] | None = None) -> list[RequestOutput]:
    """Step until all are answered."""
    done = {} if done is None else done
    while engine.busy:
        for live in engine.step():
            if live.finished:
                done[live.id] = engine.output(live)
    engine.pool.check_integrity()
    engine.pool.check_idle()
    assert not engine.scheduler.running and not engine.scheduler.waiting
    return [done[request_id] for request_id in order]


def ids(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [sample.token_ids for output in outputs for sample in output.outputs]


def check_alone(
    outputs: Sequence[RequestOutput], expected: Sequence[RequestOutput], name: str, same: bool = True
) -> None:
    """The bad request ended with its error, and what it said until then is right; the others are whole.

    ``same`` is False where ids depend on what was drafted: a step without drafts, as the faulty one, draws others.
    """
    for i, (output, whole) in enumerate(zip(outputs, expected, strict=True)):
        (sample,), (reference,) = output.outputs, whole.outputs
        if i != BAD:
            assert len(sample.token_ids) == len(reference.token_ids) and sample.finish_reason == "length"
            assert not same or sample.token_ids == reference.token_ids
            assert output.error is None and output.stats.off_reason in (None, "no drafter was named")
            continue
        assert sample.finish_reason == "error" and sample.error == output.error == f"Fault: {name}"
        assert output.stats.emitted == len(sample.token_ids) == len(sample.origins)
        if same:
            assert sample.token_ids == reference.token_ids[: len(sample.token_ids)]
            assert reference.text.startswith(sample.text)


@pytest.mark.parametrize("after", [0, 5])
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_sampling_rule_that_fails_ends_its_own_request(target: Decoder, name: str, after: int):
    jobs = [(ids, WARM) for ids in prompts()]
    options = DRAFTERS[name]()
    engine = assemble(decoder=target, **options)
    order = [engine.submit(*job) for job in jobs]
    sampler = engine.live[order[BAD]].sequences[0].sampler

    def rule(logits: torch.Tensor, paths: torch.Tensor | None) -> None:
        if len(sampler.output_ids) >= after:
            raise Fault("sampling rule")

    sampler._steps.append(rule)
    check_alone(finish(engine, order), alone(target, jobs), "sampling rule", same=name != "rejection")
    assert engine.round.failure is None  # the drafter is not to blame


@pytest.mark.parametrize("name", ["ngram", "tree", "coupled", "streams"])
def test_a_rule_that_fails_on_drafts_alone_costs_its_request_drafts(target: Decoder, name: str):
    """Plain decoding never comes there: no token is lost, and no other request's drafts."""
    jobs = [(ids, WARM) for ids in prompts()]
    engine = assemble(decoder=target, **DRAFTERS[name]())
    order = [engine.submit(*job) for job in jobs]
    sampler = engine.live[order[BAD]].sequences[0].sampler

    def rule(logits: torch.Tensor, paths: torch.Tensor | None) -> None:
        if paths is not None and bool((paths >= 0).any()):
            raise Fault("on a draft")

    sampler._steps.append(rule)
    outputs = finish(engine, order)
    assert ids(outputs) == ids(alone(target, jobs)) and engine.round.failure is None
    assert "on a draft" in str(outputs[BAD].stats.off_reason)
    assert all(o.stats.drafted and o.stats.off_reason is None for i, o in enumerate(outputs) if i != BAD)


class FailingText(ToyText):
    """Fails at the fifth token."""

    sure = False

    def __init__(self) -> None:
        super().__init__()
        self.left = 5

    def push(self, token: int) -> str:
        self.left -= 1
        if not self.left:
            raise Fault("text")
        return super().push(token)


class FailingTexts:
    """Texts that fail for the answer to one prompt."""

    def __init__(self, bad: Sequence[int]) -> None:
        self.bad = tuple(bad)

    def stream(self, prompt_ids: Sequence[int], skip_special_tokens: bool) -> ToyText:
        return FailingText() if tuple(prompt_ids) == self.bad else ToyText()

    prompt, token = TOY_TEXTS.prompt, staticmethod(TOY_TEXTS.token)


@pytest.mark.parametrize("stop", ["never said", None])
@pytest.mark.parametrize("name", DRAFTERS)
def test_text_that_cannot_be_made_ends_its_own_request(target: Decoder, name: str, stop: str | None):
    jobs = [(ids, replace(WARM, stop=stop)) for ids in prompts()]
    engine = assemble(decoder=target, texts=FailingTexts(jobs[BAD][0]), **DRAFTERS[name]())
    order = [engine.submit(*job) for job in jobs]
    outputs = finish(engine, order)
    assert len(outputs[BAD].outputs[0].token_ids) == 4  # those before the one without a text, drafted or not
    check_alone(outputs, alone(target, jobs), "text", same=name != "rejection")


@pytest.mark.parametrize("asked", [{"logprobs": 2}, {"prompt_logprobs": 2}])
def test_log_probabilities_that_fail_end_their_own_request(target: Decoder, asked: dict[str, int]):
    jobs = [(ids, replace(WARM, **asked) if i == BAD else WARM) for i, ids in enumerate(prompts())]
    engine = assemble(NgramConfig(), decoder=target, max_batch_rows=9)
    order = [engine.submit(*job) for job in jobs]

    def fail(token: int) -> str:
        raise Fault("log-probabilities")

    engine.live[order[BAD]].sequences[0].token_text = fail
    check_alone(finish(engine, order), alone(target, jobs), "log-probabilities")


FOLDER = str(Path(paceline.__file__).parent)


class Interrupter:
    """Raises KeyboardInterrupt at the n-th line of Paceline's own code that runs."""

    def __init__(self, line: int | None = None) -> None:
        self.left = line
        self.seen = 0
        self.where = ""

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(FOLDER):
            return None
        if event == "line":
            self.seen += 1
            if self.seen == self.left:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self


@contextmanager
def interrupted(line: int | None) -> Iterator[Interrupter]:
    """Run a block up to a line; None: to its end, counting lines."""
    tracer, before = Interrupter(line), sys.gettrace()
    sys.settrace(tracer)
    try:
        yield tracer
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)


def tell(engine: Engine, told: dict[str, RequestOutput]) -> None:
    for live in engine.step():
        if live.finished:
            told[live.id] = engine.output(live)


def tables(output: RequestOutput) -> list[dict[int, float]]:
    """All log-probabilities of an answer, a dictionary a token."""
    rows = [row for sample in output.outputs for row in sample.logprobs or ()]
    rows += [row for row in output.prompt_logprobs or () if row is not None]
    return [{token: entry.logprob for token, entry in row.items()} for row in rows]


MID_STEP: dict[str, tuple[int, dict[str, Any]]] = {  # places that are tried, and what is asked for
    "ngram": (30, {}),
    "draft_model": (10, {}),
    "streams": (12, {}),
    "logprobs": (20, {"logprobs": 2, "prompt_logprobs": 1, "stop": "e5"}),
}


def engine_of(name: str, target: Decoder) -> Engine:
    options: dict[str, Any] = {"decoder": target, "kv_tokens": 160, "block_size": 4, "max_batch_rows": 23}
    if name == "draft_model":
        return assemble(draft_model(noise=0.3, topk=2, depth=3, nodes=5), **options)
    if name == "streams":
        return assemble(streams(), **options)
    return assemble(NgramConfig(), budget=6, **options)


@pytest.mark.parametrize("name", MID_STEP)
def test_an_interrupt_anywhere_in_a_step_changes_no_answer(target: Decoder, name: str):
    params = replace(WARM, max_tokens=10, **MID_STEP[name][1])
    jobs = [(ids, replace(params, n=2) if i == 1 else params) for i, ids in enumerate(prompts(3))]
    expected = alone(target, jobs)
    with interrupted(None) as whole:
        run(engine_of(name, target), jobs)
    assert whole.seen > 5000
    for line in random.Random(name).sample(range(1, whole.seen), MID_STEP[name][0]):
        engine, told = engine_of(name, target), {}
        submitted = 0
        with interrupted(line) as tracer:
            for i, job in enumerate(jobs):
                engine.submit(*job, request_id=str(i))
                submitted = i + 1
            while engine.busy:
                tell(engine, told)
        begun = set(engine.live) | set(told)
        while engine.busy:
            tell(engine, told)
        engine.pool.check_integrity()
        engine.pool.check_idle()
        for i in map(int, begun & set(told)):
            got = told[str(i)]
            if i == submitted:  # cut off in `submit`: the caller has not got it, and it is taken back
                assert {s.finish_reason for s in got.outputs} == {"abort"}, tracer.where
                continue
            assert ids([got]) == ids([expected[i]]), tracer.where
            assert [s.text for s in got.outputs] == [s.text for s in expected[i].outputs], tracer.where
            for mine, reference in zip(tables(got), tables(expected[i]), strict=True):
                assert mine == pytest.approx(reference, abs=1e-9), tracer.where
        missing = begun - set(told)
        assert len(missing) <= 1, tracer.where  # one that had ended when its step's report was cut off
        again = run(engine, jobs)
        assert ids(again) == ids(expected), tracer.where


def test_an_engine_is_usable_after_its_target_failed(target: Decoder, monkeypatch: pytest.MonkeyPatch):
    jobs = [(ids, WARM) for ids in prompts()]
    expected = alone(target, jobs)
    engine = assemble(NgramConfig(), decoder=target)
    order = [engine.submit(*job) for job in jobs]
    for _ in range(3):
        engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(type(target), "run_layers", lambda *a, **k: (_ for _ in ()).throw(MemoryError("no more")))
        with pytest.raises(MemoryError):
            engine.step()
        engine.abort(order[0])
    outputs = finish(engine, order[1:])
    assert ids(outputs) == ids(expected[1:])


def test_a_request_that_ended_in_the_failed_step_is_still_reported(target: Decoder, monkeypatch: pytest.MonkeyPatch):
    short, long = (prompts()[0], replace(WARM, max_tokens=3)), (prompts()[1], WARM)
    expected = alone(target, [short, long])
    engine = assemble(decoder=target)
    order = [engine.submit(*short), engine.submit(*long)]
    engine.step()
    engine.step()

    def fail(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_drop", fail)  # after its last token, before it is taken out
        with pytest.raises(MemoryError):
            engine.step()
    assert ids(finish(engine, order)) == ids(expected)


def test_the_largest_allowed_values_leave_the_answer_defined(target: Decoder):
    """Nothing overflows in float32: the masked stays masked, and no rule makes a number of nothing."""
    edges: list[dict[str, Any]] = [
        {"temperature": 1e6, "min_tokens": 8, "stop_token_ids": [*range(4, VOCAB)]},
        {"temperature": 1e-4, "logit_bias": {5: 1e30, 6: -1e30}, "top_p": 0.5, "repetition_penalty": 1e6},
        {"temperature": 1e-4, "repetition_penalty": 1e-6, "frequency_penalty": 2.0, "min_p": 1.0},
        {"temperature": 0, "logit_bias": {9: -1e30}, "repetition_penalty": 1e6, "presence_penalty": -2.0},
    ]
    narrow = tiny_decoder(dtype=torch.float32)
    for edge in edges:
        engine = assemble(decoder=narrow)
        params = SamplingParams(**{"max_tokens": 8, "seed": 1, "logprobs": 1, "logprobs_mode": "processed"} | edge)
        (output,) = run(engine, [(prompts()[0], params)])
        (sample,) = output.outputs
        assert len(sample.token_ids) == 8 and sample.cumulative_logprob is not None
        assert sample.cumulative_logprob <= 0 and not set(sample.token_ids) & set(edge.get("stop_token_ids", ()))


def test_rules_that_leave_nothing_to_choose_from_are_refused(target: Decoder):
    engine = assemble(decoder=target)
    everything = SamplingParams(min_tokens=1, stop_token_ids=list(range(VOCAB)))
    with pytest.raises(ConfigError, match=f"all {VOCAB} tokens"):
        engine.submit(prompts()[0], everything)
    assert not engine.busy
    assert run(engine, [(prompts()[0], replace(everything, min_tokens=0))])[0].outputs[0].finish_reason == "stop"
