"""Off is free: without drafts a step runs the very operations and compiled calls that plain decoding runs, no other."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from paceline import LLM, SamplingParams
from paceline.draft.medusa.heads import Heads, HeadsConfig
from paceline.kernels.layers import Stack

PROMPT = {"prompt_token_ids": [0, 70, 300, 4000, 5, 6]}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


class Count(TorchDispatchMode):
    """Counts every tensor operation that reaches the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


def operations(llm: LLM, params: SamplingParams) -> Counter[str]:
    llm.generate([PROMPT], params)  # whatever is done once is done
    with Count() as count, pytest.MonkeyPatch.context() as patch:
        for name in ("run", "logits", "decide", "choose", "reaching"):  # the last one in front of any draft
            patch.setattr(Stack, name, counted(count.seen, name, getattr(Stack, name)))
        llm.generate([PROMPT], params)
    return count.seen


def counted(seen: Counter[str], name: str, call: Any) -> Any:
    def run(*args: Any, **options: Any) -> Any:
        seen[f"compiled {name}"] += 1
        return call(*args, **options)

    return run


@pytest.mark.parametrize(("kernels", "least"), [("torch", 100), ("auto", 7)])  # a compiled pass may be one call
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=8)])
def test_a_budget_of_zero_adds_no_operation(params: SamplingParams, kernels: str, least: int, tmp_path: Path):
    Heads.fresh(HeadsConfig(heads=2, d_model=384, vocab_size=8192)).save(tmp_path)
    plain = operations(LLM("paceline-small", kv_memory="64MiB", kernels=kernels), params)
    assert sum(plain.values()) > least
    for drafter in ("none", "ngram", "suffix", f"medusa:{tmp_path}"):
        llm = LLM("paceline-small", kv_memory="64MiB", kernels=kernels, drafter=drafter, budget=0)
        assert operations(llm, params) == plain, drafter


def test_a_budget_adds_some():
    """The count above can tell the difference (a fixed budget: what ``auto`` drafts hangs on the clock)."""
    plain = operations(LLM("paceline-small", kv_memory="64MiB"), GREEDY)
    drafter = "draft_model:paceline-small-draft"
    on = operations(LLM("paceline-small", kv_memory="64MiB", drafter=drafter, budget=4), GREEDY)
    assert on != plain
