"""What a near tie may explain, and what it may not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit import near_ties
from kit.near_ties import Finding, Judge, JudgedRequest, NearTies, OutputIds, Tolerance, compare_sequence
from kits.tiny import EOS, VOCAB, assemble, draft_model, run, tiny_decoder

from paceline.bench.records import Cell, Method, Report, Trial
from paceline.core.sampling import SamplingParams
from paceline.model.decoder import Decoder

LENGTH = 32
GREEDY = SamplingParams(temperature=0, max_tokens=LENGTH)
WARM = SamplingParams(temperature=0.7, seed=11, max_tokens=LENGTH)
CELL = Cell(workload="toy", max_new_tokens=LENGTH)


class TinyLLM:
    """What a judge wants of an `LLM`, around a tiny decoder."""

    def __init__(self, decoder: Decoder, drafter: Any = None, exact: bool = False) -> None:
        self.decoder = decoder
        self.engine = assemble(drafter, decoder=decoder, texts=None)
        self.tokenizer = None
        self.config = SimpleNamespace(exact=exact)

    def generate(self, prompts: Sequence[dict[str, list[int]]], params: SamplingParams) -> list[Any]:
        return run(self.engine, [(prompt["prompt_token_ids"], params) for prompt in prompts])

    def say(self, prompt: Sequence[int], params: SamplingParams) -> OutputIds:
        completion = run(self.engine, [(prompt, params)])[0].outputs[0]
        return OutputIds(completion.token_ids, completion.finish_reason)


def tiny_llm(dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    return TinyLLM(tiny_decoder(dtype=dtype), **options)


@pytest.fixture(scope="module")
def loose() -> Any:
    """Passes of many rows round otherwise than passes of one."""
    return tiny_llm()


@pytest.fixture(scope="module")
def llm() -> Any:
    """Passes have no spread, so that a continuation is the same however it is computed."""
    return TinyLLM(tiny_decoder(dtype=torch.bfloat16, exact=True))


def prompts(count: int, seed: int = 1) -> list[list[int]]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(10, VOCAB, (count, 8), generator=draw).tolist()


# -- near ties


def gaps(llm: Any, asked: JudgedRequest, said: OutputIds) -> list[tuple[float, int]]:
    """(gap between the two best scores, second best token) at every position of an output."""
    judge = Judge(llm, Tolerance(dtype=llm.decoder.dtype, ulps=0))
    scores = judge._scores(asked, near_ties.teacher_forced(llm.decoder, asked.prompt_ids, said.ids), said.ids)
    top = scores.topk(2, dim=-1)
    return [(float(v[0] - v[1]), int(i[1])) for v, i in zip(top.values, top.indices, strict=True)]


def continued(
    llm: Any, prompt: Sequence[int], said: OutputIds, at: int, token: int, params: SamplingParams
) -> OutputIds:
    """What the target says once ``token`` stands at position ``at``."""
    head = [*said.ids[:at], token]
    room = LENGTH - len(head)
    if token == EOS or room == 0:
        return OutputIds(head, "stop" if token == EOS else "length")
    tail = llm.say([*prompt, *head], replace(params, max_tokens=room))
    return OutputIds([*head, *tail.ids], tail.finish)


class Parting:
    """An output that parts from plain decoding's at a near tie, and goes on as the target would."""

    def __init__(self, llm: Any, params: SamplingParams) -> None:
        candidates = []
        for prompt in prompts(12):
            said = llm.say(prompt, params)
            asked = JudgedRequest(prompt_ids=prompt, params=params)
            found = [(gap, at, token) for at, (gap, token) in enumerate(gaps(llm, asked, said)) if 2 < at < 16]
            candidates += [(*tie, asked, said) for tie in found if tie[0] > 0.02]  # exact ties are frequent in bf16
        for self.gap, self.at, token, self.asked, self.plain in sorted(candidates, key=lambda c: c[:3]):
            self.other = continued(llm, self.asked.prompt_ids, self.plain, self.at, token, params)
            if len(self.other.ids) > self.at + 6:
                break
        self.heat = params.temperature or 1.0

    def judged(self, llm: Any, other: OutputIds, factor: float = 1.01) -> Finding:
        """With a tolerance of ``factor`` times the gap of the tie, in scores."""
        most = factor * self.gap * self.heat
        judge = Judge(llm, Tolerance(dtype=torch.bfloat16, ulps=1e9, most=most))
        finding = compare_sequence(self.plain, other, lambda at: judge.look(self.asked, self.plain, other, at))
        assert finding is not None
        return finding


