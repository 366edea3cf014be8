"""What is said before work begins: where a worker is to run and what it is to serve, and whether it fits.

There are two lines to a worker. Over the one it is told to begin, and it says that it lives. Over the other it says
hello, and then whatever its service says.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from .. import __version__
from ..core.errors import CapabilityError


@dataclass(frozen=True, slots=True)
class Facts:
    """What both sides must agree in. Empty: it does not matter here."""

    weights: str = ""  # fingerprint of the checkpoint (`weights.files.fingerprint`), and its layers
    vocabulary: str = ""  # of token ids and their pieces
    dtype: str = ""
    torch: str = ""  # its version: lines between hosts are torch's
    instructions: str = ""  # in use, where ids are to be the same bit for bit
    version: str = __version__


_REMEDIES = {
    "weights": "give both sides the same checkpoint",
    "vocabulary": "use models with the same tokenizer",
    "dtype": "give both sides the same dtype",
    "torch": "install the same torch on all hosts",
    "instructions": "use hosts with the same kind of processor, or leave exact out",
    "version": "install the same version on both sides",
}


def compare(who: str, expected: Facts, found: Facts) -> None:
    """Refuse a worker that is not what was asked for.

    Raises:
        CapabilityError: the first fact that differs.
    """
    for fact in fields(Facts):
        mine, theirs = getattr(expected, fact.name), getattr(found, fact.name)
        if mine and mine != theirs:
            wrong = f"its {fact.name} is {theirs or 'not said'}, and {mine} is asked for"
            raise CapabilityError(f"worker {who}", wrong, _REMEDIES[fact.name])


@dataclass(frozen=True, slots=True)
class Begin:
    """To a worker that was just started."""

    name: str
    service: str  # "module:function" that makes it
    options: dict[str, Any]  # of that function
    way: str  # the line to be opened: "shared:..." or "fd:..." on this host, "group:..." between two
    key: str  # to be said in `Hello`
    cores: list[int]
    device: str
    spin_us: int
    beat_s: float  # between two beats
    waits: bool = False  # a spare one: it calls ``service`` to get ready, and the `Begin` of its work comes later


@dataclass(frozen=True, slots=True)
class Beat:
    """From a worker, every so often."""

    busy_s: float  # how long it has been at its present piece of work; 0: it waits for work


@dataclass(frozen=True, slots=True)
class Hello:
    """From a worker that is ready."""

    key: str
    facts: dict[str, str]
    pid: int
    host: str  # where it runs; empty: on this host


@dataclass(frozen=True, slots=True)
class Refused:
    """From a worker that cannot serve what it was asked to: the three parts of the error."""

    key: str
    asked: str
    wrong: str
    remedy: str
    host: str


@dataclass(frozen=True, slots=True)
class Fault:
    """From a worker that could not make anything of a message, or failed at it and ends."""

    why: str


LIFE = Begin, Beat
GREETINGS = Hello, Refused, Fault
