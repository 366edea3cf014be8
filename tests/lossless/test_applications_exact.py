"""Applications: a request that names one gets what a model with the merged weights says, whoever runs beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from kits.tiny import (
    assemble,
    draft_model,
    hybrid,
    random_prompts,
    run,
    tiny_adapters,
    tiny_application,
    tiny_decoder,
    tiny_streams,
)

from paceline.core.outputs import RequestOutput
from paceline.core.sampling import SamplingParams
from paceline.draft.base import Drafter
from paceline.draft.ngram import NgramConfig
from paceline.draft.registry import DrafterConfig
from paceline.draft.suffix import SuffixConfig
from paceline.engine.engine import Engine
from paceline.model.applications import Application
from paceline.model.decoder import Decoder
from paceline.papers.streaming.drafter import StreamsConfig
from paceline.papers.streaming.model import StreamSet

pytestmark = pytest.mark.timeout(120)
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
WARM = SamplingParams(temperature=1, seed=5, max_tokens=24, ignore_eos=True)
PENALISED = SamplingParams(temperature=0.8, seed=9, max_tokens=20, repetition_penalty=1.3, frequency_penalty=0.4)
OPTIONS = (GREEDY, WARM, PENALISED)
NAMES = ("sql", "prose", None)
Makes = Callable[[], Drafter | DrafterConfig | None]
DRAFTERS: dict[str, Makes] = {
    "none": lambda: None,
    "ngram": NgramConfig,
    "suffix": SuffixConfig,
    "draft_model": lambda: draft_model(depth=3),
    "draft_tree": lambda: draft_model(depth=2, topk=3),
    "hybrid": hybrid,
}


@cache
def target() -> Decoder:
    return tiny_decoder()


@cache
def trained(name: str) -> StreamSet:
    """Two applications that differ in all they can: seed, rank, scale, and which linears have adapters."""
    if name == "sql":
        return tiny_adapters(seed=1, rank=4)
    return tiny_adapters(seed=2, rank=7, alpha=3.0, layers=(0, 2), linears=("qkv", "down"), size=0.8)


def applications() -> list[Application]:
    return [tiny_application(name, target(), trained(name)) for name in NAMES if name]


@cache
def merged(name: str | None) -> Decoder:
    """The target with an application's adapters added to its weights by hand."""
    return tiny_decoder(merged=trained(name).adapters if name else None)


def ids(outputs: Sequence[RequestOutput]) -> list[list[list[int]]]:
    return [[sample.token_ids for sample in output.outputs] for output in outputs]


def plain(prompt: list[int], params: SamplingParams, name: str | None) -> RequestOutput:
    """The reference: the merged model alone, without adapters, drafter or company."""
    output: RequestOutput = run(assemble(decoder=merged(name)), [(prompt, params)])[0]
    return output


