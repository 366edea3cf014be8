"""Machines as the planner sees them: arithmetic, memory and links of one device, from ``machines.toml``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from ..core.errors import ConfigError
from ..core.options import check, option, shown, suggest
from ..core.tables import read_table


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One device, all figures peaks; raises a `ConfigError` where a rate or a size is not above 0."""

    name: str = option(help="name of the device")
    flops: float = option(help="dense arithmetic at 16 bits, FLOP/s", above=0)
    bandwidth: float = option(help="bandwidth of the device's memory, bytes/s", above=0)
    memory: float = option(help="bytes of its memory", above=0)
    link: float = option(0.0, help="to the other devices, bytes/s in one direction; 0: there is no link", minimum=0)
    cores: int = option(0, help="cores of the processor, where that computes; 0: another kind of device", minimum=0)
    device: str = option("", help="cuda or cpu: this engine's name for it; empty: it does not run there")
    about: str = option("", help="full name of the device")
    source: str = option("", help="where the figures are published")

    def __post_init__(self) -> None:
        check(self, f"machine {self.name}: ")

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
    found = machines().get(name)
    if found is None:
        raise ConfigError(f"machine {shown(name)}", "it is not known", suggest(name, machines(), "machine"))
    return found
