"""Rounds: the order of drafting and verification in a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..core.errors import ConfigError
from ..drafters.base import DrafterSpec
from .base import Round
from .fused import FusedRound
from .serial import SerialRound

ROUNDS: dict[str, Callable[..., Round]] = {"serial": SerialRound, "fused": FusedRound}
AUTO = "auto"


def default_round(spec: DrafterSpec | None) -> str:
    """The round of a drafter if the user names none: serial if it can run there, else its own."""
    if spec is None or "serial" in spec.rounds:
        return "serial"
    return min(spec.rounds)


def make_round(name: str, **parts: Any) -> Round:
    """The round called ``name``, made of target, pool, drafter and verifier; "auto": by the drafter.

    Raises:
        ConfigError: unknown name.
    """
    if name == AUTO:
        drafter = parts.get("drafter")
        name = default_round(None if drafter is None else drafter.spec)
    if name not in ROUNDS:
        known = ", ".join(sorted([*ROUNDS, AUTO]))
        raise ConfigError(f"round={name!r}", "there is no such round", f"use one of: {known}")
    return ROUNDS[name](**parts)
