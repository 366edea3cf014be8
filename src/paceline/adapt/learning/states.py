"""States of requests that run, as their drafter is shown them: copied, and kept until the request ends."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ...core.sequence import Sequence
from ...draft.base import StepFeatures
from ...draft.states.network import LAST
from .store import ANSWER, PROMPT


@dataclass(slots=True)
class CollectedStates:
    """States of the tokens at positions start .. stop - 1 of a text."""

    start: int
    stop: int
    states: list[Tensor] = field(default_factory=list)

    def bits(self) -> np.ndarray:
        """Return [stop - start, d] the states, as bits of bfloat16."""
        return torch.cat(self.states).to("cpu", torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


class StateCollector:
    """Collects the states that a store has room for: of a text without a gap, from the end of its prompt on.

    Args:
        most: texts at once; the oldest is forgotten first.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._texts: dict[int, CollectedStates] = {}

    def observe(self, step: StepFeatures) -> None:
        """Note the states that a pass showed; as `Drafter.observe`."""
        hidden = step.hidden.get(LAST)
        if hidden is not None:
            for view, rows, first in zip(step.sequences, step.hidden_rows, step.first, strict=True):
                if rows.stop > rows.start:
                    self._note(view, first, hidden, rows)

    def _note(self, view: Sequence, first: int, hidden: Tensor, rows: slice) -> None:
        text = self._texts.get(view.key)
        if text is None or text.stop < min(first, view.prompt_len):  # a gap in the prompt, after which all starts again
            start = max(first, view.prompt_len - PROMPT)
            text = self._texts[view.key] = CollectedStates(start, start)
            if len(self._texts) > self.most:
                del self._texts[next(iter(self._texts))]
        end = min(first + rows.stop - rows.start, view.prompt_len + ANSWER - 1)
        if first <= text.stop < end:  # a gap in the answer ends it; after a preemption rows come again
            at = rows.start - first
            text.states.append(hidden[at + text.stop : at + end].clone())
            text.stop = end

    def take(self, key: int) -> CollectedStates | None:
        """Return the states of a text, and drop them here; None: there are none."""
        text = self._texts.pop(key, None)
        return text if text is not None and text.states else None
