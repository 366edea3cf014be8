"""The public models that `make weights` fetches; a test of one that is not there is skipped by its name."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from paceline.weights.published import cache as cache_folder

FOLDER = cache_folder()  # before a test moves its cache
TOOL = Path(__file__).parents[2] / "tools" / "get_weights.py"


@cache
def tool() -> ModuleType:
    """`tools/get_weights.py`."""
    spec = importlib.util.spec_from_file_location("get_weights", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def smollm2() -> Path:
    """SmolLM2 135M Instruct in Q4_1."""
    return _there(tool().SMOLLM2, "make weights")


def gemma() -> Path:
    """Gemma 3 270M in Q4_K_M, without a chat template."""
    return _there(tool().GEMMA, "make weights GEMMA=yes")


@cache
def _whole(name: str) -> bool:
    known = tool()
    [weights] = [w for w in (known.SMOLLM2, known.GEMMA) if w.file == name]
    found: bool = known.is_whole(FOLDER / name, weights)
    return found


def _there(weights: object, command: str) -> Path:
    name: str = weights.file  # type: ignore[attr-defined]
    if not _whole(name):
        pytest.skip(f"{name} is not there: {command}")
    return FOLDER / name
