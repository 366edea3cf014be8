"""Speculative streams of a decoder: their trained parameters, the file format, and the initial states.

A row of the target that carries streams has gamma of them next to it in the top layers; stream j predicts the token j
places after the row's own next one. `StreamSet` holds all that a trained set adds to the base model.

Source: Speculative Streaming, section 2 and appendix G.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...core.errors import CapabilityError
from ...core.options import check
from ...model.adapters import AdapterConfig, LowRank, Shapes, fill_normal
from ...model.config_fields import MAX_LAYERS
from ...model.linear import nan_parameter
from ...weights.trained_files import TrainedConfig, TrainedFiles

CONFIG_FILE, WEIGHTS_FILE = "streams.json", "streams.safetensors"
EMBEDDING_DEVIATION = 0.02
STREAM_ROWS = 32  # of streams, that a pass has room for where they are not on every node
MAX_STREAMS, MAX_WIDTH = 1024, 2**20  # of gamma; of d_model and an adapter's rank

Mode = Literal["lossless", "shared"]


@dataclass(frozen=True, kw_only=True)
class StreamConfig(TrainedConfig):
    """The shape of a trained set of streams, and the target that it was trained for."""

    what: ClassVar[str] = "streams"
    retired = (("start_rank", 0), ("exits", []), ("value_rotation", None))

    mode: Mode = "lossless"  # shared: adapters and streams serve the main rows too (eq. 3)
    gamma: int  # streams; 0 only in shared mode: plain adapters
    msa_layers: int  # Ns, the layers at the top that streams go through
    num_layers: int  # N, of the target
    d_model: int
    vocab_size: int
    prune_rank: int = 8  # of the early-exit map where streams begin, by which trees are pruned; 0: there is none
    adapter: AdapterConfig | None = None

    def __post_init__(self) -> None:
        shared = self.mode == "shared"
        self.require("mode", self.mode in ("lossless", "shared"), "must be lossless or shared")
        self.require("num_layers", 1 <= self.num_layers <= MAX_LAYERS, f"must be 1 to {MAX_LAYERS}")
        self.require("d_model", 1 <= self.d_model <= MAX_WIDTH, f"must be 1 to {MAX_WIDTH}")
        self.require("vocab_size", self.vocab_size >= 1, "must be 1 or more")
        self.require("gamma", self.gamma >= (0 if shared else 1), "must be 1 or more (0 in shared mode: no streams)")
        self.require("gamma", self.gamma <= MAX_STREAMS, f"must be {MAX_STREAMS} or less")
        low, high = (1 if self.gamma else 0), self.num_layers - 1
        rule = f"must be {low} to {high}: streams start above the first of the target's {self.num_layers} layers"
        self.require("msa_layers", low <= self.msa_layers <= high, rule)
        self.require("prune_rank", 0 <= self.prune_rank <= self.d_model, "must be 0 to d_model")
        self._require_adapter()
        check(self, f"{self.what} with ")  # last: a number out of bounds has words of its own

    def _require_adapter(self) -> None:
        layers = self.adapter.layers if self.adapter else ()
        if self.adapter is not None:
            self.require("adapter", self.adapter.rank <= MAX_WIDTH, f"must have a rank of {MAX_WIDTH} or less")
        low = 0 if self.mode == "shared" else self.insertion
        inside = not layers or (layers[0] >= low and layers[-1] < self.num_layers)
        self.require("adapter", inside, f"must lie in layers {low} to {self.num_layers - 1}")
        self.require("adapter", bool(layers or self.gamma), "is missing: a set without streams is its adapter")

    @property
    def insertion(self) -> int:
        """N - Ns: the first layer that stream rows go through, and the one before which trees are pruned."""
        return self.num_layers - self.msa_layers


class LowRankMap(nn.Module):
    """x -> x + up(down(x)): the early-exit map o_theta (section 2.3)."""

    def __init__(self, rank: int, width: int, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.down = nan_parameter((rank, width), dtype, device, True)  # [rank, d]
        self.up = nan_parameter((width, rank), dtype, device, True)  # [d, rank]

    @torch.no_grad()
    def start(self, generator: torch.Generator | None) -> None:
        """Fill with the identity: down ~ N(0, 1 / d), up = 0."""
        fill_normal(self.down, self.down.shape[1] ** -0.5, generator)
        self.up.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """[..., d] -> [..., d]."""
        return x + F.linear(F.linear(x, self.down), self.up)


class StreamSet(nn.Module):
    """All parameters that a trained set adds to the base model, whose linear layers have ``shapes``.

    NaN until loaded or made by `fresh`.
    """

    def __init__(
        self,
        config: StreamConfig,
        shapes: Shapes,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        c, d = config, config.d_model
        self.config = config
        self.embeddings = nan_parameter((c.gamma, d), dtype, device, True) if c.gamma else None  # P [gamma, d]
        self.prune_map = LowRankMap(c.prune_rank, d, dtype, device) if c.gamma and c.prune_rank else None
        self.adapters = LowRank(c.adapter, shapes, dtype=dtype, device=device) if c.adapter else None

    @staticmethod
    @torch.no_grad()
    def fresh(config: StreamConfig, shapes: Shapes, generator: torch.Generator | None = None) -> StreamSet:
        """Return a set to be trained, in float32: maps and adapters change nothing yet, P ~ N(0, 0.02^2)."""
        streams = StreamSet(config, shapes)
        if streams.embeddings is not None:
            fill_normal(streams.embeddings, EMBEDDING_DEVIATION, generator)
        if streams.prune_map is not None:
            streams.prune_map.start(generator)
        if streams.adapters is not None:
            streams.adapters.start(generator)
        return streams

    def begin(self, hidden: Tensor) -> Tensor:
        """Return [..., gamma, d] the streams of main rows, just before layer N - Ns: M_t + P_j.

        ``hidden`` is [..., d], M after layer N - Ns - 1. Source: eq. 4, with f the identity.
        """
        assert self.embeddings is not None, "a set of adapters alone has no streams"
        return hidden[..., None, :] + self.embeddings

    def tensors(self) -> dict[str, Tensor]:
        """Parameters under their names in the file."""
        tensors: dict[str, Tensor] = {}
        if self.embeddings is not None:
            tensors["embeddings"] = self.embeddings
        if self.prune_map is not None:
            tensors["prune.down"], tensors["prune.up"] = self.prune_map.down, self.prune_map.up
        if self.adapters is not None:
            tensors |= {f"adapters.{name}": value for name, value in self.adapters.tensors().items()}
        return tensors

    def parameters_by_part(self) -> dict[str, int]:
        """Count the parameters of each part: embeddings gamma*d, prune 2*r*d, adapters."""
        counts = {"embeddings": 0, "prune": 0, "adapters": 0}
        for name, value in self.tensors().items():
            counts[name.partition(".")[0]] += value.numel()
        return counts

    def save(self, folder: str | Path, dtype: torch.dtype | None = None) -> None:
        """Write `CONFIG_FILE` and `WEIGHTS_FILE` into a folder, made where it is missing; ``dtype`` None: as they are.

        Raises:
            ConfigError: a parameter that holds NaN.
        """
        FILES.write(self.tensors(), asdict(self.config), Path(folder), dtype)

    @staticmethod
    def load(folder: str | Path, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> StreamSet:
        """Return a trained set from a folder that `save` wrote; ``dtype`` None: as stored.

        Raises:
            ConfigError: files or tensors that are missing, broken, misshaped or left over.
        """
        place = Path(folder)
        config, values = read_config(place), FILES.tensors(place)
        kind = dtype or next((v.dtype for v in values.values()), torch.float32)
        streams = StreamSet(config, _shapes(values), dtype=kind, device="meta")
        return FILES.fill(streams, values, place / WEIGHTS_FILE, device)

    def first(self, gamma: int) -> StreamSet:
        """Return the same set with its first ``gamma`` streams alone; the other parts are shared with this one."""
        part = object.__new__(StreamSet)
        nn.Module.__init__(part)
        part.config = replace(self.config, gamma=gamma)
        part.prune_map, part.adapters = self.prune_map, self.adapters
        part.embeddings = None if self.embeddings is None else nn.Parameter(self.embeddings.data[:gamma])
        return part


FILES = TrainedFiles(
    "a stream set", CONFIG_FILE, WEIGHTS_FILE, "restore the file, or train the set again", tensors_of=StreamSet.tensors
)


def read_config(folder: str | Path) -> StreamConfig:
    """Read the configuration of a trained set.

    Raises:
        ConfigError: no such folder, or a file that is missing or broken.
    """
    return FILES.config(StreamConfig, Path(folder))


def check_exit(subject: str, streams: StreamSet) -> None:
    """Refuse to prune with a set that has no early exit.

    Raises:
        CapabilityError: there is none.
    """
    if streams.prune_map is None:
        wrong = "the set has no early exit: it was trained with prune_rank=0"
        raise CapabilityError(subject, wrong, "leave pruning out, or train the set with prune_rank=8")


def _shapes(values: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    """Return (inputs, outputs) of each linear, from its first pair in the file."""
    shapes: dict[str, tuple[int, int]] = {}
    for name, down in values.items():
        parts = name.split(".")
        up = values.get(f"{name.removesuffix('down')}up")
        paired = up is not None and up.dim() == down.dim() == 2
        if len(parts) == 4 and parts[0] == "adapters" and parts[3] == "down" and up is not None and paired:
            shapes.setdefault(parts[2], (down.shape[-1], up.shape[0]))
    return shapes
