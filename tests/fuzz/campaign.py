"""Cases one after the other: play, report, shrink."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass

from play import Case, Play, make_case
from texts_fuzz import said
from witness import Witness

TEXTS = 4  # beside each case in the world of bytes


@dataclass
class Finding:
    """A case that failed, made as small as dropping requests makes it."""

    case: Case
    kept: list[int]  # indices of the visits that are needed
    problems: list[str]
    chosen: str = ""  # options of the command that repeats it

    def report(self) -> str:
        """The seed, what differed, the requests, and how to repeat it."""
        case = self.case
        visits = "\n".join(f"  {case.visits[i].describe()}" for i in self.kept)
        return "\n".join(
            [
                f"FINDING in case {case.seed}:",
                *(f"  {problem}" for problem in self.problems[:6]),
                case.describe().splitlines()[0],
                f"the smallest set of its {len(case.visits)} requests that still fails:",
                visits,
                f"repeat it: python tests/fuzz/run.py --case {case.seed}{self.chosen}",
            ]
        )


def problems(case: Case, witness: Witness, kept: Sequence[int] | None = None) -> list[str]:
    """What is wrong in a case; an exception is, too."""
    try:
        return Play(case, witness, kept).run() + wrong_texts(case)
    except Exception as error:  # whatever an engine raises is a finding, and the campaign goes on
        where = traceback.extract_tb(error.__traceback__)[-1]
        return [f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"]


def wrong_texts(case: Case) -> list[str]:
    """What is wrong with some texts without a model, for cases in the world of bytes."""
    if not case.world.bytes:
        return []
    return [wrong for i in range(TEXTS) if (wrong := said(case.seed * TEXTS + i))]


def examine(seed: int, witness: Witness, world: str | None = None, guest: str | None = None) -> Finding | None:
    """Play case ``seed``; where it fails, find out which requests it takes. Further arguments as for `make_case`."""
    case = make_case(seed, world, guest)
    found = problems(case, witness)
    _count(case, witness)
    if not found:
        return None
    kept = shrink(case, list(range(len(case.visits))))
    chosen = "".join(f" --{name} {value}" for name, value in (("world", world), ("guest", guest)) if value)
    return Finding(case, kept, problems(case, Witness(), kept) or found, chosen)


def shrink(case: Case, kept: list[int]) -> list[int]:
    """Drop requests one by one while what is left still fails."""
    for index in reversed(kept):
        smaller = [i for i in kept if i != index]
        if smaller and problems(case, Witness(), smaller):
            return shrink(case, smaller)
    return kept


def _count(case: Case, witness: Witness) -> None:
    budget = case.budget if not case.budget.isdigit() else "fixed"
    names = (f"drafter {case.guest}", f"verifier {case.verifier}", f"world {case.world.name}", f"budget {budget}")
    witness.met.update(("cases", *names))
    for visit in case.visits:
        witness.met["requests"] += 1
        if visit.ask is not None:
            witness.met[f"application {visit.ask.application or 'none'}"] += 1
