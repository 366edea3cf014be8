"""What counts as the same output, what a near tie may explain, and what it may not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kits.tiny import EOS, VOCAB, assemble, draft_model, full_logits, run, tiny_decoder

from paceline.bench import lossless, near_ties
from paceline.bench.lossless import compare_outputs, compare_sequence
from paceline.bench.near_ties import Finding, Judge, JudgedRequest, OutputIds, Tolerance
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


def failing(found: Any) -> list[tuple[str, str]]:
    return [(failure["prompt"], failure["what"]) for failure in found.failures]


OUTPUTS = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
PLAIN = trial("plain", OUTPUTS)


# -- ids, lengths, reasons, order


def test_identical_outputs_pass():
    found = compare_outputs([PLAIN], [trial("ngram", OUTPUTS)])
    assert found.passed and (found.sequences, found.identical, found.explained) == (3, 3, 0)
    assert (found.method, found.reference, found.cell, found.tolerance) == ("ngram", "plain", CELL, None)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"outputs": [[1, 2, 3], [4, 5, 5], [7, 8, 9]]}, [("p1", "wrong token")]),
        ({"outputs": [[1, 2], [4, 5, 6], [7, 8, 9]]}, [("p0", "one token short")]),
        ({"outputs": [[], [4, 5, 6], [7, 8, 9]]}, [("p0", "3 tokens short")]),
        ({"outputs": [[1, 2, 3], [4, 5, 6], [7, 8, 9, 9]]}, [("p2", "one token long")]),
        (
            {"finish": ["length", "stop", "length"]},
            [("p1", "finish reason 'stop', plain decoding's is 'length'")],
        ),
        (
            {"prompts": ["p1", "p0", "p2"], "outputs": [[4, 5, 6], [1, 2, 3], [7, 8, 9]]},
            [
                ("p1", "prompts in another order: 'p0' belongs here"),
                ("p0", "prompts in another order: 'p1' belongs here"),
            ],
        ),
        (
            {"outputs": [[4, 5, 6], [1, 2, 3], [7, 8, 9]]},
            [
                ("p0", "outputs in another order: this is the output of prompt 'p1'"),
                ("p1", "outputs in another order: this is the output of prompt 'p0'"),
            ],
        ),
        (
            {"prompt_tokens": [8, 8, 7]},
            [("p2", "another prompt: of 7 tokens, plain decoding's has 8")],
        ),
        (
            {"prompts": ["p0", "p1", "p1"]},
            [(p, "prompt 'p1' is listed twice") for p in ("p0", "p1", "p1")],
        ),
        (
            {"prompts": ["p0", "p1", "p9"]},
            [(p, "other prompts: ['p2', 'p9'] are in one of the two alone") for p in ("p0", "p1", "p9")],
        ),
        (
            {"outputs": [[1, 2, 3], [4, 5, 6]]},
            [(p, "ngram has 2 outputs for 3 prompts") for p in ("p0", "p1", "p2")],
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_every_difference_is_a_failure_with_a_name(changes: dict[str, Any], expected: list[tuple[str, str]]):
    found = compare_outputs([PLAIN], [trial("ngram", OUTPUTS, **changes)])
    assert failing(found) == expected
    assert not found.passed
    assert found.sequences == 3 and found.identical == 3 - len(expected)


def test_a_failure_says_where_and_what():
    found = compare_outputs([PLAIN], [trial("ngram", [[1, 2, 3], [4, 9, 6], [7, 8, 9]])])
    assert found.failures == [
        {"prompt": "p1", "group": 0, "repeat": 0, "what": "wrong token", "position": 1, "expected": 5, "got": 9}
    ]


def test_a_group_with_fewer_prompts_fails():
    found = compare_outputs([PLAIN], [trial("ngram", OUTPUTS[:2])])
    assert len(found.failures) == 2 and "['p2']" in found.failures[0]["what"]


def test_trials_pair_by_group_and_repeat():
    other = [[1], [2], [3]]
    base = [PLAIN, replace(PLAIN, group=1, outputs=other)]
    pairs = [trial("ngram", other, group=1), trial("ngram", OUTPUTS, group=0)]
    assert compare_outputs(base, pairs).identical == 6
    swapped = [replace(t, group=1 - t.group) for t in pairs]
    assert compare_outputs(base, swapped).identical == 0


def test_a_greedy_trial_finds_another_repeat_and_a_warm_one_does_not():
    late = trial("ngram", OUTPUTS, repeat=3)
    assert compare_outputs([PLAIN], [late]).identical == 3
    cell = replace(CELL, temperature=1.0)
    assert compare_outputs([replace(PLAIN, cell=cell)], [replace(late, cell=cell)]).sequences == 0


def test_failed_trials_have_no_say():
    broken = trial("ngram", [], prompts=["p0", "p1", "p2"], prompt_tokens=[], finish=[], error="out of memory")
    found = compare_outputs([PLAIN], [broken, trial("ngram", OUTPUTS, repeat=1)])
    assert found.passed and found.sequences == 3
    assert compare_outputs([PLAIN], [broken]).sequences == 0


def test_a_peers_own_words_for_the_end_may_be_left_out():
    peer = trial("peer", OUTPUTS, finish=["limit"] * 3)
    assert not compare_outputs([PLAIN], [peer]).passed
    assert compare_outputs([PLAIN], [peer], finish=False).identical == 3


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


def asked_of(params: SamplingParams) -> lossless.RequestOf:
    return lambda trial, i: JudgedRequest(prompt_ids=prompts(4)[i], params=params)


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
    found = lossless.check(report_of(OWN, trials), never, asked_of(params))
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

    found = lossless.check(report_of(OWN, [base, other]), llm_of, asked_of(GREEDY))[0]
    assert asked_for == ["plain"]
    assert [f["what"] for f in found.failures] == ["wrong token"]
    assert found.failures[0]["gap"] > found.failures[0]["tolerance"] == found.tolerance == pytest.approx(0.02)


def test_a_method_is_held_against_plain_decoding_of_its_own_dtype():
    methods = [
        *OWN,
        Method(name="plain32", dtype="float32"),
        Method(name="fast32", drafter="ngram", dtype="float32"),
        Method(name="same", drafter="ngram", dtype="bfloat16"),
        Method(name="lone", drafter="ngram", dtype="int8"),
    ]
    wide = [[9, 9, 9]] * 3
    trials = [trial(m.name, wide if "32" in m.name else OUTPUTS) for m in methods]
    found = lossless.check(report_of(methods, trials), never, asked_of(GREEDY))
    assert {e.method: e.reference for e in found} == {"fast": "plain", "fast32": "plain32", "same": "plain"}
    assert all(e.passed for e in found)
    notes = lossless.unchecked(report_of(methods, trials))
    assert notes == ["lone: ids not compared; plain decoding in int8 is not among the methods."]


def test_of_two_references_the_one_with_the_same_settings_counts():
    exact = {"exact": True}
    methods = [*OWN, Method(name="plain-exact", settings=exact), Method(name="x", drafter="ngram", settings=exact)]
    trials = [trial(m.name, [[5]] if "x" in m.name else [[6]]) for m in methods]
    found = lossless.check(report_of(methods, trials), never, asked_of(GREEDY))
    assert {e.method: (e.reference, e.passed) for e in found} == {"fast": ("plain", True), "x": ("plain-exact", True)}


def test_ids_that_differ_by_design_are_not_compared_but_named():
    methods = [*OWN, Method(name="drawn", drafter="draft_model:x", settings={"verifier": "rejection"})]
    methods.append(Method(name="llama.cpp", engine="llama.cpp", drafter="plain"))
    warm = replace(CELL, temperature=1.0)
    trials = [trial(m.name, OUTPUTS, cell=cell) for cell in (CELL, warm) for m in methods]
    found = lossless.check(report_of(methods, trials), never, asked_of(GREEDY))
    compared = [(e.method, e.cell.temperature) for e in found]
    assert compared == [("fast", 0), ("drawn", 0), ("llama.cpp", 0), ("fast", 1)]
    notes = lossless.unchecked(report_of(methods, trials))
    assert len(notes) == 2 and "rejection" in notes[0] and "llama.cpp draws with noise of its own" in notes[1]


def test_a_peer_agrees_at_a_tolerance_of_its_own(llm: Any):
    """The same parting that a peer's kernels may bring is none that ours may."""
    methods = [Method(name="plain"), Method(name="peer", engine="vllm", drafter="plain"), OWN[1]]
    parting = Parting(llm, GREEDY)
    names = {"prompts": ["p"], "prompt_tokens": [8]}
    base = trial("plain", [parting.plain.ids], finish=[parting.plain.finish], **names)
    others = [trial(n, [parting.other.ids], finish=[parting.other.finish], **names) for n in ("peer", "fast")]
    found = lossless.check(report_of(methods, [base, *others]), lambda m: llm, lambda t, i: parting.asked)
    assert [(e.method, e.explained, len(e.failures)) for e in found] == [("peer", 1, 0), ("fast", 0, 1)]


def test_plain_decoding_that_does_not_repeat_is_reported():
    again = trial("plain", [[1, 2, 3], [4, 5, 7], [7, 8, 9]], repeat=1)
    found = lossless.check(report_of(OWN, [PLAIN, again]), never, asked_of(GREEDY))
    assert [(e.method, e.reference) for e in found] == [("plain", "plain")]
    assert failing(found[0]) == [("p1", "wrong token")]
    assert lossless.check(report_of(OWN, [PLAIN, replace(PLAIN, repeat=1)]), never, asked_of(GREEDY)) == []


def test_exactness_survives_json(llm: Any):
    report = report_of(OWN, [PLAIN, trial("fast", [[1], [4, 5, 6], [7, 8, 8]])])
    report.exactness = lossless.check(report, lambda m: llm, asked_of(GREEDY))
    again = Report.from_dict(report.as_dict())
    assert again.exactness == report.exactness and not again.exactness[0].passed
