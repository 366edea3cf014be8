"""The tool that asks for answers under random schemas: the engine passes it, and it finds one that does not."""

from __future__ import annotations

import random
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM


class Other:
    """An engine that reads another prompt."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def generate(self, prompts: list[str], params: list[Any]) -> Any:
        """Its answers."""
        return self._llm.generate([f"{prompt} " for prompt in prompts], params)


def test_random_schemas_hold_and_another_engine_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "tools")
    tool: Any = import_module("try_schemas")
    plain = LLM("paceline-small", exact=True)
    drafting = LLM("paceline-small", exact=True, share=plain, drafter="hybrid:grammar+suffix", budget=8)
    draw = random.Random(3)
    schemas = [tool.arguments(draw) for _ in range(3)]
    found = tool._batch(plain, {"own": drafting, "other": Other(plain)}, schemas, 3)
    assert found["valid"] == 6 and found["same ids, own"] == 8 and found["accepted drafts, own"] > 10
    assert not any(name.startswith("WRONG ids, own") for name in found)
    assert any(name.startswith("WRONG ids, other") for name in found)


def test_texts_that_are_none_of_a_schema_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "tools")
    tool: Any = import_module("try_schemas")
    wanted = {"type": "object", "required": ["a"]}
    assert [bool(tool._invalid(text, wanted)) for text in ('{"a":1}', "{}", '{"a":')] == [False, True, True]
