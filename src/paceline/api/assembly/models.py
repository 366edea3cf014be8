"""A checkpoint by its name, and a decoder from it: the whole target, some layers, a rank's share, a draft's track."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch

from ...core.errors import CapabilityError
from ...core.registry import TRACKS
from ...engine.base import WorkerPlace
from ...engine.rounds import parse_round
from ...kernels.layers import unsupported
from ...model.attention import make_backend
from ...model.decoder import Decoder
from ...model.devices import share_devices
from ...model.families import DecoderConfig
from ...model.parallel import Ranks, Share, by_outputs
from ...weights.gguf import is_gguf
from ...weights.loader import load_model
from ...weights.source import Source, parse_device
from ..config import LLMConfig
from ..split import parse_split


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A decoder of a checkpoint, or of some of its layers, with its tokenizer."""

    source: Source
    decoder: Decoder
    tokenizer: Any  # None for a folder without one

    @property
    def name(self) -> str:
        """Return the name that the user gave it."""
        return self.source.name

    @property
    def folder(self) -> Path:
        """Return its folder, or its GGUF file."""
        return self.source.folder


def start(name: str, *arguments: Any) -> Any:
    """Call a function of `paceline.runtime` that starts processes, which is imported when it is needed."""
    return resolve_name(f"paceline.runtime.{name}")(*arguments)


def share_of(config: LLMConfig, source: Source, rank: int) -> Share:
    """Return what one rank has of the target.

    Raises:
        ConfigError: ranks that cannot share it.
        CapabilityError: ``exact`` on layers that torch runs, or a target that is not cut.
    """
    count = config.tensor_parallel
    compiled = compiled_layers(config, source.shape, source.dtype)
    if config.exact and not compiled:
        wrong = "the same bits at any number of ranks are what the compiled layers give, and torch runs these"
        raise CapabilityError(f"exact=True with tensor_parallel={count}", wrong, "leave out exact, or use bfloat16")
    if is_gguf(source.folder):
        wrong = "a GGUF file's weights are in blocks, which are not cut at ranks"
        raise CapabilityError(f"tensor_parallel={count} with {source.name}", wrong, "use the original checkpoint")
    return Share(source.shape, rank, count, by_outputs(bool(config.exact), source.quant))


def load_decoder(
    config: LLMConfig,
    source: Source,
    exact: bool,
    layers: tuple[int, int] | None = None,
    ranks: Ranks | None = None,
) -> Decoder:
    """Return a checkpoint's decoder, some ``layers`` of it, or one rank's share; errors as of `load_model`."""
    options: dict[str, Any] = {
        "attention": make_backend(source.dtype, exact),
        "device": stage_devices(config)[-1],
        "native": compiled_layers(config, source.shape, source.dtype),
        "ranks": ranks,
    }
    if source.shape.tracks > 1:
        options["network"] = resolve_name(f"{TRACKS}:Tracks")
    return load_model(source, exact=exact, layers=layers, **options)


def stage_devices(config: LLMConfig) -> list[str]:
    """Return the devices of the target's stages on this host.

    The last one is this process's; a target that is not split over processes here has that one alone.
    """
    split = None if config.pipeline is None else parse_split(config.pipeline)
    if split is None or config.cluster is not None:
        return [config.device]
    return share_devices(config.device, split.stages, torch.cuda.device_count())


def draft_device(config: LLMConfig, place: WorkerPlace) -> str:
    """Return the device of a drafter in a process of its own: the named one, or the next one after the stages'."""
    devices = len(stage_devices(config)) + 1
    return place.device or share_devices(config.device, devices, torch.cuda.device_count())[-1]


def own_layers(config: LLMConfig, shape: DecoderConfig) -> tuple[int, int] | None:
    """Return the layers that stay in this process where others have the rest; None: all.

    Raises:
        ConfigError: more stages than layers, or a cut of another number of layers.
    """
    if config.pipeline is None:
        return None
    chosen: Any = parse_round(config.round)
    start, stop = chosen.bounds(shape.num_layers)[-2:]
    return start, stop


def load_source(config: LLMConfig, source: Source, exact: bool, layers: tuple[int, int] | None = None) -> LoadedModel:
    """Return a checkpoint's decoder, or ``layers`` of it, with its tokenizer; errors as of `load_model`."""
    tokenizer = source.tokenizer()  # before the weights: its errors show at once
    return LoadedModel(source, load_decoder(config, source, exact, layers), tokenizer)


def exact_layers(config: LLMConfig, source: Source) -> bool:
    """Return whether the target's layers must be configured to give a row the same bits in every pass.

    Compiled ones do it anyway, and in float64 what differs decides no token.
    """
    if config.exact is not None:
        return config.exact
    able = config.tensor_parallel == 1 and source.dtype != torch.float64
    return able and not compiled_layers(config, source.shape, source.dtype)


def compiled_layers(config: LLMConfig, shape: DecoderConfig, dtype: torch.dtype) -> bool:
    """Return whether the compiled layers run this model."""
    if config.kernels == "torch":
        return False
    why = unsupported(shape, dtype, parse_device(config.device))
    if why and config.kernels == "native":
        raise CapabilityError("kernels='native'", why, "use kernels='auto' or 'torch'")
    return why is None
