"""What one step did for one sequence, kept where its request includes a trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(slots=True, eq=False)
class StepTrace:
    """One step. N nodes of the tree that was checked; node 0 is the root, the last token before the step."""

    first: int  # tokens of the output before it
    emitted: int  # tokens that it added: those of `path`, then the target's own, cut by the stop rules
    tokens: Sequence[int]  # [N]
    parents: Sequence[int]  # [N]; -1 for the root
    sources: Sequence[str]  # [N] which source proposed each; "" for the root
    scores: Sequence[float] | None  # [N] cumulative log q, 0 for the root; None: the drafter gives none
    path: Sequence[int]  # the accepted nodes
    allowed: int  # nodes that the budget allowed, before it chose among what was proposed
    batch_size: int = 1  # sequences in the step
    why: str = ""  # what the budget chose, in words
    draft_ms: float = 0.0  # of the whole step, that is of all its sequences; as the next ones
    verify_ms: float = 0.0
    host_ms: float = 0.0

    def origins(self) -> list[tuple[str | None, int]]:
        """Return for each emitted token its proposer (None: it is the target's own) and its depth (0)."""
        path_origins: list[tuple[str | None, int]] = [(self.sources[n], d) for d, n in enumerate(self.path, 1)]
        return (path_origins + [(None, 0)])[: self.emitted]

    def as_dict(self) -> dict[str, Any]:
        """Return all of it, ready for JSON."""
        return asdict(self)


@dataclass(slots=True)
class Shown:
    """Describe where the tokens of a chunk come from, where a request to a server requests it."""

    origins: list[tuple[str, str | None, int]]  # by token: text, source (None: the target), its depth (0)
    steps: list[dict[str, Any]] | None  # `StepTrace.as_dict` with the ``texts`` of its tokens; None: not requested
