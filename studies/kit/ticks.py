"""Ticks of the pipeline round, as they pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.papers.specpipe.records import Tick


def watch_ticks(round_: Any, take: Callable[[Tick], object] = lambda tick: None) -> list[Tick]:
    """Give every tick of a round to ``take``; returns the list in which they are noted from now on."""
    whole, ticks = round_.tick, list[Tick]()

    def tick() -> Tick:
        ticks.append(whole())
        take(ticks[-1])
        return ticks[-1]

    round_.tick = tick
    return ticks
