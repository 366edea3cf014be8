"""What contract suites share: the embedded model, its plain answers, and what must be left after every test."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import pytest

from paceline import LLM, SamplingParams
from paceline.core.outputs import RequestOutput

MODEL = "paceline-small"
BUDGET = 6
LIMITS: dict[str, Any] = {"threads": 1, "max_model_len": 256, "max_sequences": 4}
QUESTION = "CREATE TABLE players (name, team, number)\nQuestion: Which team does number 21 play for?\nSQL:"
PROMPTS = [QUESTION, "name[The Mill], food[English], area[riverside]\nText:", (QUESTION + " SELECT team\n") * 2]


@cache
def plain() -> LLM:
    return LLM(MODEL, **LIMITS)


ANSWERS: dict[str, list[RequestOutput]] = {}


def reference(rules: SamplingParams) -> list[RequestOutput]:
    """Plain decoding's answers to `PROMPTS`."""
    if repr(rules) not in ANSWERS:
        ANSWERS[repr(rules)] = plain().generate(PROMPTS, rules)
    return ANSWERS[repr(rules)]


def same(outputs: Sequence[RequestOutput], wanted: Sequence[RequestOutput]) -> None:
    for output, plain_one in zip(outputs, wanted, strict=True):
        for a, b in zip(output.outputs, plain_one.outputs, strict=True):
            assert a.token_ids == b.token_ids
            assert (a.text, a.finish_reason, a.stop_reason) == (b.text, b.finish_reason, b.stop_reason)


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After each test, what the drafters and pools of its engines hold is what they held before any request."""
    made: list[LLM] = []
    start = LLM.__init__

    def noted(self: LLM, *args: Any, **options: Any) -> None:
        start(self, *args, **options)
        made.append(self)

    monkeypatch.setattr(LLM, "__init__", noted)
    yield
    for llm in made:
        llm.engine.pool.check_integrity()
        assert llm.engine.pool.idle and not llm.engine.live
        for pool in pools(llm.engine.round.drafter):
            assert pool.idle


def pools(part: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """Every pool that is reached from a drafter, but the target's, which rests with the engine."""
    seen = set() if seen is None else seen
    if id(part) in seen or type(part).__module__.split(".")[0] != "paceline":
        return
    seen.add(id(part))
    if hasattr(type(part), "idle"):
        yield part
    slots = [getattr(part, name, None) for name in getattr(type(part), "__slots__", ())]
    for value in [*getattr(part, "__dict__", {}).values(), *slots]:
        for one in value if isinstance(value, (list, tuple)) else [value]:
            yield from pools(one, seen)
