"""What a model is named by: an embedded model, a folder or a hub name, or one of these stretched.

``stretch:MODEL,times=8`` is MODEL with layers between its own whose outputs are zero: its tokens are the model's, and a
pass costs eight times as much in its layers. See `target.decoder.Decoder`.
"""

from __future__ import annotations

from dataclasses import dataclass

from .errors import ConfigError
from .options import shown

STRETCH, RANDOM = "stretch:", "random:"
MOST_TIMES = 1024
_REMEDY = "write stretch:MODEL,times=8, with a whole number of 2 or more"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model's name and how far it is stretched."""

    name: str  # an embedded model, a folder or a hub name; for benchmarks also random:SHAPE
    stretch: int = 1  # a pass goes through so many layers for each of the model's own

    @property
    def text(self) -> str:
        """What `parse_model` reads."""
        return f"{STRETCH}{self.name},times={self.stretch}" if self.stretch > 1 else self.name

    @property
    def random(self) -> bool:
        """Whether it is one of random weights (`bench.models`)."""
        return self.name.startswith(RANDOM)

    @property
    def label(self) -> str:
        """Its name as tables and reports have it, where a stretched model must not be taken for a large one."""
        return f"{self.name}, stretched {self.stretch}x" if self.stretch > 1 else self.name


def parse_model(text: str) -> ModelSpec:
    """A model's name, or ``stretch:MODEL,times=N``, N from 2 to `MOST_TIMES`.

    Raises:
        ConfigError: a stretched model without a name or a number, with a number that cannot be, or stretched twice.
    """
    if not isinstance(text, str) or not text.startswith(STRETCH):
        return ModelSpec(text)
    name, comma, option = text.removeprefix(STRETCH).rpartition(",")
    key, equals, times = (part.strip() for part in option.partition("="))
    name = name.strip()
    if not comma or key != "times" or not equals:
        raise _refused(text, "it does not end in ,times=N")
    if not name:
        raise _refused(text, "it names no model")
    if name.startswith(STRETCH):
        raise _refused(text, f"{shown(name)} is stretched already", "give one stretch the product of both numbers")
    if not times.isascii() or not times.isdecimal() or len(times) > 9:
        raise _refused(text, f"times={shown(times)} is no whole number")
    if not 2 <= int(times) <= MOST_TIMES:
        raise _refused(text, f"times={int(times)} is not 2 to {MOST_TIMES}")
    return ModelSpec(name, int(times))


def _refused(text: str, wrong: str, remedy: str = _REMEDY) -> ConfigError:
    return ConfigError(f"model {shown(text)}", wrong, remedy)
