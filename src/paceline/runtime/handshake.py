"""The messages before work begins: what a worker runs and where, and whether it fits."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from pydantic import TypeAdapter

from .. import __version__
from ..core.errors import CapabilityError


def _fact(remedy: str, default: str = "") -> Any:
    return field(default=default, metadata={"remedy": remedy})


@dataclass(frozen=True, slots=True)
class Facts:
    """Describe what both sides must agree in; an empty fact does not matter."""

    weights: str = _fact("give both sides the same checkpoint")  # `weights.files.fingerprint`, and its layers
    vocabulary: str = _fact("use models with the same tokenizer")  # of token ids and their pieces
    dtype: str = _fact("give both sides the same dtype")
    torch: str = _fact("install the same torch on all hosts")  # its version
    # In use, where ids are to be the same bit for bit.
    instructions: str = _fact("use hosts with the same kind of processor, or leave exact out")
    version: str = _fact("install the same version on both sides", __version__)


def compare(who: str, expected: Facts, actual: Facts) -> None:
    """Refuse a worker whose facts differ.

    Raises:
        CapabilityError: the first fact that differs.
    """
    for fact in fields(Facts):
        mine, theirs = getattr(expected, fact.name), getattr(actual, fact.name)
        if mine and mine != theirs:
            wrong = f"its {fact.name} is {theirs or 'not known'}, and {mine} is expected"
            raise CapabilityError(f"worker {who}", wrong, fact.metadata["remedy"])


@dataclass(frozen=True, slots=True)
class Begin:
    """To a process that was just started."""

    name: str
    service: str  # "module:function" that makes it
    options: dict[str, Any]  # of that function
    cores: list[int]
    device: str
    line: str  # address of the messages (`wire.listening`) ..
    beats: str  # .. and of the heartbeats
    beat_s: float  # between two heartbeats


@dataclass(frozen=True, slots=True)
class Hello:
    """From a worker that is ready."""

    facts: Facts
    pid: int
    host: str  # where it runs; empty: on this host
    inbox: str  # address of its further messages (`Service.listen`); empty: none


@dataclass(frozen=True, slots=True)
class Refused:
    """From a worker that cannot serve what it is to serve: the three parts of the error."""

    subject: str
    wrong: str
    remedy: str
    host: str


@dataclass(frozen=True, slots=True)
class Fault:
    """From a worker that could not read a message, or failed and ends."""

    why: str


BEGIN = TypeAdapter(Begin)
