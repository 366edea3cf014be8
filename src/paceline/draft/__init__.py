"""Drafters: the contract (`base`), the names (`registry`) and one module a drafter.

The names below load on first use: naming a drafter must not import torch.
"""

# ruff: noqa: F401  (the imports are for type checkers)

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..core.tree import TokenTree
    from .base import Drafter, DrafterSpec, DraftRequest, StepFeatures
    from .ngram import NgramConfig
    from .none import NoneConfig
    from .registry import DrafterConfig, DrafterContext, build, describe, option, parse, register
    from .suffix import SuffixConfig
    from .text_sessions import LookUp

_NAMES = {  # by the module that defines them
    "base": ["Drafter", "DrafterSpec", "DraftRequest", "StepFeatures"],
    "ngram": ["NgramConfig"],
    "none": ["NoneConfig"],
    ".core.tree": ["TokenTree"],
    "registry": ["DrafterConfig", "DrafterContext", "build", "describe", "option", "parse", "register"],
    "suffix": ["SuffixConfig"],
    "text_sessions": ["LookUp"],
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
