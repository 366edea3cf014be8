"""Re-sampling without fusion, as the paper has it: an extra pass of the target for the re-sampled trees of a batch.

draft -> verify, all sequences -> verify what was re-sampled, those sequences that have any -> draft ..

`resample=alone` is the same for one sequence. In a batch it verifies the re-sampled trees of some beside the fresh ones
of others, and no pass is extra. Nobody wants this round but figure 12, so it is not among those of the library.

Source: Lyanna, sections 6.2 and 7.3.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from paceline.core.errors import ConfigError
from paceline.core.sequence import Sequence
from paceline.draft.base import DrafterSpec, DraftRule
from paceline.draft.resampling import left_over
from paceline.engine.base import Round, RoundConfig, RoundParts, StepResult, Work
from paceline.engine.draft_verify import DraftVerifyRound
from paceline.engine.rounds import ROUNDS


class ExtraPass:
    """A serial round in which sequences with levels left over go first, and the others wait for them.

    Args:
        inner: its drafter re-samples with ``resample=alone``.
    """

    name = "extra_pass"
    busy = False
    admits = None
    sources: tuple[str, ...] = ()  # it drafts for all requests alike

    def __init__(self, inner: DraftVerifyRound) -> None:
        self.inner, self.guard, self.emitter, self.drafter = inner, inner.guard, inner.emitter, inner.drafter

    @property
    def failure(self) -> str | None:
        """As of the inner round."""
        return self.inner.failure

    @property
    def past(self) -> int | None:
        """As of the inner round."""
        return self.inner.past

    def step(self, works: abc.Sequence[Work], rule: DraftRule | None = None) -> StepResult:
        """The extra pass, if there is something to re-sample; else a usual one. Works that wait come again."""
        return self.inner.step([w for w in works if self._left(w)] or works, rule)

    def _left(self, work: Work) -> bool:
        resampling: Any = self.guard.drafter._resampling  # type: ignore[union-attr]
        view = work.sequence
        drafted = resampling._drafted.get(view.key)
        return left_over(drafted, len(view.tokens), resampling.threshold) is not None

    def release(self, sequences: abc.Sequence[Sequence]) -> None:
        """As the inner round."""
        self.inner.release(sequences)

    def forget(self) -> None:
        """As the inner round."""
        self.inner.forget()


@dataclass(frozen=True, kw_only=True)
class ExtraPassConfig(RoundConfig):
    """Verify what was re-sampled in a pass of its own."""

    kind: ClassVar[str] = "extra_pass"
    automatic: ClassVar[bool] = False

    def refusal(self, spec: DrafterSpec | None) -> tuple[str, str] | None:
        if spec is not None and spec.level_logits and len(spec.sources) == 2 and not spec.in_pass:
            return None
        return "nothing is re-sampled", "draft with lyanna and resample=alone"

    def build(self, parts: RoundParts) -> Round:
        config: Any = getattr(parts.drafter, "config", None)
        if getattr(config, "resample", None) != "alone":
            wrong = "its re-sampled trees are verified beside fresh ones"
            raise ConfigError("round='extra_pass'", wrong, "draft with resample=alone")
        return ExtraPass(DraftVerifyRound("serial", parts))


@contextmanager
def known() -> Iterator[None]:
    """In here ``round=extra_pass`` means this round."""
    ROUNDS[ExtraPassConfig.kind] = ExtraPassConfig
    try:
        yield
    finally:
        del ROUNDS[ExtraPassConfig.kind]