def jobs(count: int) -> tuple[list[tuple[list[int], SamplingParams]], list[str | None]]:
    """Requests that differ in prompt, parameters and application."""
    asked = [(prompt, OPTIONS[i % 3]) for i, prompt in enumerate(random_prompts(count))]
    return asked, [NAMES[(i + i // 3) % 3] for i in range(count)]


def check(engine: Engine, count: int = 9) -> list[RequestOutput]:
    """A mixed batch says what each merged model says alone."""
    asked, names = jobs(count)
    outputs = run(engine, asked, names)
    for output, (prompt, params), name in zip(outputs, asked, names, strict=True):
        assert ids([output]) == ids([plain(prompt, params, name)]), name
        assert output.application == name
    return outputs


def test_adapters_change_the_answers() -> None:
    """Else nothing here would test anything."""
    for prompt in random_prompts(4):
        for params in OPTIONS:
            answers = [plain(prompt, params, name).outputs[0].token_ids for name in NAMES]
            assert len({tuple(answer) for answer in answers}) == 3
            assert len({*answers[0]}) > 8


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_mixed_batch_is_the_merged_models_alone(drafter: str) -> None:
    check(assemble(DRAFTERS[drafter](), decoder=target(), applications=applications()))


@pytest.mark.parametrize("drafter", ["none", "draft_tree"])
def test_preemption_and_chunks_change_nothing(drafter: str) -> None:
    engine = assemble(
        DRAFTERS[drafter](),
        decoder=target(),
        applications=applications(),
        kv_tokens=144,
        block_size=8,
        max_batch_rows=9,
    )
    outputs = check(engine)
    assert sum(output.stats.preemptions for output in outputs) > 0


def test_samples_and_logprobs_are_the_applications_own() -> None:
    engine = assemble(NgramConfig(), decoder=target(), applications=applications())
    asked = [(prompt, replace(WARM, n=3, logprobs=3, prompt_logprobs=2)) for prompt in random_prompts(3, low=18)]
    outputs = run(engine, asked, NAMES)
    for output, (prompt, params), name in zip(outputs, asked, NAMES, strict=True):
        expected = plain(prompt, params, name)
        assert ids([output]) == ids([expected])
        for ours, theirs in zip(output.outputs, expected.outputs, strict=True):
            assert_close(ours.logprobs, theirs.logprobs)
        assert_close(output.prompt_logprobs, expected.prompt_logprobs)


def assert_close(ours: Any, theirs: Any) -> None:
    assert len(ours) == len(theirs) > 0
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine is None) == (other is None)
        if mine is not None:
            assert mine.keys() == other.keys()
            assert all(abs(mine[i].logprob - other[i].logprob) < 1e-9 for i in mine)


def test_k_and_v_of_a_prompt_are_found_by_the_same_application_alone() -> None:
    engine = assemble(decoder=target(), applications=applications())
    prompt = random_prompts(1, low=40)[0]
    seen: set[str | None] = set()
    for name in (*NAMES, *NAMES):
        output = run(engine, [(prompt, GREEDY)], [name])[0]
        first = name not in seen
        assert output.stats.cached_prompt_tokens == (0 if first else 32)
        assert ids([output]) == ids([plain(prompt, GREEDY, name)])
        seen.add(name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_bits_do_not_depend_on_the_company(dtype: torch.dtype) -> None:
    decoder = tiny_decoder(dtype=dtype, exact=True)
    made = [tiny_application(name, decoder, seed=seed) for seed, name in enumerate(("sql", "prose"))]
    asked, names = jobs(9)
    together = run(assemble(NgramConfig(), decoder=decoder, applications=made, max_batch_rows=13), asked, names)
    for output, job, name in zip(together, asked, names, strict=True):
        alone = run(assemble(decoder=decoder, applications=made), [job], [name])
        assert ids([output]) == ids(alone)


def test_a_wrong_range_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault is noticed: with the ranges one row too short, the mixed batch differs."""
    from paceline.engine import passes

    honest = passes.adapter_ranges

    def short(*args: Any) -> Any:
        return [replace(r, stop=r.stop - 1) for r in honest(*args)]

    monkeypatch.setattr(passes, "adapter_ranges", short)
    with pytest.raises(AssertionError):
        check(assemble(decoder=target(), applications=applications()))


def mixed_applications() -> list[Application]:
    """One with three streams, one with two, one with adapters alone."""
    parts = {"sql": trained("sql"), "fast": fast(), "faster": tiny_streams(mode="shared", gamma=2, seed=4)}
    return [tiny_application(name, target(), made) for name, made in parts.items()]


def fast() -> StreamSet:
    return tiny_streams(mode="shared", gamma=3, layers=2, seed=3)


def streaming(**options: Any) -> Engine:
    drafter = StreamsConfig(k=8, nodes=40, best_path_batch=99)
    return assemble(drafter, decoder=target(), applications=mixed_applications(), **options)


@cache
def streamed(prompt: tuple[int, ...], params_index: int, name: str | None) -> list[list[int]]:
    """The reference: alone, nothing drafted, in one chunk."""
    if name in (None, "sql"):
        return ids([plain(list(prompt), OPTIONS[params_index], name)])[0]
    return ids(run(streaming(budget=0), [(prompt, OPTIONS[params_index])], [name]))[0]


@pytest.mark.parametrize(
    "options",
    [{}, {"max_batch_rows": 23}, {"kv_tokens": 144, "block_size": 8, "max_batch_rows": 30}, {"budget": 3}],
    ids=["roomy", "chunks", "preemption", "small trees"],
)
def test_streams_adapters_and_the_base_in_one_pass(options: dict[str, Any]) -> None:
    count = 12
    engine = streaming(**options)
    asked = [(prompt, OPTIONS[i % 3]) for i, prompt in enumerate(random_prompts(count))]
    names = [("fast", "sql", None, "faster")[i % 4] for i in range(count)]
    outputs = run(engine, asked, names)
    for i, (output, (prompt, _), name) in enumerate(zip(outputs, asked, names, strict=True)):
        assert ids([output])[0] == streamed(tuple(prompt), i % 3, name), name
        assert output.stats.drafted == 0 or name in ("fast", "faster")
    assert sum(output.stats.accepted for output in outputs) > 0
    assert (sum(output.stats.preemptions for output in outputs) > 0) == ("kv_tokens" in options)


def test_streams_change_the_answers_of_their_application() -> None:
    """Else the reference above would not notice main rows that forget their streams."""
    without = tiny_decoder(merged=fast().adapters)
    prompt = random_prompts(1, low=30)[0]
    bare = ids(run(assemble(decoder=without), [(prompt, GREEDY)]))[0]
    assert streamed(tuple(prompt), 0, "fast") != bare


def test_generated_rows_with_streams_are_not_found_as_a_prompt() -> None:
    engine = streaming()
    prompt = random_prompts(1, low=40, high=40)[0]
    for name, found in (("fast", 32), ("sql", 48), (None, 48)):
        answer = run(engine, [(prompt, GREEDY)], [name])[0].outputs[0].token_ids
        longer = prompt + answer
        output = run(engine, [(longer, GREEDY)], [name])[0]
        assert output.stats.cached_prompt_tokens == found
        assert ids([output])[0] == streamed(tuple(longer), 0, name)