@pytest.fixture(scope="module", params=[GREEDY, WARM], ids=["greedy", "warm"])
def parting(request: pytest.FixtureRequest, llm: Any) -> Parting:
    made = Parting(llm, request.param)
    assert list(made.other.ids) != list(made.plain.ids) and len(made.other.ids) > made.at + 6
    assert 0.02 < made.gap < 0.3
    return made


def test_a_near_tie_explains_a_difference(llm: Any, parting: Parting):
    finding = parting.judged(llm, parting.other)
    assert finding.explained and finding.position == parting.at
    assert finding.gap == pytest.approx(parting.gap, abs=1e-6)
    assert (finding.expected, finding.got) == (parting.plain.ids[parting.at], parting.other.ids[parting.at])


def test_a_wrong_token_with_a_large_gap_fails_in_bf16(llm: Any, loose: Any, parting: Parting):
    """At the very place of the tie, and at the widest tolerance that there is."""
    worst = (parting.plain.ids[parting.at] + 1) % VOCAB
    ids = [*parting.plain.ids[: parting.at], worst, *parting.plain.ids[parting.at + 1 :]]
    finding = parting.judged(llm, OutputIds(ids, parting.plain.finish))
    assert (finding.explained, finding.what, finding.position) == (False, "wrong token", parting.at)
    judge = Judge(loose, Tolerance.foreign(torch.bfloat16))
    again = judge.look(parting.asked, parting.plain, OutputIds(ids, parting.plain.finish), parting.at)
    assert not again.explained and again.gap is not None and again.tolerance is not None
    assert again.gap > again.tolerance > 0


# -- a whole report


def trial(method: str, said: Sequence[Sequence[int]], **changes: Any) -> Trial:
    values: dict[str, Any] = {
        "method": method,
        "cell": CELL,
        "group": 0,
        "repeat": 0,
        "prompts": [f"p{i}" for i in range(len(said))],
        "prompt_tokens": [8] * len(said),
        "outputs": [list(ids) for ids in said],
        "finish": ["length"] * len(said),
        "wall_ms": 1.0,
        "ttft_ms": [0.5] * len(said),
    }
    return Trial(**(values | changes))


def report_of(methods: Sequence[Method], trials: Sequence[Trial]) -> Report:
    return Report(
        title="toy",
        created="2026-01-01T00:00:00Z",
        command=["paceline", "bench"],
        model={"dtype": "bfloat16"},
        machine={},
        versions={},
        commit=None,
        settings={},
        workloads={},
        methods=list(methods),
        trials=list(trials),
    )


def answers(llm: Any, name: str, params: SamplingParams, repeat: int = 0, cell: Cell = CELL) -> Trial:
    said = [llm.say(prompt, params) for prompt in prompts(4)]
    return trial(name, [s.ids for s in said], finish=[s.finish for s in said], repeat=repeat, cell=cell)


def asked_of(params: SamplingParams) -> Any:
    return lambda trial, i: (prompts(4)[i], params)


OWN = [Method(name="plain"), Method(name="fast", drafter="draft_model:x")]


def never(method: Method) -> Any:
    raise AssertionError("no judge is needed where nothing differs")


@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "warm"])
def test_check_finds_a_real_method_identical(params: SamplingParams):
    """In float64, where nothing but a fault can make a difference."""
    decoder = tiny_decoder()
    cell = replace(CELL, temperature=params.temperature)
    fast: Any = TinyLLM(decoder, draft_model(depth=3))
    trials = [answers(llm, name, params, cell=cell) for name, llm in (("plain", TinyLLM(decoder)), ("fast", fast))]
    found, _ = near_ties.check(report_of(OWN, trials), NearTies(never, asked_of(params)))
    assert [(e.method, e.reference, e.cell, e.sequences, e.identical) for e in found] == [("fast", "plain", cell, 4, 4)]
