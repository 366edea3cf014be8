"""The options of a benchmark."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import Field

from ..core.errors import ConfigError
from ..core.options import check, option
from .records import Method

Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
Temperature = Annotated[float, Field(ge=0)]


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """The measurements of a run; the flags of ``paceline bench`` are generated from the fields."""

    model: str = option(help="Embedded model, folder or hub name.")
    methods: tuple[Method, ...] = field(metadata={"cli": False})  # plain decoding among them
    workloads: tuple[str, ...] = option(
        (),
        help="Workload, of bench/workloads.toml or a file; repeat it. Default: all that come with Paceline.",
        flag="--workload",
        metavar="NAME|PATH",
    )
    data: Path | None = option(
        None, help="Folder of workloads that do not come along, and of full versions.", metavar="DIR"
    )
    prompts: int = option(20, help="Prompts of each workload.", metavar="N", minimum=1)
    max_new_tokens: int | None = option(
        None, help="Tokens of an answer (default: the workload's own).", metavar="N", minimum=1
    )
    batches: tuple[Positive, ...] = option((1,), help="Prompts at once.", flag="--batch", metavar="N,N,..")
    waves: int = option(
        1,
        help="Prompts that each place of a batch answers in turn, as a server's do: as one ends, the next "
        "begins. With 1 a batch ends with its slowest answer.",
        metavar="N",
        minimum=1,
    )
    temperatures: tuple[Temperature, ...] = option(
        (0.0,), help="Temperatures to sample at; 0 is greedy.", flag="--temperature", metavar="T,T,.."
    )
    top_ks: tuple[NotNegative, ...] = field(default=(0,), metadata={"cli": False})  # that sampling chooses from; 0: all
    # tokens that prompts are brought to (see `Run`); None: as they are
    contexts: tuple[Positive | None, ...] = field(default=(None,), metadata={"cli": False})
    repeats: int = option(3, help="Times each prompt runs.", metavar="N", minimum=1)
    seed: int = option(0, help="Seed of the choice of prompts and of sampling.")
    device: str = option("cpu", help="cpu or cuda.")
    threads: int | None = option(None, help="CPU threads; default: torch's choice.")
    ignore_eos: bool = option(
        False,
        help="Continue to the full length, so that all methods give the same number of tokens.",
        flag="--ignore-eos/--stop-at-eos",
    )
    time_limit_s: float | None = field(default=None, metadata={"cli": False})  # of measuring: no further group begins
    title: str = field(default="", metadata={"cli": False})  # of the report
    applications: Mapping[str, str] = field(default_factory=dict, metadata={"cli": False})  # folders of trained sets

    def __post_init__(self) -> None:
        check(self)
        if not self.methods:
            raise ConfigError("no method", "nothing would be measured", "name one with --method")


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """The passes that ``paceline bench step`` times."""

    rows: tuple[Positive, ...] = option((1, 2, 4, 8, 16, 32, 64), help="Rows of a pass.", metavar="N,N,..")
    context: tuple[Positive, ...] = option((256, 1024), help="Committed tokens before the rows.", metavar="N,N,..")
    repeats: int = option(30, help="Passes of each kind; medians are shown.", minimum=1)

    def __post_init__(self) -> None:
        check(self)
