"""Early exits: what a target says in the middle of its layers.

Source: Mirror Speculative Decoding, section 3.1, eq. 6.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ..core.errors import ConfigError
from .decoder import Decoder


class ExitHead(Protocol):
    """Scores of the next token from states in the middle of the layers."""

    @property
    def layer(self) -> int:
        """Layers in front of it: it reads the states that layer ``layer`` (counted from 0) would read."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, V] float32 or wider, from states [rows, d_model] after the first ``layer`` layers."""
        ...


@dataclass(frozen=True, slots=True)
class UntrainedExit:
    """The target's own final norm and head on the state as it is, without the map f_adapt of eq. 6 (a logit lens)."""

    target: Decoder
    layer: int

    def logits(self, hidden: Tensor) -> Tensor:
        """See `ExitHead`."""
        return self.target.read(hidden)


def exit_layer(text: str, num_layers: int, asked: str) -> int:
    """Layers in front of an exit, from a number of them or a share such as ``1/2``, which is rounded down.

    Args:
        text: what was given.
        num_layers: of the target.
        asked: by whom, for messages.

    Raises:
        ConfigError: neither, or outside the target: at least one layer is in front of it, and one behind.
    """
    match = re.fullmatch(r"\s*(\d{1,6})\s*(?:/\s*(\d{1,6})\s*)?", text, re.ASCII)
    if match is None or (match[2] is not None and not 0 < int(match[1]) < int(match[2])):
        raise ConfigError(asked, "neither a number of layers nor a share of them", "write exit=12 or exit=1/2")
    layer = int(match[1]) if match[2] is None else max(1, num_layers * int(match[1]) // int(match[2]))
    if not 0 < layer < num_layers:
        wrong = f"the target has {num_layers} layers, and at least one lies on either side of an exit"
        remedy = f"give 1 to {num_layers - 1}, or a share" if num_layers > 1 else "use round='serial'"
        raise ConfigError(asked, wrong, remedy)
    return layer
