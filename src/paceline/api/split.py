"""How a target is split over processes, as a user writes it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from ..core.errors import ConfigError
from ..core.named import NamedConfig, made, pairs
from ..core.options import MOST_TEXT, option, shown

MOST = 1024  # stages


@dataclass(frozen=True, kw_only=True)
class Split(NamedConfig):
    """Stages of a target in processes."""

    kind: ClassVar[str] = "pipeline"

    stages: int = option(2, help="processes, this one included", minimum=1, maximum=MOST)
    cores: tuple[int, ...] = option((), help="CPU cores, shared evenly in the order of the stages, such as <0,1,2,3>")
    threads: int | None = option(None, help="threads of each stage; none: one a core", minimum=1)


def parse_split(given: int | str) -> Split:
    """Read what a user gives as ``pipeline``: ``4`` or ``4,cores=<0,1,2,3>``.

    Raises:
        ConfigError: neither, or options that do not fit.
    """
    asked, text = f"pipeline={shown(given)}", str(given)
    first, _, rest = text.partition(",")
    if isinstance(given, bool) or len(text) > MOST_TEXT or not re.fullmatch(r"\s*\d{1,9}\s*", first):
        raise ConfigError(asked, "it is no number of stages", "write 4, or 4,cores=<0,1,2,3>")
    split: Split = made(asked, Split, [("stages", first.strip()), *pairs(asked, Split, rest or None)])
    return split
