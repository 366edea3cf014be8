"""Options of speculation by request; its tokens are the same either way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from .errors import CapabilityError, ConfigError
from .options import check

PREDICTION = "prediction"  # the drafter that reads predictions


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """Describe how a request's own draft is chosen; others in the batch are drafted for as ever.

    Raises:
        ConfigError: values that cannot be meant.
    """

    enabled: bool = True  # False: nothing is ever drafted for it
    sources: Sequence[str] | None = None  # names of the drafters that are called for it; None: all
    prediction: Sequence[int] = ()  # tokens that the output is likely to repeat: read by the drafter "prediction"
    max_nodes: Annotated[int, Field(ge=1)] | None = None  # most drafted nodes a step; None: the budget's
    trace: bool = False  # whether what each step did is kept: `Sequence.trace`

    def __post_init__(self) -> None:
        check(self, "speculation with ")
        if self.sources is not None and not self.sources:
            raise ConfigError("speculation with sources=[]", "it names no drafter", "name one, or leave it out")
        object.__setattr__(self, "prediction", tuple(self.prediction))
        object.__setattr__(self, "sources", None if self.sources is None else tuple(self.sources))

    def chosen(self, sources: Sequence[str]) -> frozenset[int] | None:
        """Return the marks of the engine's sources that draft for it; None: all.

        Args:
            sources: the sources that a request may choose among, by their mark; none: there is no drafter.

        Raises:
            ConfigError: a source that is not there.
            CapabilityError: there is no drafter, or none that reads predictions.
        """
        if self.prediction and PREDICTION not in sources:
            remedy = "start the engine with drafter='prediction', or hybrid:prediction+.."
            raise CapabilityError("speculation with a prediction", "no drafter of this engine reads it", remedy)
        if self.sources is None and self.max_nodes is None:
            return None
        if not sources:
            subject = "speculation with sources" if self.sources is not None else "speculation with max_nodes"
            raise CapabilityError(subject, "this engine has no drafter", "leave it out")
        if self.sources is None:
            return None
        for name in self.sources:
            if name not in sources:
                raise ConfigError(
                    f"speculation with source {name!r}", "there is no such source", f"choose of {', '.join(sources)}"
                )
        marks = frozenset(mark for mark, name in enumerate(sources) if name in self.sources)
        return None if len(marks) == len(sources) else marks
