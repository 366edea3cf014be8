"""How a target is split over processes, and over which hosts, as a user writes it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, Literal

from ..core.errors import ConfigError
from ..core.named import NamedConfig, pairs, read_config
from ..core.options import MOST_TEXT, option, shown

MOST = 1024  # stages
_HOST_PORT = re.compile(r"[^\s:,=/\[\]]+:\d{1,5}")


@dataclass(frozen=True, kw_only=True)
class Split(NamedConfig):
    """Stages of a target in processes."""

    kind: ClassVar[str] = "pipeline"

    stages: int = option(2, help="processes, this one included", minimum=1, maximum=MOST)
    cores: tuple[int, ...] = option((), help="CPU cores, shared evenly in the order of the stages, such as <0,1,2,3>")
    threads: int | None = option(None, help="threads of each stage; none: one a core", minimum=1)


def parse_split(value: int | str) -> Split:
    """Read what a user gives as ``pipeline``: ``4`` or ``4,cores=<0,1,2,3>``.

    Raises:
        ConfigError: neither, or options that do not fit.
    """
    subject, text = f"pipeline={shown(value)}", str(value)
    first, _, rest = text.partition(",")
    if isinstance(value, bool) or len(text) > MOST_TEXT or not re.fullmatch(r"\s*\d{1,9}\s*", first):
        raise ConfigError(subject, "it is not a number of stages", "write 4, or 4,cores=<0,1,2,3>")
    split: Split = read_config(subject, Split, [("stages", first.strip()), *pairs(subject, Split, rest or None)])
    return split


@dataclass(frozen=True, kw_only=True)
class ClusterConfig(NamedConfig):
    """A Ray cluster, and what each worker gets of it."""

    kind: ClassVar[str] = "cluster"

    address: str = option("auto", help="auto: the one that this host has joined; or HOST:PORT of its head")
    place: Literal["spread", "pack"] = option("spread", help="workers on as many hosts as there are, or on few")
    cores: int | None = option(None, help="cores and threads of each worker; none: an even share of a host", minimum=1)
    gpus: int | None = option(None, help="GPUs of each worker; none: 1 with device=cuda, else 0", minimum=0)

    def validate(self) -> None:
        """Check that an address is a word, or a host and a port."""
        self.require(
            "address", self.address == "auto" or _HOST_PORT.fullmatch(self.address) is not None, "is not an address"
        )


def parse_cluster(value: str) -> ClusterConfig:
    """Read what a user gives as ``cluster``: ``auto``, ``10.0.0.1:6379``, ``auto,place=pack,cores=8``.

    Raises:
        ConfigError: neither, or options that do not fit.
    """
    subject, (first, _, rest) = f"cluster={shown(value)}", value.partition(",")
    if len(value) > MOST_TEXT or not first.strip():
        raise ConfigError(subject, "it is not an address", "write auto, or HOST:PORT of the cluster's head")
    given_options = [("address", first.strip()), *pairs(subject, ClusterConfig, rest or None)]
    cluster: ClusterConfig = read_config(subject, ClusterConfig, given_options)
    return cluster
