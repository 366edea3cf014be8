"""When guessing and checking happen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..core.errors import ConfigError
from .base import Round
from .serial import SerialRound

ROUNDS: dict[str, Callable[..., Round]] = {"serial": SerialRound}


def make_round(name: str, **parts: Any) -> Round:
    """The round called ``name``, made of target, pool, drafter and verifier.

    Raises:
        ConfigError: unknown name.
    """
    if name not in ROUNDS:
        raise ConfigError(f"round={name!r}", "there is no such round", f"use one of: {', '.join(sorted(ROUNDS))}")
    return ROUNDS[name](**parts)
