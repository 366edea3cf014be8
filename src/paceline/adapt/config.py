"""The options of `paceline adapt`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..api.options import MAX_THREADS, MODEL
from ..core.options import check, option

KIND = "eagle"  # of the drafter that is trained; `train.registry` makes it


@dataclass(frozen=True, kw_only=True)
class AdaptConfig:
    """For which model, on which prompts, for how long, and where to."""

    model: str = option(help=MODEL, metavar="NAME|FOLDER|FILE")
    prompts: Path | None = option(
        None, help="JSON lines with prompt or turns: prompts like those of later use; default: a mix", metavar="FILE"
    )
    hours: float = option(2.0, help="hours that everything together may take", above=0.0, maximum=10_000.0)
    out: Path | None = option(None, help="folder of all that is made; default: adapted/MODEL", metavar="DIR")
    dtype: str = option("auto", help="what the model computes in when it is served: auto, bfloat16, int8, ..")
    threads: int | None = option(None, help="CPU threads; default: torch's choice", minimum=1, maximum=MAX_THREADS)
    seed: int = option(0, help="seed of prompts, draws and training")

    def __post_init__(self) -> None:
        check(self)

    @property
    def folder(self) -> Path:
        """Return the folder of the drafter."""
        return self.out or Path("adapted") / Path(self.model).name.removesuffix(".gguf")
