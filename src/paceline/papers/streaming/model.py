"""Speculative streams of a decoder: their trained parameters, the file format, and the initial states.

A row of the target that carries streams has gamma of them beside it in the top layers; stream j predicts the token j
places after the row's own next one. `StreamSet` holds all that a trained set adds to the base model.

Source: Speculative Streaming, section 2 and appendices E.4, G.1, N.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...core.errors import CapabilityError
from ...core.options import check
from ...model.adapters import MLP, AdapterConfig, LowRank, Shapes, fill_normal
from ...model.config_fields import MAX_LAYERS
from ...model.linear import nan_parameter
from ...weights.files import fingerprint as fingerprint
from ...weights.trained_files import TrainedConfig, TrainedFiles

CONFIG_FILE, WEIGHTS_FILE = "streams.json", "streams.safetensors"
EMBEDDING_DEVIATION = 0.02
MAX_STREAMS, MAX_WIDTH = 1024, 2**20  # of gamma; of d_model and an adapter's rank

Mode = Literal["lossless", "shared"]


@dataclass(frozen=True, kw_only=True)
class StreamConfig(TrainedConfig):
    """The shape of a trained set of streams, and the target that it was trained for."""

    what: ClassVar[str] = "streams"

    mode: Mode = "lossless"  # shared: adapters and streams serve the main rows too (eq. 3)
    gamma: int  # streams; 0 only in shared mode: plain adapters
    msa_layers: int  # Ns, the layers at the top that streams go through
    num_layers: int  # N, of the target
    d_model: int
    vocab_size: int
    start_rank: int = 0  # eta of the map f (eq. 4); 0: the identity
    prune_rank: int = 8  # of the early-exit maps before the pruning; 0: there is none
    exits: tuple[int, ...] = ()  # layers before which there is one, beside the one where streams begin; ascending
    value_rotation: float | None = None  # epsilon in radians (E.4), in place of stream embeddings; None: embeddings
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
        self.require("start_rank", 0 <= self.start_rank <= self.d_model, "must be 0 to d_model")
        self.require("prune_rank", 0 <= self.prune_rank <= self.d_model, "must be 0 to d_model")
        angle = self.value_rotation
        self.require("value_rotation", angle is None or 0 < angle < 3.15, "must be above 0 and at most pi")
        self._require_adapter()
        self._require_exits()
        check(self, f"{self.what} with ")  # last: a number out of bounds has words of its own

    def _require_adapter(self) -> None:
        layers = self.adapter.layers if self.adapter else ()
        if self.adapter is not None:
            self.require("adapter", self.adapter.rank <= MAX_WIDTH, f"must have a rank of {MAX_WIDTH} or less")
        low = 0 if self.mode == "shared" else self.insertion
        inside = not layers or (layers[0] >= low and layers[-1] < self.num_layers)
        self.require("adapter", inside, f"must lie in layers {low} to {self.num_layers - 1}")
        self.require("adapter", bool(layers or self.gamma), "is missing: a set without streams is its adapter")
        if self.adapter is not None and MLP in self.adapter.linears:
            private = self.mode == "lossless" and len(layers) == self.msa_layers
            rule = f"can have {MLP} in lossless mode alone, and then in every layer of the streams"
            self.require("adapter", private, rule)

    def _require_exits(self) -> None:
        whole = isinstance(self.exits, tuple) and all(type(layer) is int for layer in self.exits)
        self.require("exits", whole, "must be a list of layers")
        able = self.gamma > 0 and self.prune_rank > 0
        self.require("exits", able or not self.exits, "need streams and a prune_rank above 0")
        inside = all(1 <= layer < self.num_layers and layer != self.insertion for layer in self.exits)
        rule = f"must lie in layers 1 to {self.num_layers - 1}, and not where streams begin: there is one anyway"
        self.require("exits", inside, rule)
        self.require("exits", [*self.exits] == sorted({*self.exits}), "must ascend")

    @property
    def insertion(self) -> int:
        """N - Ns: the first layer that stream rows go through, and by default the one before which trees are pruned."""
        return self.num_layers - self.msa_layers


class LowRankMap(nn.Module):
    """x -> x + up(down(x)): the start map f_eta (eq. 4) and the early-exit map o_theta (section 2.3)."""

    def __init__(self, rank: int, width: int, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.down = nan_parameter((rank, width), dtype, device, True)  # [rank, d]
        self.up = nan_parameter((width, rank), dtype, device, True)  # [d, rank]

    @torch.no_grad()
    def start(self, generator: torch.Generator | None) -> None:
        """The identity: down ~ N(0, 1 / d), up = 0."""
        fill_normal(self.down, self.down.shape[1] ** -0.5, generator)
        self.up.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """[..., d] -> [..., d]."""
        return x + F.linear(F.linear(x, self.down), self.up)


class StreamSet(nn.Module):
    """All parameters that a trained set adds to the base model, whose linear layers have ``shapes`` (`linear_shapes`).
    NaN until loaded or made by `fresh`."""

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
        embedded = c.gamma and c.value_rotation is None
        self.embeddings = nan_parameter((c.gamma, d), dtype, device, True) if embedded else None  # P [gamma, d]
        self.start_map = LowRankMap(c.start_rank, d, dtype, device) if c.gamma and c.start_rank else None
        self.prune_map = LowRankMap(c.prune_rank, d, dtype, device) if c.gamma and c.prune_rank else None
        self.exits = nn.ModuleDict({str(layer): LowRankMap(c.prune_rank, d, dtype, device) for layer in c.exits})
        self.adapters = LowRank(c.adapter, shapes, dtype=dtype, device=device) if c.adapter else None

    @staticmethod
    @torch.no_grad()
    def fresh(config: StreamConfig, shapes: Shapes, generator: torch.Generator | None = None) -> StreamSet:
        """A set to be trained, in float32: maps and adapters change nothing yet, P ~ N(0, 0.02^2)."""
        made = StreamSet(config, shapes)
        if made.embeddings is not None:
            fill_normal(made.embeddings, EMBEDDING_DEVIATION, generator)
        for part in (made.start_map, made.prune_map, *made.exits.values()):
            if isinstance(part, LowRankMap):
                part.start(generator)
        if made.adapters is not None:
            made.adapters.start(generator)
        return made

    def begin(self, hidden: Tensor, gamma: int | None = None) -> Tensor:
        """The streams of main rows, just before layer N - Ns: f(M_t) + P_j; with value rotation every stream starts as
        f(M_t) alone.

        Args:
            hidden: [..., d], M after layer N - Ns - 1.
            gamma: the first so many streams; None: all.

        Returns:
            [..., gamma, d].

        Source: eq. 4; appendix E.4.
        """
        count = self.config.gamma if gamma is None else gamma
        first = hidden if self.start_map is None else self.start_map(hidden)
        if self.embeddings is None:
            return first[..., None, :].expand(*first.shape[:-1], count, first.shape[-1])
        return first[..., None, :] + self.embeddings[:count]

    def exit_maps(self) -> dict[int, LowRankMap]:
        """The early exits by the layer before which they lie."""
        found = {} if self.prune_map is None else {self.config.insertion: self.prune_map}
        for layer, part in self.exits.items():
            assert isinstance(part, LowRankMap)
            found[int(layer)] = part
        return found

    def tensors(self) -> dict[str, Tensor]:
        """Parameters under their names in the file."""
        found: dict[str, Tensor] = {}
        if self.embeddings is not None:
            found["embeddings"] = self.embeddings
        exits = ((f"exits.{layer}", part) for layer, part in self.exits.items())
        for name, part in (("start", self.start_map), ("prune", self.prune_map), *exits):
            if isinstance(part, LowRankMap):
                found[f"{name}.down"], found[f"{name}.up"] = part.down, part.up
        if self.adapters is not None:
            found |= {f"adapters.{name}": value for name, value in self.adapters.tensors().items()}
        return found

    def parameters_by_part(self) -> dict[str, int]:
        """Number of parameters of each part: embeddings gamma*d, prune and every further exit 2*r*d, start 2*eta*d,
        adapters."""
        counts = {"embeddings": 0, "start": 0, "prune": 0, "exits": 0, "adapters": 0}
        for name, value in self.tensors().items():
            counts[name.partition(".")[0]] += value.numel()
        return counts

    def save(self, folder: str | Path, dtype: torch.dtype | None = None) -> None:
        """Write `CONFIG_FILE` and `WEIGHTS_FILE` into a folder, which is made where it is missing; ``dtype`` None: the
        parameters' own.

        Raises:
            ConfigError: a parameter that holds NaN.
        """
        FILES.write(self.tensors(), asdict(self.config), Path(folder), dtype)

    @staticmethod
    def load(folder: str | Path, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> StreamSet:
        """A trained set from a folder that `save` wrote; ``dtype`` None: as stored.

        Raises:
            ConfigError: files or tensors that are missing, broken, misshaped or left over.
        """
        place = Path(folder)
        config, values = read_config(place), FILES.tensors(place)
        kind = dtype or next((v.dtype for v in values.values()), torch.float32)
        made = StreamSet(config, _shapes(values), dtype=kind, device="meta")
        return FILES.fill(made, values, place / WEIGHTS_FILE, device)

    def first(self, gamma: int) -> StreamSet:
        """The same set with its first ``gamma`` streams alone; the other parts are shared with this one."""
        made = object.__new__(StreamSet)
        nn.Module.__init__(made)
        made.config = replace(self.config, gamma=gamma)
        made.start_map, made.prune_map, made.adapters = self.start_map, self.prune_map, self.adapters
        made.exits = self.exits
        made.embeddings = None if self.embeddings is None else nn.Parameter(self.embeddings.data[:gamma])
        return made


FILES = TrainedFiles(
    "a stream set", CONFIG_FILE, WEIGHTS_FILE, "restore the file, or train the set again", tensors_of=StreamSet.tensors
)


def read_config(folder: str | Path) -> StreamConfig:
    """The configuration of a trained set.

    Raises:
        ConfigError: no such folder, or a file that is missing or broken.
    """
    return FILES.config(StreamConfig, Path(folder), {"adapter": _adapter, "exits": _as_tuple})


def _adapter(values: Any) -> AdapterConfig | None:
    if values is None:
        return None
    made = AdapterConfig(**{name: _as_tuple(value) for name, value in values.items()})
    check(made, "adapters with ")
    return made


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def check_exit(asked: str, streams: StreamSet, layer: int | None) -> None:
    """Refuse to prune before ``layer``, or where streams begin (None), if a set has no early exit there.

    Raises:
        CapabilityError: there is none.
    """
    exits = streams.exit_maps()
    if (streams.config.insertion if layer is None else layer) in exits:
        return
    where = "" if layer is None else f" before layer {layer}"
    known = f", but before {', '.join(map(str, sorted(exits)))}" if exits else ": it was trained with prune_rank=0"
    raise CapabilityError(
        asked,
        f"the set has no early exit{where}{known}",
        "give prune_exit=head for an untrained one, leave pruning out, or train the set with prune_rank=8 and exits",
    )


def _shapes(values: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of each linear, from its first pair in the file."""
    found: dict[str, tuple[int, int]] = {}
    for name, down in values.items():
        parts = name.split(".")
        up = values.get(f"{name.removesuffix('down')}up")
        paired = up is not None and up.dim() == down.dim() == 2
        if len(parts) == 4 and parts[0] == "adapters" and parts[3] == "down" and up is not None and paired:
            found.setdefault(parts[2], (down.shape[-1], up.shape[0]))
    return found
