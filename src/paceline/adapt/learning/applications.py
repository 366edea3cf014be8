"""A drafter for each application: requests are drafted for by the one that learned from their application's."""

from __future__ import annotations

from collections import abc
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ...core.sequence import Sequence
from ...draft.base import Drafter, DraftRequest, StepFeatures
from ...draft.proposal import Proposal
from ...draft.states.body import StateDrafter
from ...engine.engine import Engine


class DrafterByApplication(Drafter):
    """Drafts for each sequence with the drafter of its application.

    Args:
        drafters: by application, of one kind and bound to one target; None: of requests that name none.
    """

    trusted = True

    def __init__(self, drafters: Mapping[str | None, StateDrafter]) -> None:
        self.drafters, self.spec = drafters, drafters[None].spec

    def _split(self, views: abc.Sequence[Sequence]) -> Iterator[tuple[StateDrafter, list[int]]]:
        """Return the drafters that draft, and the sequences of each."""
        found: dict[str | None, list[int]] = {}
        for place, view in enumerate(views):
            found.setdefault(None if view.application is None else view.application.name, []).append(place)
        return ((self.drafters[name], places) for name, places in found.items())

    def observe(self, step: StepFeatures) -> None:
        """Show each its own sequences."""
        names = ("sequences", "committed", "num_accepted", "paths", "hidden_rows", "first")
        for drafter, places in self._split(step.sequences):
            whole = len(places) == len(step.sequences)
            drafter.observe(step if whole else replace(step, **_picked(step, names, places)))

    def draft(self, want: DraftRequest) -> list[Proposal]:
        """Return the proposals of each drafter for its own sequences."""
        names = ("sequences", "budgets", "max_depths", "caches")
        made: dict[int, Proposal] = {}
        passes = 0
        for drafter, places in self._split(want.sequences):
            own = replace(want, **_picked(want, names, places))
            made.update(zip(places, drafter.draft(own), strict=True))
            passes += own.passes or 0
        want.passes = passes
        return [made[place] for place in range(len(want.sequences))]

    def release(self, keys: abc.Sequence[int]) -> None:
        """Let all drop these sequences."""
        for drafter in self.drafters.values():
            drafter.release(keys)


def _picked(whole: Any, names: Iterable[str], places: abc.Sequence[int]) -> dict[str, Any]:
    """Return of each field the values of some sequences; fields without a value for each stay."""
    fields, count = {name: getattr(whole, name) for name in names}, len(whole.sequences)
    return {name: [values[place] for place in places] for name, values in fields.items() if len(values) == count}


def put_in_place(engine: Engine, part: StateDrafter, drafter: DrafterByApplication) -> None:
    """Let ``drafter`` draft where ``part`` does, alone or in a hybrid; before the first request."""
    whole: Any = engine.round
    if whole.drafter is part:
        whole.drafter = whole.guard.drafter = drafter
    else:
        whole.drafter.parts[whole.drafter.parts.index(part)] = drafter
