"""The options of `LLM` and of the command line, set at start-up."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .attention import BACKENDS
from .core.errors import CapabilityError, ConfigError
from .core.options import HIGHEST, check, option, shown
from .drafters import registry
from .drafters.registry import DrafterConfig
from .engine.budget import AUTO, FixedBudget, parse_budget
from .network.loader import check_dtype, parse_device
from .planning import machines
from .rounds import AUTO as AUTO_ROUND
from .rounds import ROUNDS, parse_round
from .rounds.pipeline import PipelineConfig
from .rounds.pipeline.split import parse_split
from .rounds.verification import DEFAULT_VERIFIER, VERIFIERS

KERNELS = ("auto", "native", "torch")
AUTO_COSTS = "auto"
MAX_SEQUENCES, MAX_BATCH_ROWS = 2**16, 2**20
# More than is useful, and fewer than make an OpenMP runtime end the process because it can start no more.
MAX_THREADS = max(64, 4 * (os.cpu_count() or 1))
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


@dataclass(frozen=True, kw_only=True)
class LLMConfig:
    """All options of a model and its engine; each field's help says what it may hold."""

    model: str = option(help="embedded model, folder or hub name, or stretch:MODEL,times=8 (see docs/benchmarks.md)")
    drafter: str | DrafterConfig | None = option(
        None,
        help="the drafter: name (a trained one: with the zoo's weights for the model), name:weights, or with options",
    )
    round: str = option(
        AUTO_ROUND,
        help=f"order of drafting and verification: {', '.join(ROUNDS)}, as name,option=value; or auto: by the drafter",
    )
    pipeline: int | str | None = option(
        None,
        help="the target's layers in stages, each in a process of its own: how many, as 4 or 4,cores=<0,1,2,3>; or the "
        "HOST:PORT of all but the last (`paceline stage`)",
    )
    verifier: str = option(
        DEFAULT_VERIFIER,
        help="sample_and_match, rejection or block (for drafts that carry q), or lossy_stream_rejection (for streams)",
        choices=VERIFIERS,
    )
    budget: int | str | Mapping[int | str, int] | None = option(
        None,
        help="drafted nodes a step: a number (0: plain decoding), by batch size (1:8,4:4,16:0), or auto, the default",
    )
    costs: str = option(
        "auto",
        help="what budget=auto begins with: auto (a calibration of this machine, else a quick estimate), or what is "
        "predicted for a machine that `paceline plan` knows, such as h100",
    )
    dtype: str = option("auto", help="auto (the checkpoint's), bfloat16, float32, float64, int8, q8_0 or q4_0")
    device: str = option("cpu", help="cpu or cuda")
    exact: bool = option(False, help="ids never depend on batch, chunking, prefix hits, preemption or the drafter")
    kernels: str = option(
        "auto",
        help="auto, native (compiled for this processor; CPU only) or torch",
        choices=KERNELS,
        unknown="there are no such kernels",
    )
    attention: str = option(
        "auto",
        help="where torch's kernels run: auto, sdpa or reference",
        choices=("auto", *BACKENDS),
        unknown="there is no such attention backend",
    )
    kv_memory: str | int | None = option(None, help="bytes for the K/V pool, such as 2GiB; default: 512MiB or less")
    max_model_len: int | None = option(
        None, help="most tokens of prompt and output, two tokens or more; default: the model's context", minimum=2
    )
    max_sequences: int = option(64, help="sequences that run at once", minimum=1, maximum=MAX_SEQUENCES)
    max_batch_rows: int = option(
        512, help="rows of one target pass; longer prompts are computed in chunks", minimum=1, maximum=MAX_BATCH_ROWS
    )
    threads: int | None = option(None, help="CPU threads; default: torch's choice", minimum=1, maximum=MAX_THREADS)
    applications: dict[str, str] | None = option(
        None,
        help="a trained set that requests may name; repeat it for several",
        flag="--application",
        metavar="NAME=FOLDER",
        takes='applications are folders by name, such as {"sql": "path/to/folder"}',
    )
    revision: str | None = option(None, help="branch, tag or commit on the hub")
    offline: bool = option(False, help="fetch nothing from the hub")
    trust_remote_code: bool = option(False, help="refused: Paceline never runs a checkpoint's code", cli=False)

    def __post_init__(self) -> None:
        check(self)
        if self.trust_remote_code:
            wrong = "Paceline never runs code that comes with a checkpoint"
            raise ConfigError("trust_remote_code=True", wrong, "leave it out; the supported families need none")
        check_dtype(self.dtype)
        parse_device(self.device)
        if self.kv_memory is not None:
            parse_bytes(self.kv_memory)
        registry.parse(self.drafter)
        parse_round(self.round)
        if self.pipeline is not None:
            object.__setattr__(self, "round", self._piped(parse_split(self.pipeline).stages))
        chosen = parse_budget(self.budget)
        off = self.budget is None or (isinstance(chosen, FixedBudget) and chosen.size == 0)
        if not off and self.drafter is None:
            asked = f"budget={shown(self.budget)} without a drafter"
            raise ConfigError(asked, "there is no drafter", "name one: drafter='ngram'")
        if self.costs != AUTO_COSTS:
            machines.machine(self.costs)
            if self.drafter is None or chosen != AUTO:
                wrong = "there is no automatic budget that would read it"
                raise ConfigError(f"costs={shown(self.costs)}", wrong, "name a drafter, and leave budget=auto")
        if self.exact and VERIFIERS[self.verifier].ids_depend_on_drafter:
            asked, remedy = f"exact=True with verifier={self.verifier!r}", f"use verifier={DEFAULT_VERIFIER!r}"
            raise CapabilityError(asked, "its ids depend on the drafter by design", remedy)
        filled = parse_round(self.round)
        if filled is not None and filled.place is not None and filled.place.device:
            parse_device(filled.place.device)
        if self.exact and isinstance(filled, PipelineConfig) and filled.accept != "strict":
            asked = f"exact=True with round={shown(self.round)}"
            raise CapabilityError(asked, "what a lossy rule says depends on the drafter", "leave out accept")

    def _piped(self, stages: int) -> str:
        """The round over so many stages in processes.

        Raises:
            ConfigError: another round is named, or another number of stages.
            CapabilityError: applications, which such stages do not have.
        """
        asked = f"pipeline={shown(self.pipeline)}"
        if self.applications:
            wrong = "stages in processes have the base model's layers alone, without adapters or streams"
            raise CapabilityError(f"{asked} with applications", wrong, "leave out one of the two")
        text = PipelineConfig.kind if self.round == AUTO_ROUND else self.round
        chosen = parse_round(text)
        if not isinstance(chosen, PipelineConfig):
            wrong = "stages are filled by the pipeline round alone"
            raise ConfigError(
                f"{asked} with round={shown(self.round)}", wrong, "leave out round, or use round=pipeline"
            )
        if "stages" not in text:
            return f"{text},stages={stages}"
        if chosen.stages != stages:
            wrong = f"these are {stages} stages"
            raise ConfigError(f"{asked} with round={shown(self.round)}", wrong, "leave out stages=")
        return text


