"""Paceline, a speculative-decoding engine: a drafter proposes tokens, the target verifies them and chooses every token.

``LLM``, ``AsyncLLM`` and the rest are imported on first use, so that ``import paceline`` and ``paceline --help`` take
milliseconds instead of the seconds that importing torch takes.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api.async_llm import AsyncLLM as AsyncLLM
    from .api.llm import LLM as LLM
    from .core.errors import CapabilityError as CapabilityError
    from .core.errors import ConfigError as ConfigError
    from .core.errors import PacelineError as PacelineError
    from .core.errors import RequestError as RequestError
    from .core.outputs import Chunk as Chunk
    from .core.outputs import CompletionOutput as CompletionOutput
    from .core.outputs import RequestOutput as RequestOutput
    from .core.sampling import SamplingParams as SamplingParams

__version__ = "0.3.0"

# torch's OpenMP threads spin for milliseconds after each of its parallel operations, on cores that the threads of the
# compiled layers need. They read this when torch is loaded: where that was before, or the user chose, nothing changes.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")

_HOME = {  # public name -> module that defines it
    "LLM": ".api.llm",
    "AsyncLLM": ".api.async_llm",
    "Chunk": ".core.outputs",
    "SamplingParams": ".core.sampling",
    "RequestOutput": ".core.outputs",
    "CompletionOutput": ".core.outputs",
    "PacelineError": ".core.errors",
    "ConfigError": ".core.errors",
    "CapabilityError": ".core.errors",
    "RequestError": ".core.errors",
    "Speculation": ".core.speculation",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
