"""Hot tokens: a drafter's head is computed for them alone, by compiled code as by torch's, and nothing else changes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from paceline import LLM, SamplingParams, kernels
from paceline.core.errors import CapabilityError, ConfigError
from paceline.model.hot import FILE, load_hot, masked, most_frequent, save_hot
from paceline.weights import zoo

MODEL = "paceline-small"
VOCAB = 8192
DRAFTERS = ["eagle", "lyanna", "medusa", "spire", "draft_model"]
PROMPT = "Write a sentence for the meaning representation.\nname[The Cricketers], eatType[restaurant]\nText:"
compiled_only = pytest.mark.skipif(kernels.unavailable() is not None, reason=str(kernels.unavailable()))


PARAMS = (
    SamplingParams(temperature=0, max_tokens=48),
    SamplingParams(temperature=0.8, top_k=40, seed=5, max_tokens=48),
)


@cache
def plain(kernels: str = "auto") -> LLM:
    return LLM(MODEL, dtype="float32", threads=1, kernels=kernels)


@cache
def said() -> list[list[int]]:
    """What the target says alone, and so the tokens that drafts can be right about."""
    return [plain().generate([PROMPT], params)[0].outputs[0].token_ids for params in PARAMS]


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[str, list[int] | None], str]:
    """A copy of the zoo's drafter of a kind with the hot tokens given, as ``--drafter`` takes it."""

    def copy(kind: str, tokens: list[int] | None) -> str:
        source = zoo.find(str(zoo.weights(kind, MODEL)))
        assert source is not None
        folder = tmp_path / f"{kind}-{0 if tokens is None else len(tokens)}"
        shutil.copytree(source, folder)
        if tokens is not None:
            save_hot(torch.tensor(tokens), folder)
        return f"{kind}:{folder}"

    return copy


def answers(drafter: str, kernels: str = "auto") -> list[tuple[list[int], list[int], int]]:
    """Tokens, which of them were drafted, and the passes."""
    llm = LLM(MODEL, drafter=drafter, dtype="float32", threads=1, budget=4, kernels=kernels, share=plain(kernels))
    found = []
    for params in PARAMS:
        [output] = llm.generate([PROMPT], params)
        drafted = [i for i, origin in enumerate(output.outputs[0].origins) if origin == "drafted"]
        found.append((output.outputs[0].token_ids, drafted, output.stats.passes))
    return found


@pytest.mark.parametrize("kind", DRAFTERS)
def test_only_hot_tokens_are_drafted(kind: str, copied: Callable[..., str]) -> None:
    """Every second token of the answer is hot: no other is ever drafted, and the answer is what it was."""
    hot = sorted({*said()[0][::2]})
    found = answers(copied(kind, hot))
    assert [tokens for tokens, _, _ in found] == said()
    assert all({tokens[i] for i in drafted} <= {*hot} for tokens, drafted, _ in found) and found[0][1]


@compiled_only
@pytest.mark.parametrize("kind", DRAFTERS)
def test_compiled_code_and_torch_draft_the_same(kind: str, copied: Callable[..., str]) -> None:
    drafter = copied(kind, sorted({*said()[0], *range(0, VOCAB, 7)}))
    assert answers(drafter, "native") == answers(drafter, "torch")


def test_files(tmp_path: Path) -> None:
    assert load_hot(None, 10) is None and load_hot(tmp_path, 10) is None
    save_hot(most_frequent([3, 9, 1, 9, 0], 3), tmp_path)
    found = load_hot(tmp_path, 5)
    assert found is not None and found.tolist() == [0, 1, 3]
    for text, wrong in (
        ("[1]", "not a list of ids"),
        ('{"tokens": []}', "not a list of ids"),
        ('{"tokens": [5]}', "not a list of ids from 0 to 4"),
        ('{"tokens": [true]}', "not a list of ids"),
        ('{"tokens": [1, 1]}', "names a token twice"),
        ("{", "JSON"),
    ):
        (tmp_path / FILE).write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=wrong):
            load_hot(tmp_path, 5)


def test_medusa_with_heads_of_its_own_is_refused(tmp_path: Path) -> None:
    from paceline.draft.medusa.heads import Heads, HeadsConfig

    config = HeadsConfig(heads=1, d_model=384, vocab_size=VOCAB, own=True, accuracies=((0.5, 0.1),))
    heads = Heads(config)
    for value in heads.parameters():
        value.data.zero_()
    heads.save(tmp_path)
    (tmp_path / FILE).write_text(json.dumps({"tokens": [1, 2]}), encoding="utf-8")
    with pytest.raises(CapabilityError, match="names hot tokens, and its heads are its own"):
        LLM(MODEL, drafter=f"medusa:{tmp_path}", threads=1)


def test_masked() -> None:
    found = masked(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([0, 2]))
    assert found.tolist() == [[1.0, -torch.inf, 3.0]]
