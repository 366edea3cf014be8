"""How a target is split over processes, as a user writes it: a number of stages, or the hosts of all but the last."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from ...core.errors import ConfigError
from ...core.named import NamedConfig, made, pairs
from ...core.options import MOST_TEXT, option, shown

HOST = re.compile(r"([^\s:,=\[\]]+):(\d{1,5})")
MOST = 1024  # stages


@dataclass(frozen=True, kw_only=True)
class Split(NamedConfig):
    """Stages of a target in processes."""

    kind: ClassVar[str] = "pipeline"

    stages: int = option(2, help="processes, this one included", minimum=1, maximum=MOST)
    hosts: tuple[str, ...] = option((), help="HOST:PORT of all stages but the last one; none: all on this host")
    cores: tuple[int, ...] = option((), help="CPU cores, shared evenly in the order of the stages, such as <0,1,2,3>")
    threads: int | None = option(None, help="threads of each stage; none: one a core", minimum=1)

    def validate(self) -> None:
        """Hosts name their own cores, and are as many as stages but for one."""
        self.require("hosts", len(self.hosts) in (0, self.stages - 1), "are those of all stages but the last one")
        self.require("cores", not (self.hosts and self.cores), "are for stages on this host")


def parse_split(given: int | str) -> Split:
    """Read what a user gives as ``pipeline``: ``4``, ``4,cores=<0,1,2,3>`` or ``HOST:PORT,HOST:PORT``.

    Raises:
        ConfigError: neither, or options that do not fit.
    """
    asked, text = f"pipeline={shown(given)}", str(given)
    if isinstance(given, bool) or len(text) > MOST_TEXT:
        raise _neither(asked)
    first, _, rest = text.partition(",")
    if re.fullmatch(r"\s*\d{1,9}\s*", first):
        named = pairs(asked, Split, rest or None)
        split: Split = made(asked, Split, [("stages", first.strip()), *named])
        return split
    hosts = tuple(part.strip() for part in text.split(","))
    if not all(_is_host(host) for host in hosts):
        raise _neither(asked)
    if len(set(hosts)) < len(hosts):
        raise ConfigError(asked, "a host's port is there twice", "give each stage a port of its own")
    return Split(stages=len(hosts) + 1, hosts=hosts)


def _is_host(text: str) -> bool:
    match = HOST.fullmatch(text)
    return match is not None and 0 < int(match[2]) < 2**16


def _neither(asked: str) -> ConfigError:
    wrong = "it is neither a number of stages nor a list of hosts"
    return ConfigError(asked, wrong, "write 4, or 4,cores=<0,1,2,3>, or HOST:PORT,HOST:PORT")
