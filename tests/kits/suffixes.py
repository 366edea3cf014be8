"""Suffix look-ups with other constants than the drafter's own."""

from __future__ import annotations

from typing import Any

from paceline.draft.suffix import SuffixConfig

CONSTANTS = ("min_match", "max_match", "reach", "min_prob")


def suffix_config(**values: Any) -> SuffixConfig:
    """The options and constants of a suffix drafter, by name."""
    own = {name: values.pop(name) for name in CONSTANTS if name in values}
    made: SuffixConfig = type("OtherSuffixConfig", (SuffixConfig,), own)(**values)
    return made
