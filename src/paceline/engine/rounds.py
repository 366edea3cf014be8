"""Rounds: the order of drafting and verification in a step."""

from __future__ import annotations

import re
from pkgutil import resolve_name
from typing import Any

from ..core import registry
from ..core.errors import CapabilityError, ConfigError
from ..core.named import pairs, read_config
from ..core.options import MOST_TEXT, shown
from ..draft.base import DrafterSpec
from .base import Round, RoundConfig, RoundParts

ROUNDS: dict[str, type[RoundConfig]] = {name: resolve_name(place) for name, place in registry.ROUNDS.items()}
AUTO = "auto"


def parse_round(text: str) -> RoundConfig | None:
    """Read what a user gives as ``round``: ``name[,option=value]...``; None: by the drafter ("auto").

    Raises:
        ConfigError: an unknown round or option, a value of the wrong type or out of bounds.
    """
    subject = f"round={shown(text)}"
    if text == AUTO:
        return None
    match = re.fullmatch(r"\s*([^:,=\s]+)\s*(?:,(.*))?", text, re.DOTALL) if len(text) <= MOST_TEXT else None
    if match is None or match[1] not in ROUNDS:
        if text.partition(":")[0] in ROUNDS:
            raise ConfigError(subject, "options follow a comma", f"write {text.replace(':', ',', 1)!r}")
        raise ConfigError(subject, "there is no such round", f"use one of: {', '.join([AUTO, *ROUNDS])}")
    chosen = ROUNDS[match[1]]
    config: RoundConfig = read_config(subject, chosen, pairs(subject, chosen, match[2]))
    return config


def default_round(spec: DrafterSpec | None) -> RoundConfig:
    """Return the round of a drafter if the user names none: the first one of `ROUNDS` that it can run in.

    Raises:
        CapabilityError: there is none.
    """
    configs = [config() for config in ROUNDS.values() if config.automatic]
    reasons = [(config, config.refusal(spec)) for config in configs]
    for config, reason in reasons:
        if reason is None:
            return config
    name = "no drafter" if spec is None else f"drafter {spec.name!r}"
    why = "; ".join(f"{config.kind}: {reason[0]}" for config, reason in reasons if reason)
    raise CapabilityError(f"{name}, and no round named", f"it runs in none ({why})", "name another drafter")


def round_of(text: str, spec: DrafterSpec | None) -> RoundConfig:
    """Return the round that a user named, if the drafter can run in it; "auto": by the drafter.

    Raises:
        ConfigError: as of `parse_round`.
        CapabilityError: a drafter that cannot run in it.
    """
    chosen = parse_round(text) or default_round(spec)
    reason = chosen.refusal(spec)
    if reason is not None:
        who = "no drafter" if spec is None else f"drafter {spec.name!r}"
        raise CapabilityError(f"round={text!r} with {who}", *reason)
    return chosen


def make_round(text: str, **parts: Any) -> Round:
    """Return the round that a user named; "auto": by the drafter.

    Args:
        text: as of `parse_round`.
        parts: fields of `RoundParts`.

    Raises:
        ConfigError: an unknown round, or options that do not fit target or drafter.
        CapabilityError: a drafter that cannot run in it.
    """
    drafter = parts.get("drafter")
    chosen = round_of(text, None if drafter is None else drafter.spec)
    if chosen.place is not None and parts.get("serve") is None:
        raise CapabilityError(f"round={text!r}", "nothing here starts processes", "let an LLM make the engine")
    return chosen.build(RoundParts(**parts))
