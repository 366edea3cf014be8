"""Speculation in answers: counts in vLLM's shape, the source of each token, the tree of each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..core.outputs import Chunk
from .schemas import SpeculationChoice


def speculative_decoding(
    stats: Mapping[str, Any], num_spec_tokens: int, steps: Sequence[tuple[int, int]] | None
) -> dict[str, Any]:
    """Return vLLM's ``metrics.speculative_decoding``: no steps without drafts, and all drafted nodes of a tree.

    Args:
        stats: `SpecStats.as_dict`.
        num_spec_tokens: most nodes that the engine drafts a step.
        steps: of each step with drafts, tokens drafted and accepted; None: they are not wanted (``summary``).
    """
    rows: dict[int, list[int]] = {int(drafted): row for drafted, row in stats["accepted_by_drafted"].items()}
    most = max(num_spec_tokens, *rows, 0)
    histogram = [sum(row[a] for row in rows.values() if a < len(row)) for a in range(most + 1)]
    count, drafted, accepted = sum(histogram), stats["drafted"], stats["accepted"]
    found = {
        "mean_acceptance_length": 1 + accepted / count if count else 1.0,
        "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
        "acceptance_histogram": histogram,
        "acceptance_histogram_by_draft_length": {
            str(k): row + [0] * (k + 1 - len(row)) for k, row in sorted(rows.items())
        },
        "num_spec_steps": count,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": most,
    }
    if steps is not None:
        found["per_step_accepted"] = [accepted for _, accepted in steps]
        found["per_step_drafted"] = [drafted for drafted, _ in steps]
    return found


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
        "by_depth": [kept / tries if tries else 0.0 for kept, tries in offered],
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


def add_shown(into: dict[str, Any], wanted: bool | SpeculationChoice | None, chunk: Chunk) -> None:
    """Add to an answer the sources of a chunk's tokens, where the request sets ``provenance`` or ``trace``.

    ``provenance``: of each token its text, who drafted it (null: it is the target's own choice) and how deep in the
    draft it was. ``trace``: of each step the tree, the accepted path, what the budget chose, and times.
    """
    if chunk.shown is None or not isinstance(wanted, SpeculationChoice):
        return
    if wanted.provenance:
        names = ("token", "source", "depth")
        origins = (dict(zip(names, one, strict=True)) for one in chunk.shown.origins)
        into.setdefault("provenance", []).extend(origins)
    if wanted.trace:
        into.setdefault("trace", []).extend(chunk.shown.steps or ())
