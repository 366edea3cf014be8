"""Machines as the planner sees them: arithmetic and memory of one device, from ``machines.toml``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from ..core.errors import ConfigError
from ..core.options import shown, suggest
from ..core.tables import read_table


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One device, all figures peaks."""

    name: str
    flops: float  # dense arithmetic at 16 bits, FLOP/s
    bandwidth: float  # of the device's memory, bytes/s
    memory: float  # bytes
    about: str = ""  # full name
    source: str = ""  # where the figures are published

    @property
    def hoi(self) -> float:
        """Return the hardware operational intensity: FLOPs that pass while a byte is read (SPIRe, section 2)."""
        return self.flops / self.bandwidth


@cache
def machines() -> dict[str, Machine]:
    """Return all machines by name."""
    return {name: Machine(name=name, **values) for name, values in read_table("plan/machines.toml").items()}


def machine(name: str) -> Machine:
    """Return the machine of that name.

    Raises:
        ConfigError: there is none; the message lists them.
    """
    entry = machines().get(name)
    if entry is None:
        raise ConfigError(f"machine {shown(name)}", "it is not known", suggest(name, machines(), "machine"))
    return entry