# Options on which the target itself depends: two `LLM` that agree in them can share its weights.
TARGET_OPTIONS = ("model", "dtype", "device", "exact", "kernels", "attention", "revision", "pipeline")


def parse_bytes(value: str | int) -> int:
    """Bytes from a number or from text such as ``512MiB`` or ``2GB``.

    Raises:
        ConfigError: not a size.
    """
    size: float | None = value if isinstance(value, int) and not isinstance(value, bool) else None
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmg]i?)?b?\s*", value.lower())
        size = None if match is None else float(match[1]) * _UNITS[match[2] or ""]
    if size is None or not 0 <= size <= HIGHEST:
        raise ConfigError(f"kv_memory={shown(value)}", "not a size", "write bytes, or a number with MiB or GiB")
    return int(size)


def config_of(model: Any, options: Mapping[str, Any]) -> LLMConfig:
    """The configuration that `LLM(model, **options)` asks for.

    Raises:
        ConfigError: an unknown option, or a value that does not fit.
    """
    known = sorted(LLMConfig.__dataclass_fields__)
    for name in options:
        if name not in known:
            remedy = f"known options: {', '.join(known)}"
            raise ConfigError(f"LLM(..., {name[:80]}=...)", "there is no such option", remedy)
    return LLMConfig(model=_in_text(model), **{name: _in_text(value) for name, value in options.items()})


def _in_text(value: Any) -> Any:
    """Paths, and torch's dtypes and devices, as the text that the options take."""
    if isinstance(value, Path | torch.device):
        return str(value)
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Mapping):
        return {name: str(part) if isinstance(part, Path) else part for name, part in value.items()}
    return value
