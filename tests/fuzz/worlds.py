"""The tiny models that requests are put to: float64 with dense attention, and every exact kind that is fast.

A world is a target with its drafts, applications and tokenizer. All of it is made once and shared by all cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from kits.byte_tokens import BYTES_VOCAB, SPECIAL, byte_tokenizer
from kits.tiny import TOY_TEXTS, assemble, tiny_adapters, tiny_application, tiny_config, tiny_decoder, tiny_streams

from paceline import kernels
from paceline.api.config import LLMConfig
from paceline.api.llm import LLM
from paceline.engine.engine import Engine
from paceline.engine.tokens import texts_of
from paceline.model.applications import Application
from paceline.model.decoder import Decoder
from paceline.model.families import DecoderConfig

MAX_LEN = 400  # tokens of a prompt and its answer, in every engine and in the oracle


@dataclass(frozen=True)
class World:
    """One kind of target.

    Args:
        exact: False where float64 makes answers equal, though the last bits of its numbers may differ.
        bytes: has a tokenizer with byte fallback; else a toy that turns an id into a letter and a digit.
        whole: every layer sees the whole text, for drafters that refuse sliding windows.
    """

    name: str
    dtype: torch.dtype = torch.float64
    exact: bool = True
    compiled: bool = False
    quant: Any = None
    bytes: bool = False
    whole: bool = False

    @property
    def config(self) -> DecoderConfig:
        """The target's shape: three end tokens, so that answers often meet one."""
        options: dict[str, Any] = {"head_dim": 16 if self.quant else 8}  # 8 is padded by the compiled layers
        if self.whole:
            options["windows"] = (None,) * tiny_config().num_layers
        if self.bytes:
            return tiny_config(vocab_size=BYTES_VOCAB, eos_ids=(SPECIAL.index("</s>"),), **options)
        return tiny_config(eos_ids=(7, 23, 61), **options)

    @property
    def reference(self) -> bool:
        """Whether an independent calculation can certify answers."""
        return not self.exact


WORLDS = {
    world.name: world
    for world in (
        World("float64", exact=False),
        World("bytes", exact=False, bytes=True),
        World("exact-float32", torch.float32),
        World("native-float32", torch.float32, compiled=True),
        World("native-bfloat16", torch.bfloat16, compiled=True),
        World("native-int8", torch.bfloat16, compiled=True, quant="int8"),
    )
}


def available() -> list[World]:
    """Those that run on this machine."""
    missing = kernels.unavailable()
    return [world for world in WORLDS.values() if not (world.compiled and missing)]


def _decoder(world: World, **options: Any) -> Decoder:
    return tiny_decoder(world.config, dtype=world.dtype, compiled=world.compiled, quant=world.quant, **options)


@cache
def target(world: World) -> Decoder:
    """The target."""
    return _decoder(world, exact=world.exact)


@cache
def merged(world: World, application: str | None) -> Decoder:
    """The target with an application's adapters added to its weights, for the independent calculation."""
    if application is None:
        return target(world)
    return _decoder(world, merged=_adapters(world, application).adapters)


@cache
def draft(world: World, noise: float) -> Any:
    """A noised copy of the target, as a drafter expects a loaded model."""
    return SimpleNamespace(decoder=_decoder(world, noise=noise), tokenizer=None, name="tiny-draft", folder=None)


@cache
def lossless_streams(world: World, layers: int = 1) -> Any:
    """A random set of streams for the base model, through so many layers at the top."""
    return tiny_streams(world.config, dtype=world.dtype, layers=layers)


ADAPTERS = ("sql", "prose")
SHARED = "shared"  # its answers depend on streams, so it needs the fused round


@cache
def _adapters(world: World, name: str) -> Any:
    if name == "sql":
        return tiny_adapters(world.config, seed=1, dtype=world.dtype)
    options: dict[str, Any] = {"layers": (0, 2), "linears": ("qkv", "down"), "alpha": 3.0}
    return tiny_adapters(world.config, seed=2, rank=7, size=0.8, dtype=world.dtype, **options)


@cache
def application(world: World, name: str) -> Application:
    """One application over the target."""
    if name == SHARED:
        trained = tiny_streams(world.config, dtype=world.dtype, mode="shared", gamma=2, seed=3)
        return tiny_application(name, target(world), trained)
    return tiny_application(name, target(world), _adapters(world, name))


def tokenizer_of(world: World) -> Any:
    """The tokenizer; None for the toy."""
    return byte_tokenizer(strip=False) if world.bytes else None


@cache
def texts(world: World) -> Any:
    """What engines make text with."""
    return texts_of(byte_tokenizer(strip=False)) if world.bytes else TOY_TEXTS


def build(world: World, drafter: Any, applications: Sequence[str] = (), **options: Any) -> Engine:
    """An engine over the world's target; ``options`` as for `tiny.assemble`."""
    return assemble(
        drafter,
        decoder=target(world),
        texts=texts(world),
        max_model_len=MAX_LEN,
        applications=[application(world, name) for name in applications],
        **options,
    )


class TinyLLM(LLM):
    """`LLM` around an engine that exists already: the same calls, no files."""

    def __init__(self, world: World, engine: Engine) -> None:
        self.config = LLMConfig(model=world.name)
        self.tokenizer = tokenizer_of(world)
        self.engine = engine
