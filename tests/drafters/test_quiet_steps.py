"""Torch's threads sleep in steps that compiled layers run: woken, they spin on cores that these need."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from paceline import LLM, SamplingParams, kernels

PARALLEL = 32768  # numbers from which torch cuts an operation for its threads
MAKES_NOTHING = ("aten::empty", "aten::new_empty", "aten::detach", "aten::_unsafe_view")
DRAFTERS = ("streams:paceline-small-streams", "draft_model:paceline-small-draft")


class Large(TorchDispatchMode):
    """Notes the operations whose results are large enough to be cut for several threads."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = out if isinstance(out, tuple | list) else [out]
        name = func._schema.name
        if not func.is_view and not name.startswith(MAKES_NOTHING):
            self.found += [name for x in made if isinstance(x, torch.Tensor) and x.numel() >= PARALLEL]
        return out


def test_a_large_operation_is_found() -> None:
    x = torch.zeros(100, 400)
    with Large() as seen:
        x[:3] + 1, x.view(-1), torch.empty(1, 40000)
        assert not seen.found
        x[torch.arange(90)], torch.stack([x, x])
    assert seen.found == ["aten::index", "aten::stack"]


@pytest.mark.skipif(kernels.unavailable() is not None, reason=str(kernels.unavailable()))
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_no_operation_of_a_step_is_large(drafter: str) -> None:
    options = {"budget": 4, "max_sequences": 48, "max_model_len": 256, "max_batch_rows": 8192}
    llm = LLM("paceline-small", drafter=drafter, **options)
    ids = llm.tokenizer("SELECT name FROM players WHERE team = 7 AND number = 9; " * 8)["input_ids"][:110]
    params, engine = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True), llm.engine
    llm.generate([{"prompt_token_ids": ids[:-1]}], params)  # tables of angles grow once
    engine.pool.forget()
    names = [engine.submit([index, *ids], params) for index in range(10, 58)]
    running = [engine.live[name].sequences[0] for name in names]
    while not all(len(sequence.output_ids) for sequence in running):
        engine.step()
    with Large() as seen:
        for _ in range(4):
            engine.step()
    assert sum(sequence.stats.accepted for sequence in running), "nothing was drafted and right"
    assert not seen.found
