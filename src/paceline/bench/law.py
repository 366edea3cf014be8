"""The planner's law of this machine: passes are timed, the law is fitted to some and held against the others.

Its table of costs takes the place of a calibration's (`calibrate`): the draft budget reads either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from ..assembly import draft_key
from ..engine import calibration
from ..engine.calibration import Calibration, PassTimer
from ..engine.costs import CostTable
from ..llm import LLM
from ..planning.costs import cost_points
from ..planning.measured import PassLaw, TimedPass, fit
from ..planning.throughput import Network

# Sequences, tokens that each has, rows of each, and whether a quarter of the layers alone is run.
Size = tuple[int, int, int, bool]


@dataclass(frozen=True, kw_only=True)
class LawConfig:
    """Which passes are timed."""

    repeats: int = 9  # of each; medians count
    fitted: tuple[Size, ...] = (
        *((1, 64, rows, False) for rows in (1, 2, 4, 8, 16, 32)),
        *((batch, 64, 1, False) for batch in (4, 16)),
        *((1, context, rows, False) for context in (512, 1536) for rows in (1, 8)),
        *((8, context, 1, False) for context in (512, 1536)),
        *((1, 64, rows, True) for rows in (1, 8)),
        (16, 512, 5, False),
    )
    held_out: tuple[Size, ...] = (
        *((1, 256, 5, False), (2, 128, 3, False), (4, 1024, 1, False), (8, 256, 1, False), (16, 1024, 1, False)),
        *((4, 512, 5, False), (1, 1024, 16, False), (1, 512, 1, True), (16, 128, 5, False)),
    )


@dataclass(frozen=True, kw_only=True)
class LawFound:
    """The law of this machine, and the passes that it was fitted to and held against."""

    law: PassLaw
    fitted: list[TimedPass] = field(default_factory=list)
    held_out: list[TimedPass] = field(default_factory=list)
    repeats: int = 0  # of each pass


def measure_law(
    llm: LLM, network: Network, config: LawConfig | None = None, progress: Callable[[int], None] | None = None
) -> LawFound:
    """Time passes of a target and fit the law of the machine to them.

    Args:
        llm: the target, loaded as it will be used.
        network: its sizes, all its layers.
        config: which passes; those beyond the model's positions are left out.
        progress: called with the number of rounds done.

    Raises:
        ConfigError: a model with too few positions for enough passes.
    """
    config, decoder = config or LawConfig(), llm.decoder
    quarter = max(1, decoder.num_layers // 4)
    room = decoder.config.max_position
    fitted, held_out = ([s for s in sizes if s[1] + s[2] <= room] for sizes in (config.fitted, config.held_out))
    times: dict[Size, list[float]] = {size: [] for size in (*fitted, *held_out)}
    timers = {}
    for context in dict.fromkeys(size[1] for size in times):
        own = [size for size in times if size[1] == context]
        timers[context] = PassTimer(decoder, max(s[0] for s in own), context, max(s[2] for s in own))
    for repeat in range(config.repeats + 1):  # in turns, so that a slow moment affects all alike; the first warms up
        for size, taken in times.items():
            batch, context, rows, part = size
            ms = timers[context].ms(batch, rows, quarter if part else None)
            if repeat:
                taken.append(ms)
        if progress:
            progress(repeat + 1)
    lower = replace(network, shape=network.shape.last_layers(quarter * decoder.config.stretch))

    def timed(size: Size) -> TimedPass:
        batch, context, rows, part = size
        of, seconds = lower if part else network, median(times[size]) / 1e3
        return TimedPass(network=of, batch=batch, context=context, rows=rows, seconds=seconds)

    known = [timed(size) for size in fitted]
    others = [timed(size) for size in held_out]
    return LawFound(law=fit(known), fitted=known, held_out=others, repeats=config.repeats)


def calibrate_law(llm: LLM, network: Network, found: LawFound, draft: tuple[str, Network] | None) -> Path:
    """Write the law's table down, where the draft budget finds it.

    Args:
        llm, network: the target.
        found: what `measure_law` gave.
        draft: name and sizes of its draft model, whose passes the law predicts as well.

    Returns:
        The file.

    Raises:
        ConfigError: no place to write to.
    """

    def table(of: Network) -> CostTable:
        def seconds(batch: int, context: float, rows: int) -> float:
            return found.law.seconds(of, batch, context, rows)

        return CostTable.from_dict(cost_points(seconds, of.shape.max_position), "the planner's law, measured now")

    made = Calibration(
        fingerprint=llm.fingerprint,
        table=table(network),
        drafts={} if draft is None else {draft_key(draft[0], "auto"): table(draft[1])},
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        repeats=found.repeats,
    )
    return calibration.save(llm.folder, made)
