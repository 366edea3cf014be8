"""The synthetic drafter: right as often as asked, never in the way of what the target says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kits.tiny import VOCAB, assemble, run, tiny_decoder
from scipy.stats import chi2

from paceline.bench.models import materialised
from paceline.core.errors import ConfigError
from paceline.core.sampling import SamplingParams
from paceline.core.stats import SpecStats
from paceline.drafters import registry
from paceline.drafters.base import DraftRequest, SequenceView
from paceline.drafters.synthetic import SyntheticConfig, SyntheticDrafter, read_answers, write_answers
from paceline.llm import LLM
from paceline.network.decoder import Decoder, TargetInfo

LENGTH = 96
GREEDY = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
WARM = SamplingParams(temperature=1, seed=5, max_tokens=LENGTH, ignore_eos=True)


@pytest.fixture(scope="module")
def target() -> Decoder:
    return tiny_decoder()


def prompts(count: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(3)
    return torch.randint(10, VOCAB, (count, 9), generator=draw).tolist()


def answered(target: Decoder, params: SamplingParams, count: int) -> list[tuple[list[int], list[list[int]]]]:
    """Prompts with what plain decoding says to each, sample by sample."""
    outputs = run(assemble(decoder=target), [(prompt, params) for prompt in prompts(count)])
    return [(o.prompt_token_ids, [sample.token_ids for sample in o.outputs]) for o in outputs]


def recorded(path: Path, answers: Sequence[tuple[list[int], list[list[int]]]]) -> str:
    write_answers(path, [(prompt, output) for prompt, outputs in answers for output in outputs])
    return str(path)


def merged(outputs: Sequence[Any]) -> SpecStats:
    total = SpecStats()
    for output in outputs:
        total = total.merge(output.stats)
    return total


def info(vocab_size: int) -> TargetInfo:
    return TargetInfo(
        name="toy",
        num_layers=1,
        d_model=8,
        vocab_size=vocab_size,
        max_position=512,
        dtype=torch.float32,
        eos_ids=(),
        bos_id=None,
        tokenizer=None,
        handle=None,  # type: ignore[arg-type]  # recorded answers need no states
        decoder=None,  # type: ignore[arg-type]
    )


def bound(path: Path, answers: Sequence[tuple[list[int], list[list[int]]]], vocab_size: int = VOCAB, **options: Any):
    drafter = SyntheticDrafter(SyntheticConfig(answers=recorded(path, answers), **options))
    drafter.bind(info(vocab_size), 8, 4096, torch.device("cpu"))
    return drafter


def view(prompt: Sequence[int], said: Sequence[int], key: int = 0) -> SequenceView:
    return SequenceView(key=key, tokens=[*prompt, *said], prompt_len=len(prompt), sampler=None)  # type: ignore[arg-type]


# -- the rate


@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize("accept", [0.8, 0.6])
def test_measured_acceptance_is_the_asked_one(target: Decoder, tmp_path: Path, params: SamplingParams, accept: float):
    """Chi-square over the depths. With 300 offers a depth, a rate off by 0.1 at one depth fails with 97 % chance."""
    answers = answered(target, params, 40)
    config = SyntheticConfig(answers=recorded(tmp_path / "a.jsonl", answers), accept=accept, depth=4)
    outputs = run(assemble(config, decoder=target), [(prompt, params) for prompt, _ in answers])
    stats = merged(outputs)
    offered, accepted = stats.depth_offered, stats.depth_accepted
    assert len(offered) == 4 and min(offered) >= 200
    variance = accept * (1 - accept)
    distance = sum((a - n * accept) ** 2 / (n * variance) for n, a in zip(offered, accepted, strict=True))
    assert chi2.sf(distance, df=4) > 0.01, list(zip(offered, accepted, strict=True))
    assert stats.sources.keys() == {"synthetic"}


@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize("accept", [0, 0.5, 1])
def test_ids_are_plain_decodings_at_any_rate(target: Decoder, tmp_path: Path, params: SamplingParams, accept: float):
    answers = answered(target, params, 6)
    path = recorded(tmp_path / "a.jsonl", answers)
    config = SyntheticConfig(answers=path, accept=accept, depth=3, seed=1)
    outputs = run(assemble(config, decoder=target), [(prompt, params) for prompt, _ in answers])
    assert [[s.token_ids for s in o.outputs] for o in outputs] == [said for _, said in answers]
    stats = merged(outputs)
    assert stats.drafted > 0
    if accept == 0:
        assert stats.accepted == 0 and stats.passes == 6 * LENGTH
    if accept == 1:  # the first pass has no draft, and every later one brings four tokens
        assert stats.passes == 6 * (1 + -(-(LENGTH - 1) // 4))


def test_samples_of_one_prompt_each_follow_their_own_answer(target: Decoder, tmp_path: Path):
    params = SamplingParams(temperature=1, seed=2, n=3, max_tokens=32, ignore_eos=True)
    answers = answered(target, params, 2)
    assert all(len({tuple(said) for said in outputs}) == 3 for _, outputs in answers)
    engine = assemble(SyntheticConfig(answers=recorded(tmp_path / "a.jsonl", answers), accept=1), decoder=target)
    outputs = run(engine, [(prompt, params) for prompt, _ in answers])
    assert [[s.token_ids for s in o.outputs] for o in outputs] == [said for _, said in answers]
    # A draft is lost only where a sample leaves the answer that was recorded first.
    assert merged(outputs).acceptance_rate > 0.8


# -- what is proposed


@given(
    st.integers(2, 7).flatmap(
        lambda v: st.tuples(st.just(v), st.lists(st.integers(0, v - 1), min_size=1, max_size=12))
    ),
    st.integers(0, 5),
    st.integers(0, 9),
)
def test_a_wrong_token_is_never_the_recorded_one(
    tmp_path_factory: pytest.TempPathFactory, toy: tuple[int, list[int]], said: int, seed: int
):
    vocab_size, output = toy
    path = tmp_path_factory.mktemp("toy") / "a.jsonl"
    drafter = bound(path, [([0], [output])], vocab_size, accept=0, seed=seed)
    proposal = drafter.draft_one(view([0], output[:said]), 64, 64)
    assert len(proposal) == min(4, max(0, len(output) - said))
    assert all(0 <= token < vocab_size for token in proposal.tokens)
    for node, token in enumerate(proposal.tokens):
        assert token != output[said + node]


def test_draws_are_a_function_of_seed_prompt_position_and_depth_alone(tmp_path: Path):
    draw = torch.Generator().manual_seed(0)
    answers = [([i, 1], [torch.randint(0, VOCAB, (40,), generator=draw).tolist()]) for i in range(5)]
    views = [
        view(prompt, outputs[0][:k], key=10 * i + k) for i, (prompt, outputs) in enumerate(answers) for k in (0, 3, 9)
    ]

    def drafts(order: Sequence[int], seed: int = 0, budget: int = 6) -> list[list[int]]:
        drafter = bound(tmp_path / "a.jsonl", answers, accept=0.5, depth=6, seed=seed)
        found = {i: drafter.draft_one(views[i], budget, 64).tokens for i in order}
        return [found[i] for i in range(len(views))]

    forward = drafts(range(len(views)))
    assert drafts(range(len(views))[::-1]) == forward
    assert drafts(range(len(views)), budget=2) == [tokens[:2] for tokens in forward]
    assert drafts(range(len(views)), seed=1) != forward
    together = bound(tmp_path / "a.jsonl", answers, accept=0.5, depth=6)
    tree = together.propose(DraftRequest(sequences=views, budgets=[6] * len(views), max_depths=[64] * len(views)))
    assert [row[1:] for row in tree.tokens] == forward


def test_budget_and_depth_are_respected(tmp_path: Path):
    answer = [5] * 20
    drafter = bound(tmp_path / "a.jsonl", [([1], [answer])], accept=1, depth=6)
    assert drafter.spec.default_budget == 6 and not drafter.spec.tree
    for budget, max_depth, nodes, deepest in [
        (64, 64, 6, 6),
        (64, 2, 2, 2),
        (4, 64, 4, 4),
        (0, 64, 0, 0),
        (64, 0, 0, 0),
    ]:
        request = DraftRequest(sequences=[view([1], answer[:1])], budgets=[budget], max_depths=[max_depth])
        tree = drafter.propose(request)
        tree.check()
        assert tree.counts[0] == nodes + 1 and max(tree.depths()[0]) == deepest
    assert max(drafter.propose(DraftRequest([view([1], answer[:18])], [64], [64])).depths()[0]) == 2


def test_nothing_is_proposed_without_a_record(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    drafter = bound(tmp_path / "a.jsonl", [([1, 2], [[3, 4, 5]])], accept=1)
    assert drafter.draft_one(view([1, 2], []), 8, 8).tokens == [3, 4, 5]
    assert not drafter.misses
    assert drafter.draft_one(view([2, 1], [], key=1), 8, 8).tokens == []
    assert "no recorded token for prompts that are not in the file" in caplog.text
    assert len(caplog.records) == 1
    assert drafter.draft_one(view([1, 2], [3, 9], key=2), 8, 8).tokens == []
    assert drafter.draft_one(view([1, 2], [3, 9, 5], key=2), 8, 8).tokens == []
    assert drafter.draft_one(view([1, 2], [3, 4, 5], key=3), 8, 8).tokens == []
    assert drafter.misses == {"unknown": 1, "left": 2, "ended": 1}
    assert len(caplog.records) == 1  # once is enough
    drafter.release([1, 2, 3])
    assert drafter.draft_one(view([1, 2], [3], key=2), 8, 8).tokens == [4, 5]  # a new sequence under an old key


def test_a_sequence_that_leaves_its_answer_still_says_what_plain_decoding_says(target: Decoder, tmp_path: Path):
    answers = answered(target, GREEDY, 3)
    other = [
        (prompt, [[*outputs[0][:20], (outputs[0][20] + 1) % VOCAB, *outputs[0][21:]]]) for prompt, outputs in answers
    ]
    engine = assemble(SyntheticConfig(answers=recorded(tmp_path / "a.jsonl", other), accept=1), decoder=target)
    outputs = run(engine, [(prompt, GREEDY) for prompt, _ in answers])
    assert [[s.token_ids for s in o.outputs] for o in outputs] == [said for _, said in answers]
    assert engine.round.failure is None
    assert engine.round.drafter.misses["left"] == 3 * (LENGTH - 22)  # the last token leaves no room to draft
    assert merged(outputs).accepted > 0


# -- options and files


def test_it_says_that_it_is_synthetic(tmp_path: Path):
    drafter = bound(tmp_path / "a.jsonl", [([1], [[2]])])
    assert drafter.spec.synthetic
    assert not registry.build(registry.parse("ngram")).spec.synthetic
    row = next(row for row in registry.describe() if row.name == "synthetic")
    assert row.error is None and "ynthetic" in row.help


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("synthetic", ["needs answers"]),
        ("synthetic,answers=a,accept=1.5", ["accept must be 1 or less"]),
        ("synthetic,answers=a,accept=-0.1", ["accept must be 0 or more"]),
        ("synthetic,answers=a,accept=nan", ["accept"]),
        ("synthetic,answers=a,accept=often", ["accept takes number"]),
        ("synthetic,answers=a,depth=0", ["depth must be 1 or more"]),
        ("synthetic,answers=a,rate=0.5", ["no option 'rate'"]),
    ],
)
def test_bad_options_are_refused(text: str, said: list[str]):
    with pytest.raises(ConfigError) as error:
        registry.parse(text)
    assert all(part in str(error.value) for part in said), error.value


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "holds no answer"),
        (["", "  "], "holds no answer"),
        (['{"prompt": [1], "output": [2]}', "[1, 2]"], "line 2: a list, not an object"),
        (['{"prompt": [1], "output": [2]}', "", "{broken"], "line 3: not JSON"),
        (['{"prompt": [1]}'], "line 1: 'output' is not a list of token ids"),
        (['{"prompt": [1], "output": [2, "3"]}'], "line 1: 'output'"),
        (['{"prompt": [true], "output": [2]}'], "line 1: 'prompt'"),
        (['{"prompt": [-1], "output": [2]}'], "line 1: 'prompt'"),
        (['{"prompt": [], "output": [2]}'], "line 1: the prompt is empty"),
    ],
)
def test_bad_files_are_refused_with_their_line(tmp_path: Path, lines: list[str], said: str):
    path = tmp_path / "bad.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(ConfigError) as error:
        registry.build(registry.parse(f"synthetic,answers={path}"))
    assert said in str(error.value) and "bad.jsonl" in str(error.value)


def test_a_missing_file_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot be read"):
        registry.build(registry.parse(f"synthetic,answers={tmp_path / 'nowhere.jsonl'}"))


def test_answers_of_another_vocabulary_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="line 2: token id 96, and toy has 96"):
        bound(tmp_path / "a.jsonl", [([1], [[2]]), ([1], [[96]])])


# -- with a whole model


def test_answers_are_recorded_and_read_through_the_public_entry(tmp_path: Path):
    path = tmp_path / "answers.jsonl"
    questions = [[5, 6, 7], [8, 9, 10, 11]]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with materialised("random:2x64x128x512") as folder:
        options: dict[str, Any] = {"dtype": "float32", "max_model_len": 64}
        asked = [{"prompt_token_ids": ids} for ids in questions]
        said = [output.outputs[0].token_ids for output in LLM(folder, **options).generate(asked, params)]
        write_answers(path, zip(questions, said, strict=True))
        answers = read_answers(path)
        assert [(list(a.prompt), list(a.output)) for a in answers] == list(zip(questions, said, strict=True))
        assert [json.loads(line)["output"] for line in path.read_text().splitlines()] == said
        drafter = f"synthetic,answers={path},accept=1,depth=5"
        llm = LLM(folder, drafter=drafter, budget=5, **options)
        outputs = llm.generate(asked, params)
    assert [o.outputs[0].token_ids for o in outputs] == said
    assert merged(outputs).passes == 2 * (1 + -(-23 // 6)) and merged(outputs).off_reason is None
