"""Speculation in answers: counts, the source of each token, the tree of each step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core.outputs import Chunk
from .schemas import SpeculationChoice


def acceptance(engine: Mapping[str, Any]) -> dict[str, Any]:
    """Return how many tokens were drafted and accepted: in total, by source and depth, and by application.

    Args:
        engine: `Snapshot.as_dict`.
    """
    parts = {name: _acceptance(stats) for name, stats in engine["by_application"].items()}
    return _acceptance(engine["stats"]) | {"by_application": parts}


def _acceptance(stats: Mapping[str, Any]) -> dict[str, Any]:
    passes, accepted = stats["passes"], stats["accepted"]
    offered = zip(stats["depth_accepted"], stats["depth_offered"], strict=True)
    return {
        **{name: stats[name] for name in ("passes", "drafted", "accepted")},
        "mean_accepted_length": 1 + accepted / passes if passes else 1.0,
        "acceptance_rate": accepted / stats["drafted"] if stats["drafted"] else 0.0,
        "by_depth": [hits / tries if tries else 0.0 for hits, tries in offered],
        "by_source": {
            name: {
                "drafted": part["drafted"],
                "accepted": part["accepted"],
                "acceptance_rate": part["accepted"] / part["drafted"] if part["drafted"] else 0.0,
                "accepted_by_depth": part["accepted_at"],
            }
            for name, part in stats["sources"].items()
        },
    }


def add_shown(into: dict[str, Any], choice: bool | SpeculationChoice | None, chunk: Chunk) -> None:
    """Add to an answer the sources of a chunk's tokens, where the request sets ``provenance`` or ``trace``.

    ``provenance``: of each token its text, who drafted it (null: it is the target's own choice) and how deep in the
    draft it was. ``trace``: of each step the tree, the accepted path, what the budget chose, and times.
    """
    if chunk.shown is None or not isinstance(choice, SpeculationChoice):
        return
    if choice.provenance:
        names = ("token", "source", "depth")
        origins = (dict(zip(names, one, strict=True)) for one in chunk.shown.origins)
        into.setdefault("provenance", []).extend(origins)
    if choice.trace:
        into.setdefault("trace", []).extend(chunk.shown.steps or ())
