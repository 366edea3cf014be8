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
from kits.tiny import EOS, VOCAB, assemble, draft_model, full_logits, run, tiny_decoder

from paceline.bench.records import Cell, Method, Report, Trial
from paceline.core.errors import ConfigError
from paceline.core.sampling import SamplingParams
from paceline.network.decoder import Decoder

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


# -- the target's own word


@pytest.mark.parametrize("rows", [1, 5, 512])
def test_teacher_forcing_is_one_causal_pass(rows: int):
    decoder = tiny_decoder()
    prompt, output = prompts(1)[0], prompts(1, seed=2)[0]
    expected = full_logits(decoder, [*prompt, *output])[len(prompt) - 1 : -1]
    torch.testing.assert_close(near_ties.teacher_forced(decoder, prompt, output, rows), expected, rtol=1e-9, atol=1e-9)
    assert near_ties.teacher_forced(decoder, prompt, []).shape == (0, VOCAB)
    assert near_ties.teacher_forced(decoder, prompt[:1], output[:1]).shape == (1, VOCAB)


def test_ulp_is_the_distance_to_the_next_number():
    values = torch.tensor([1.0, 1.5, 2.0, 3.99, 12.0, 100.0, 0.3])
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        rounded = values.to(dtype)
        step = torch.nextafter(rounded.float(), torch.tensor(1e9)) if dtype == torch.float32 else None
        if step is None:
            step = (rounded.view(torch.int16) + 1).view(dtype).float()
        torch.testing.assert_close(near_ties.ulp(rounded.float(), dtype), (step - rounded.float()).double())


def test_the_spread_is_measured_and_exact_passes_have_none():
    texts = [(prompt, output) for prompt, output in zip(prompts(3), prompts(3, seed=2), strict=True)]
    loose, exact = tiny_decoder(dtype=torch.bfloat16), tiny_decoder(dtype=torch.bfloat16, exact=True)
    assert near_ties.pass_spread(exact, texts) == 0
    spread = near_ties.pass_spread(loose, texts)
    logits = torch.cat([near_ties.teacher_forced(loose, *text) for text in texts])
    tolerance = Tolerance.measured(loose, texts).of_rows(logits)
    cap = near_ties.ULPS[torch.bfloat16] * near_ties.ulp(logits.abs().amax(dim=-1), torch.bfloat16)
    assert torch.equal(tolerance, cap.clamp(max=2 * spread))


def test_a_wrong_pass_does_not_widen_what_excuses_it(monkeypatch: pytest.MonkeyPatch):
    """Passes of many rows that are off by 100 are a fault, not rounding: the tolerance stays at its cap."""
    decoder = tiny_decoder(dtype=torch.bfloat16)
    right = near_ties.teacher_forced
    monkeypatch.setattr(near_ties, "teacher_forced", lambda d, p, o, rows=512: right(d, p, o, rows) + 100 * (rows > 1))
    tolerance = Tolerance.measured(decoder, [(prompts(1)[0], prompts(1, seed=2)[0])])
    assert tolerance.most >= 200
    assert float(tolerance.of_rows(torch.tensor([[12.0, -3.0]]))) == 8 * 2**-4


@pytest.mark.parametrize(
    ("dtype", "exact", "open_to_doubt"),
    [(torch.bfloat16, False, True), (torch.bfloat16, True, False), (torch.float32, False, False)],
)
def test_who_must_be_identical(dtype: torch.dtype, exact: bool, open_to_doubt: bool):
    text = [(prompts(1)[0], prompts(1, seed=2)[0])]
    tolerance = Tolerance.own(tiny_llm(dtype).decoder, exact, text)
    assert (tolerance.ulps > 0) == open_to_doubt


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


def test_a_gap_above_the_tolerance_does_not(llm: Any, parting: Parting):
    assert not parting.judged(llm, parting.other, factor=0.5).explained


def test_nothing_is_explained_without_a_tolerance(llm: Any, parting: Parting):
    judge = Judge(llm, Tolerance(dtype=torch.bfloat16, ulps=0))
    finding = judge.look(parting.asked, parting.plain, parting.other, parting.at)
    assert (finding.explained, finding.what) == (False, "wrong token")
    assert finding.gap == pytest.approx(parting.gap, abs=1e-6)


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


def test_what_follows_an_explained_difference_is_checked(llm: Any, parting: Parting):
    at = parting.at + 3
    ids = list(parting.other.ids)
    ids[at] = (ids[at] + 1) % VOCAB
    finding = parting.judged(llm, OutputIds(ids, parting.other.finish))
    assert not finding.explained
    assert finding.what == f"wrong token behind a difference at {parting.at} that a near tie explains"
    assert (finding.position, finding.got) == (at, ids[at])


@pytest.mark.parametrize("cut", [1, 3])
def test_an_explained_output_that_is_short_fails(llm: Any, parting: Parting, cut: int):
    finding = parting.judged(llm, OutputIds(parting.other.ids[:-cut], parting.other.finish))
    assert not finding.explained and finding.what == "short: no stop rule ends it here"


def test_an_explained_output_that_is_long_fails(llm: Any, parting: Parting):
    more = llm.say([*parting.asked.prompt_ids, *parting.other.ids], replace(parting.asked.params, max_tokens=2))
    finding = parting.judged(llm, OutputIds([*parting.other.ids, *more.ids], parting.other.finish))
    assert not finding.explained
    assert finding.what == f"{len(more.ids)} tokens long: the stop rules end it before".replace("1 tokens", "one token")


