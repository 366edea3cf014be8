"""What is said of throughput by batch and context: predictions beside what was measured, none of them read off it.

A step's time is predicted by the law of the machine, which no step with a draft was fitted to; its tokens are those of
other prompts. Errors are over cells with a draft, and orders are compared cell by cell.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from kit.study import Table

from paceline.bench.records import PLAIN
from spire_parts.accepted import OWN
from spire_parts.common import SpireFlags, path_of, study, verdict

WANTED_ERROR, WANTED_TIMES = 0.20, 1.5
NOISE = "T=1, the target's noise"  # the column of table 1 whose drafts are these
Taus = dict[tuple[str, int], float]  # of other prompts, by draft and context
Place = tuple[int, int]
STEP = ("a step, ms", "predicted", "error", "in plain steps", "predicted")
HEAD = ("batch", "context", "method", *STEP, "tau", "tokens/s", "times plain")
FORESEEN = ("batch", "context", "method", "tau of other prompts", "times plain, predicted", "measured", "error")


@dataclass(frozen=True, kw_only=True)
class JudgedCell:
    """One method at one batch and context."""

    method: str
    batch: int
    context: int
    seconds: float  # of a step, the median
    tau: float  # tokens of a sequence a step
    predicted: float = 0.0  # seconds of a step
    fitted: bool = False  # whether its time told the law something

    @property
    def place(self) -> Place:
        """Batch and context."""
        return self.batch, self.context

    @property
    def error(self) -> float:
        """Predicted over measured time of a step, less 1."""
        return self.predicted / self.seconds - 1


def taus_of(files: str) -> Taus:
    """Tau by draft and context, from what runs of ``table_1`` wrote (JSON files, with commas between them).

    Raises:
        ConfigError: there is no such file.
    """
    rows = [row for file in files.split(",") for row in json.loads(path_of(file).read_text("utf-8"))["tau"][OWN]]
    return {(row["draft"], row["context"]): row[NOISE][0] for row in rows if row[NOISE]}


def read_cells(file: str) -> list[JudgedCell]:
    """What ``cells`` wrote (JSON).

    Raises:
        ConfigError: there is no such file.
    """
    return [JudgedCell(**one) for one in json.loads(path_of(file).read_text("utf-8"))["cells"]]


class Cells:
    """All methods at all batches and contexts."""

    def __init__(self, found: Sequence[JudgedCell]) -> None:
        self.all = list(found)
        self.plain = {one.place: one for one in found if one.method == PLAIN}
        self.drafts = [one for one in found if one.method != PLAIN]

    def cost(self, one: JudgedCell) -> float:
        """A step in plain ones: the tau from which it pays."""
        return one.seconds / self.plain[one.place].seconds

    def predicted_cost(self, one: JudgedCell) -> float:
        """The same as the law says."""
        return one.predicted / self.plain[one.place].predicted

    def times(self, one: JudgedCell) -> float:
        """Times plain decoding, as measured."""
        return one.tau / self.cost(one)

    def rows(self) -> list[list[str]]:
        """For a table with `HEAD`."""
        return [self._row(one) for one in self.all]

    def _row(self, one: JudgedCell) -> list[str]:
        step = [f"{1e3 * one.seconds:.1f}", f"{1e3 * one.predicted:.1f}", f"{one.error:+.0%}"]
        costs = [f"{self.cost(one):.2f}", f"{self.predicted_cost(one):.2f}"]
        made = [f"{one.tau:.2f}", f"{one.batch * one.tau / one.seconds:,.0f}", f"{self.times(one):.2f}"]
        return [str(one.batch), f"{one.context:,}", one.method, *step, *costs, *made]

    def remarks(self) -> list[str]:
        """How well steps are predicted, and the best draft where batch and context are largest."""
        said = [spread("time of a step", [one.error for one in self.drafts]), self._best()]
        for name in dict.fromkeys(one.method for one in self.all):
            own = [one.error for one in self.all if one.method == name and not one.fitted]
            if own:
                said.append(f"{name}: median error of a step {median(map(abs, own)):.0%} over {len(own)} cells")
        worst = max(self.drafts, key=lambda one: abs(one.error))
        return [
            *said,
            f"the worst: {worst.method}, {where(worst.place)} ({worst.error:+.0%})",
            "in plain steps: the tau from which a draft pays; tau and tokens/s are those of the steps",
            "plain cells that tell the engine's own work are in no error",
        ]

    def _best(self) -> str:
        last = max(self.plain)
        best = max((one for one in self.drafts if one.place == last), key=self.times)
        words = f"{best.method}, {where(last)}: {self.times(best):.2f} times plain, {WANTED_TIMES} wanted"
        return verdict(words, self.times(best) > WANTED_TIMES)


class Foreseen:
    """Times plain decoding by the law and the tau of other prompts, beside what was measured."""

    def __init__(self, cells: Cells, taus: Taus) -> None:
        self.cells, self.taus = cells, taus
        self.drafts = [one for one in cells.drafts if (one.method, one.context) in taus]

    def times(self, one: JudgedCell) -> float:
        """Times plain decoding, as predicted; 1 of plain decoding itself."""
        return self.taus.get((one.method, one.context), 1.0) / self.cells.predicted_cost(one)

    def error(self, one: JudgedCell) -> float:
        """Predicted over measured, less 1."""
        return self.times(one) / self.cells.times(one) - 1

    def rows(self) -> list[list[str]]:
        """For a table with `FORESEEN`."""
        return [self._row(one) for one in self.drafts]

    def _row(self, one: JudgedCell) -> list[str]:
        both = [f"{value:.2f}" for value in (self.times(one), self.cells.times(one))]
        tau = f"{self.taus[one.method, one.context]:.2f}"
        return [str(one.batch), f"{one.context:,}", one.method, tau, *both, f"{self.error(one):+.0%}"]

    def remarks(self) -> list[str]:
        """How far off, and in which cells the order of methods is another."""
        orders = {
            place: [self._order(place, by) for by in (self.cells.times, self.times)] for place in self.cells.plain
        }
        same = sum(seen == foreseen for seen, foreseen in orders.values())
        first = sum(seen[0] == foreseen[0] for seen, foreseen in orders.values())
        other = [
            f"{where(place)}: {', '.join(seen)}; predicted: {', '.join(foreseen)}"
            for place, (seen, foreseen) in orders.items()
            if seen != foreseen
        ]
        return [
            spread("times plain", [self.error(one) for one in self.drafts]),
            f"all methods in the predicted order in {same} of {len(orders)} cells, the fastest as predicted in {first}",
            *other,
        ]

    def _order(self, place: Place, by: Callable[[JudgedCell], float]) -> list[str]:
        """Methods from the fastest on, of those that have a prediction."""
        own = [self.cells.plain[place], *(one for one in self.drafts if one.place == place)]
        return [one.method for one in sorted(own, key=by, reverse=True)]


@study.table(needs=("measured", "accepted"))
def foreseen(ask: SpireFlags) -> Iterator[Table | None]:
    """Times plain decoding by this machine's law and table 1's tau, beside what was measured: cell by cell."""
    taus, cells = taus_of(ask.accepted), Cells(read_cells(ask.measured))
    yield None
    made = Foreseen(cells, taus)
    yield Table(
        title="Times plain decoding, predicted with the tau of other prompts",
        head=FORESEEN,
        parts={"": made.rows()},
        values={"errors": [[one.method, *one.place, made.error(one)] for one in made.drafts]},
        remarks=made.remarks(),
    )


def where(place: Place) -> str:
    """In words."""
    return f"batch {place[0]}, context {place[1]:,}"


def spread(what: str, errors: Sequence[float]) -> str:
    """Median size of errors, how many are large, and how many too high."""
    middle, count = median(map(abs, errors)), len(errors)
    large, high = sum(abs(e) > WANTED_ERROR for e in errors), sum(e > 0 for e in errors)
    words = f"{what}: median error {middle:.0%} over {count} cells with a draft, {WANTED_ERROR:.0%} at most wanted"
    return f"{verdict(words, middle <= WANTED_ERROR)}; beyond it in {large}, predicted too high in {high}"
