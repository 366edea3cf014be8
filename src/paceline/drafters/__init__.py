"""Who guesses: the contract (`base`), the names (`registry`) and one module a drafter.

The names below load on first use: naming a drafter must not cost the import of torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .base import Drafter, DrafterSpec, DraftRequest, SequenceView, StepFeatures
    from .ngram import NgramConfig
    from .none import NoneConfig
    from .proposal import Proposal
    from .registry import DrafterConfig, DrafterContext, build, describe, option, parse, register
    from .streams import StreamsConfig
    from .suffix import SuffixConfig
    from .synthetic import SyntheticConfig

_HOMES = {
    "DraftRequest": "base",
    "Drafter": "base",
    "DrafterSpec": "base",
    "SequenceView": "base",
    "StepFeatures": "base",
    "NgramConfig": "ngram",
    "NoneConfig": "none",
    "Proposal": "proposal",
    "StreamsConfig": "streams",
    "SuffixConfig": "suffix",
    "SyntheticConfig": "synthetic",
    "DrafterConfig": "registry",
    "DrafterContext": "registry",
    "build": "registry",
    "describe": "registry",
    "option": "registry",
    "parse": "registry",
    "register": "registry",
}

__all__ = [
    "DraftRequest",
    "Drafter",
    "DrafterConfig",
    "DrafterContext",
    "DrafterSpec",
    "NgramConfig",
    "NoneConfig",
    "Proposal",
    "SequenceView",
    "StepFeatures",
    "StreamsConfig",
    "SuffixConfig",
    "SyntheticConfig",
    "build",
    "describe",
    "option",
    "parse",
    "register",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