def test_an_explained_output_with_a_wrong_reason_fails(llm: Any, parting: Parting):
    wrong = "length" if parting.other.finish == "stop" else "stop"
    finding = parting.judged(llm, OutputIds(parting.other.ids, wrong))
    assert not finding.explained
    assert finding.what == f"ended as {wrong!r}, and the stop rules say {parting.other.finish!r}"


def test_a_reference_that_the_target_would_not_say_is_told_apart(llm: Any):
    """The method is right and plain decoding wrong: the failure says whose token it is."""
    prompt = prompts(1)[0]
    said = llm.say(prompt, GREEDY)
    broken = OutputIds([*said.ids[:4], (said.ids[4] + 1) % VOCAB, *said.ids[5:]], said.finish)
    judge = Judge(llm, Tolerance(dtype=torch.bfloat16, ulps=1))
    finding = judge.look(JudgedRequest(prompt_ids=prompt, params=GREEDY), broken, said, 4)
    assert finding.what == "plain decoding's own token is not the target's choice"


def test_an_output_that_ends_early_by_its_own_right_is_explained(llm: Any):
    """Behind an explained difference the lengths may differ, if a stop rule says so."""
    prompt = prompts(1)[0]
    params = replace(GREEDY, ignore_eos=True)
    said = llm.say(prompt, params)
    end = next(i for i in range(5, LENGTH) if said.ids[i] not in said.ids[:i])
    stop = said.ids[end]
    asked = JudgedRequest(prompt_ids=prompt, params=replace(params, stop_token_ids=[stop]))
    reference = OutputIds([*said.ids[:3], (said.ids[3] + 1) % VOCAB, *said.ids[4:]], "length")
    judge = Judge(llm, Tolerance(dtype=torch.bfloat16, ulps=1e9))
    assert judge.look(asked, reference, OutputIds(said.ids[: end + 1], "stop"), 3).explained
    assert not judge.look(asked, reference, OutputIds(said.ids[:end], "stop"), 3).explained


def test_penalties_are_part_of_the_scores():
    """The sampler's rules see the output so far, as they do in the engine."""
    llm = tiny_llm(torch.float64)
    params = replace(GREEDY, repetition_penalty=1.8, frequency_penalty=0.7)
    prompt = prompts(1)[0]
    said = llm.say(prompt, params)
    judge = Judge(llm, Tolerance(dtype=torch.float64, ulps=0))
    logits = near_ties.teacher_forced(llm.decoder, prompt, said.ids)
    chosen = judge._scores(JudgedRequest(prompt_ids=prompt, params=params), logits, said.ids).argmax(dim=-1).tolist()
    assert chosen == list(said.ids)
    assert logits.argmax(dim=-1).tolist() != chosen


@pytest.mark.parametrize(("ids", "what"), [([1, VOCAB], f"token id {VOCAB}"), ([1, *[2] * 600], "96 tokens long")])
def test_what_the_target_cannot_be_asked_is_a_failure_too(llm: Any, ids: list[int], what: str):
    """A peer may say anything; it must not stop the comparison."""
    judge = Judge(llm, Tolerance.foreign(torch.bfloat16), finish=False)
    asked = JudgedRequest(prompt_ids=[5] * 7, params=replace(GREEDY, max_tokens=700))
    finding = judge.look(asked, OutputIds([1, 3], "length"), OutputIds(ids, "length"), 1)
    assert not finding.explained and finding.what.startswith(what)


def test_a_warm_output_needs_its_seed(llm: Any):
    asked = JudgedRequest(prompt_ids=prompts(1)[0], params=SamplingParams(temperature=1))
    judge = Judge(llm, Tolerance(dtype=torch.bfloat16, ulps=0))
    with pytest.raises(ConfigError, match="seed"):
        judge.look(asked, OutputIds([1, 2], "length"), OutputIds([1, 3], "length"), 1)


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


def test_check_judges_with_the_target_of_the_reference(loose: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(near_ties, "pass_spread", lambda *_: 0.01)
    base = answers(loose, "plain", GREEDY)
    other = replace(base, method="fast", outputs=[list(ids) for ids in base.outputs])
    other.outputs[2][5] = (other.outputs[2][5] + 1) % VOCAB
    asked_for: list[str] = []

    def llm_of(method: Method) -> Any:
        asked_for.append(method.name)
        return loose

    [found], _ = near_ties.check(report_of(OWN, [base, other]), NearTies(llm_of, asked_of(GREEDY)))
    assert asked_for == ["plain"]
    assert [f["what"] for f in found.failures] == ["wrong token"]
    assert found.failures[0]["gap"] > found.failures[0]["tolerance"] == found.tolerance == pytest.approx(0.02)


def test_a_peer_agrees_at_a_tolerance_of_its_own(llm: Any):
    """The same parting that a peer's kernels may bring is none that ours may."""
    methods = [Method(name="plain"), Method(name="peer", engine="vllm", drafter="plain"), OWN[1]]
    parting = Parting(llm, GREEDY)
    names = {"prompts": ["p"], "prompt_tokens": [8]}
    base = trial("plain", [parting.plain.ids], finish=[parting.plain.finish], **names)
    others = [trial(n, [parting.other.ids], finish=[parting.other.finish], **names) for n in ("peer", "fast")]
    asked = parting.asked
    judge = NearTies(lambda m: llm, lambda t, i: (asked.prompt_ids, asked.params))
    found, _ = near_ties.check(report_of(methods, [base, *others]), judge)
    assert [(e.method, e.explained, len(e.failures)) for e in found] == [("peer", 1, 0), ("fast", 0, 1)]
