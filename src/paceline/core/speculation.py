"""What one request asks of speculation; its tokens are the same either way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .errors import CapabilityError, ConfigError

PREDICTION = "prediction"  # the drafter that reads predictions


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """How a request's own draft is chosen; others in the batch are drafted for as ever.

    Raises:
        ConfigError: values that cannot be meant.
    """

    enabled: bool = True  # False: nothing is ever drafted for it
    sources: Sequence[str] | None = None  # names of the drafters that are asked for it; None: all
    prediction: Sequence[int] = ()  # tokens that the output is likely to repeat: read by the drafter "prediction"
    max_nodes: int | None = None  # most drafted nodes a step; None: as many as the engine's budget allows
    trace: bool = False  # whether what each step did is kept: `Sequence.trace`

    def __post_init__(self) -> None:
        remedy = "leave it out, or use enabled=False to draft nothing"
        for name in ("enabled", "trace"):
            if not isinstance(getattr(self, name), bool):
                asked = f"speculation with {name}={getattr(self, name)!r}"
                raise ConfigError(asked, "it is true or false", "choose one")
        if self.max_nodes is not None and (type(self.max_nodes) is not int or self.max_nodes < 1):
            wrong = "it must be a whole number of 1 or more"
            raise ConfigError(f"speculation with max_nodes={self.max_nodes!r}", wrong, remedy)
        if isinstance(self.prediction, str) or any(type(token) is not int for token in self.prediction):
            raise ConfigError("speculation with a prediction", "it is a list of token ids", "encode its text")
        object.__setattr__(self, "prediction", tuple(self.prediction))
        if self.sources is None:
            return
        texts = not isinstance(self.sources, str) and all(isinstance(name, str) for name in self.sources)
        if not texts or not self.sources:
            raise ConfigError(f"speculation with sources={self.sources!r}", "name one drafter or several", remedy)
        object.__setattr__(self, "sources", tuple(self.sources))

    def chosen(self, known: Sequence[str]) -> frozenset[int] | None:
        """Return the marks of the engine's sources that draft for it; None: all.

        Args:
            known: the sources that a request may choose among, by their mark; none: there is no drafter.

        Raises:
            ConfigError: a source that is not there.
            CapabilityError: there is no drafter, or none that reads predictions.
        """
        if self.prediction and PREDICTION not in known:
            remedy = "start the engine with drafter='prediction', or hybrid:prediction+.."
            raise CapabilityError("speculation with a prediction", "no drafter of this engine reads it", remedy)
        if self.sources is None and self.max_nodes is None:
            return None
        if not known:
            asked = "speculation with sources" if self.sources is not None else "speculation with max_nodes"
            raise CapabilityError(asked, "this engine has no drafter", "leave it out")
        if self.sources is None:
            return None
        for name in self.sources:
            if name not in known:
                raise ConfigError(
                    f"speculation with source {name!r}", "there is no such source", f"choose of {', '.join(known)}"
                )
        marks = frozenset(mark for mark, name in enumerate(known) if name in self.sources)
        return None if len(marks) == len(known) else marks
