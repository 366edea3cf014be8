"""The options of `LLM` and of the command line, set at start-up."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ByteSize, TypeAdapter, ValidationError

from ..core.errors import CapabilityError, ConfigError
from ..core.options import HIGHEST, check, shown
from ..draft import registry
from ..engine.budget import AUTO, parse_budget
from ..engine.rounds import parse_round
from ..engine.scheduler import parse_prompt_rows
from ..engine.verification import DEFAULT_VERIFIER, VERIFIERS
from ..weights.source import Source, check_dtype, parse_device, resolve
from .options import AUTO_DRAFTER, AUTO_ROUND, LLMOptions
from .options import MAX_THREADS as MAX_THREADS
from .split import parse_cluster, parse_split

_SIZE = TypeAdapter(ByteSize)
_SIZE_TEXT = re.compile(r"(\d*\.)?\d+\s*[a-z]+", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class LLMConfig(LLMOptions):
    """The options of a model and its engine, checked for what they mean together."""

    def __post_init__(self) -> None:
        check(self)
        check_dtype(self.dtype)
        parse_device(self.device)
        if self.kv_memory is not None:
            parse_bytes(self.kv_memory)
        parse_prompt_rows(self.max_prompt_rows)
        if self.drafter != AUTO_DRAFTER:
            registry.parse(self.drafter)
        parse_round(self.round)
        if self.pipeline is not None:
            object.__setattr__(self, "round", self._piped(parse_split(self.pipeline).stages))
        if self.tensor_parallel > 1:
            self._check_ranks()
        if self.cluster is not None:
            parse_cluster(self.cluster)
            self._check_cluster()
        chosen = parse_budget(self.budget)
        off = self.budget is None or (chosen != AUTO and chosen.most_nodes == 0)
        if not off and self.drafter is None:
            subject = f"budget={shown(self.budget)} without a drafter"
            raise ConfigError(subject, "there is no drafter", "name one: drafter='ngram'")
        if self.exact and VERIFIERS[self.verifier].needs_q:
            subject, remedy = f"exact=True with verifier={self.verifier!r}", f"use verifier={DEFAULT_VERIFIER!r}"
            raise CapabilityError(subject, "its ids depend on the drafter by design", remedy)
        filled = parse_round(self.round)
        if filled is not None and filled.place is not None and filled.place.device:
            parse_device(filled.place.device)

    def resolve(self) -> Source:
        """Find the model, and read its configuration.

        Raises:
            ConfigError: there is no such model, or it cannot be used.
        """
        return resolve(self.model, self.dtype, self.revision, self.offline)

    def _check_ranks(self) -> None:
        """Refuse stages, or a device other than the CPU, next to ranks."""
        subject = f"tensor_parallel={self.tensor_parallel}"
        if (round_ := parse_round(self.round)) is not None and round_.stages:
            wrong = "a target is cut into stages or into ranks"
            raise CapabilityError(f"{subject} with round={shown(self.round)}", wrong, "leave out one of the two")
        if parse_device(self.device).type != "cpu":
            wrong = "ranks share the memory of a host, and add in it"
            raise CapabilityError(f"{subject} with device={shown(self.device)}", wrong, "use device='cpu'")

    def _check_cluster(self) -> None:
        """Refuse a cluster that nothing would run on, and cores that Ray chooses."""
        subject, round_ = f"cluster={shown(self.cluster)}", parse_round(self.round)
        place = None if round_ is None else round_.place
        if self.pipeline is None and place is None:
            wrong = "neither stages nor a drafter have a process of their own that could run there"
            raise ConfigError(subject, wrong, "give pipeline=2, or a round whose drafter has a process")
        named = self.pipeline is not None and parse_split(self.pipeline).cores
        if named or (place is not None and place.cores):
            wrong = "the cluster chooses the cores of a worker"
            raise ConfigError(f"{subject} with named cores", wrong, "give their number: cluster='auto,cores=2'")

    def _piped(self, stages: int) -> str:
        """Return the round over so many stages in processes."""
        subject = f"pipeline={shown(self.pipeline)}"
        if self.applications:
            wrong = "stages in processes have the base model's layers alone, without adapters"
            raise CapabilityError(f"{subject} with applications", wrong, "leave out one of the two")
        text = "pipeline" if self.round == AUTO_ROUND else self.round
        chosen = parse_round(text)
        if chosen is None or not chosen.stages:
            wrong = "stages are filled by the pipeline round alone"
            raise ConfigError(
                f"{subject} with round={shown(self.round)}", wrong, "leave out round, or use round=pipeline"
            )
        if "stages" not in text:
            return f"{text},stages={stages}"
        if chosen.stages != stages:
            wrong = f"these are {stages} stages"
            raise ConfigError(f"{subject} with round={shown(self.round)}", wrong, "leave out stages=")
        return text


# Options on which the target itself depends: two `LLM` that agree in them can share its weights.
TARGET_OPTIONS = (
    "model",
    "dtype",
    "device",
    "exact",
    "kernels",
    "revision",
    "pipeline",
    "tensor_parallel",
)


def parse_bytes(value: str | int) -> int:
    """Return bytes from a number or from text such as ``512MiB`` or ``2GB``.

    Raises:
        ConfigError: not a size.
    """
    text, size = f"{str(value).strip().lower().removesuffix('b')}b", -1  # 2g, 2gi and 2gib, too
    if _SIZE_TEXT.fullmatch(text):  # ByteSize itself ignores what follows
        with suppress(ValidationError):
            size = int(_SIZE.validate_python(text))
    if not 0 <= size <= HIGHEST:
        raise ConfigError(f"kv_memory={shown(value)}", "not a size", "write bytes, or a number with MiB or GiB")
    return size


def config_of(model: Any, options: Mapping[str, Any]) -> LLMConfig:
    """Return the configuration that `LLM(model, **options)` requests.

    Raises:
        ConfigError: an unknown option, or a value that does not fit.
    """
    names = sorted(LLMConfig.__dataclass_fields__)
    for name in options:
        if name not in names:
            remedy = f"known options: {', '.join(names)}"
            raise ConfigError(f"LLM(..., {name[:80]}=...)", "there is no such option", remedy)
    return LLMConfig(model=_in_text(model), **{name: _in_text(value) for name, value in options.items()})


def _in_text(value: Any) -> Any:
    """Return paths, and torch's dtypes and devices, as the text that the options take."""
    if isinstance(value, Path | torch.device):
        return str(value)
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Mapping):
        return {name: str(part) if isinstance(part, Path) else part for name, part in value.items()}
    return value
