"""What it is worth: plain decoding, look-ups, the new drafter, both together and the zoo's, on prompts put aside.

The bench measures them, in turns on the same prompts, and writes its page. The fastest of them is left for use
that is faster than plain decoding, by the interval, and slower on no kind of prompt; where look-ups are as good,
look-ups, since they cost nothing; where nothing is, nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..bench.records import PLAIN, Report
from ..bench.summary import Interval, Summary
from ..draft.hybrid import with_parts
from ..weights.zoo import default_drafter
from .config import KIND, AdaptConfig

LOOK_UPS, NEW, BOTH, PRESENT = "look-ups", "new", "hybrid", "present"
LOOKUP = "suffix"
NEVER_SLOWER = 0.97  # times plain decoding: a drafter slower than this on a kind of prompt is not left for use
LEAST_PAIRS = 3  # of each kind of prompt: fewer have no spread that could be believed


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Figures, and the chosen drafter; ready for JSON."""

    chosen: str  # `LOOK_UPS`, `NEW`, `BOTH`, `PRESENT` or `PLAIN`
    words: str
    times_plain: dict[str, list[float]]  # by method: value, low, high
    tokens_per_pass: dict[str, float]
    sequences: int  # whose ids were compared
    equal: int  # of them: equal, or explained by a near tie
    trials: int

    def lines(self) -> list[str]:
        """Return the figures of each method in words."""
        return [
            f"{name}: {value:.2f} times plain [{low:.2f}, {high:.2f}], {self.tokens_per_pass[name]:.2f} tokens a pass"
            for name, (value, low, high) in self.times_plain.items()
        ]


def drafters(config: AdaptConfig, folder: str) -> dict[str, str]:
    """Return what is compared, by name, as the registry reads it; ``folder`` has the new one's weights.

    Where the zoo has a drafter of the model, it is compared as well.
    """
    new, present = f"{KIND}:{folder}", default_drafter(config.model, config.dtype) or LOOKUP
    named = {} if present == LOOKUP else {PRESENT: present}
    return {LOOK_UPS: LOOKUP, NEW: new, BOTH: with_parts([LOOKUP], new), **named}


def decide(report: Report) -> Verdict:
    """Return the verdict on a report."""
    summary = Summary(report)
    total = {row.method.name: row for row in summary.total(summary.main)}
    kinds: dict[str, dict[str, float]] = {}
    for row in summary.rows:
        if row.speedup is not None and row.workload is not None:
            kinds.setdefault(row.method.name, {})[row.workload] = row.speedup.value
    speedups = {name: row.speedup for name, row in total.items() if row.speedup is not None}
    chosen = choose(speedups, kinds)
    passes = {name: row.figures.get("accepted_length") for name, row in total.items()}
    exact = summary.exact
    return Verdict(
        chosen=chosen,
        words=_words(chosen, speedups, kinds),
        times_plain={name: [ratio.value, ratio.low, ratio.high] for name, ratio in speedups.items()},
        tokens_per_pass={name: value or 1.0 for name, value in passes.items()},
        sequences=sum(e.sequences for e in exact),
        equal=sum(e.sequences - len(e.failures) for e in exact),
        trials=len(report.trials),
    )


def choose(speedups: dict[str, Interval], kinds: dict[str, dict[str, float]]) -> str:
    """Return the name of the drafter that is left for use."""
    if not judged(speedups, kinds):
        return LOOK_UPS
    sure = {
        name: ratio.value
        for name, ratio in speedups.items()
        if ratio.low > 1 and min(kinds.get(name, {}).values(), default=1.0) >= NEVER_SLOWER
    }
    best = max(sure, key=lambda name: sure[name], default=PLAIN)
    looked = speedups.get(LOOK_UPS)
    if best in (NEW, BOTH) and looked is not None and speedups[best].value <= looked.value:
        return LOOK_UPS
    if best == PLAIN and looked is not None and looked.high >= NEVER_SLOWER:  # the budget keeps them from being slower
        return LOOK_UPS
    return best


def judged(speedups: dict[str, Interval], kinds: dict[str, dict[str, float]]) -> bool:
    """Return whether there were enough prompts for the intervals to mean something."""
    least = LEAST_PAIRS * max(map(len, kinds.values()), default=1)
    return bool(speedups) and all(ratio.pairs >= least for ratio in speedups.values())


def _words(chosen: str, speedups: dict[str, Interval], kinds: dict[str, dict[str, float]]) -> str:
    """Return the verdict in a sentence."""
    if not judged(speedups, kinds):
        count = max((each.pairs for each in speedups.values()), default=0)
        few = f"for {count} prompts alone" if count else "for no prompt"
        return f"there is no verdict: there was time {few}. Look-ups are left; give it more hours"
    pays = f"{_times(speedups[chosen])} of plain decoding on prompts it never saw" if chosen in speedups else ""
    each = speedups.get(LOOK_UPS)
    alone = f"look-ups alone give {_times(each)} of plain decoding" if each and each.low > 1 else "nothing surely does"
    return {
        NEW: f"the new drafter pays: {pays}",
        BOTH: f"the new drafter with look-ups pays: {pays}",
        PRESENT: f"the new drafter pays less than the one that the model has, which is left: {pays}",
        LOOK_UPS: f"the new drafter pays no more than look-ups, or not on every kind of prompt: {alone}; they are left",
        PLAIN: "nothing pays: every drafter is slower than plain decoding. Plain decoding is left",
    }[chosen]


def _times(ratio: Interval) -> str:
    return f"{ratio.value:.2f} times [{ratio.low:.2f}, {ratio.high:.2f}]"
