"""SPIRe's drafter: chains of a draft that reads the target's activations, in constant memory a text.

Rows see a target activation of a verified token, of the root and of drafted tokens the draft's own memory. The
root is verified but has no activation yet. When a pass has verified tokens, their memory is written again from what the
pass showed; that costs the K and V projections alone.

Source: SPIRe, sections 3.1 and 3.3.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from ...core.errors import CapabilityError
from ...core.inference import inference
from ...core.tree import TokenTree
from ...draft.base import DrafterSpec, DraftRequest
from ...draft.fit import TrainedDrafterConfig, check_rotary
from ...draft.growth import Grower, Growth, compiles
from ...draft.network_sessions import ObservingDrafter
from ...draft.registry import DrafterContext, option, proposes_option
from ...kernels.drafts import RingChain
from ...kernels.layers import unsupported
from ...kv.ring import RingCache
from ...kv.views import SinkWindow
from ...model.attention import make_backend
from ...model.decoder import Decoder
from ...model.hot import load_hot
from ...weights.loader import load_weights
from ...weights.source import read_config
from .model import SpireShape, read_memory, read_shape
from .network import SpireNetwork
from .sessions import SpireSessions

if TYPE_CHECKING:
    from ...model.decoder import TargetInfo


@dataclass(frozen=True, kw_only=True)
class SpireConfig(TrainedDrafterConfig):
    """SPIRe: a draft of the target's last layers with feedback memory, in constant K/V memory a text."""

    kind: ClassVar[str] = "spire"

    depth: int | None = option(
        None, help="tokens of a draft; default: as many as it was trained for", minimum=1, maximum=64
    )
    proposes: Literal["point", "coupled", "sampled"] = proposes_option(sampled=True)

    def build(self, context: DrafterContext) -> SpireDrafter:
        """Read what the draft is; its weights come in `bind`.

        Raises:
            ConfigError: a folder that holds none.
            CapabilityError: it was trained for another target.
        """
        folder = self.folder(context)
        shape = read_shape(folder)
        self.check_weights(shape, context)
        layers = None if context.target_folder is None else read_config(context.target_folder).num_layers
        return SpireDrafter(self, shape, folder, layers)


class SpireDrafter(ObservingDrafter):
    """Drafts chains with a trained draft.

    Args:
        config: how long drafts are, and how they are drawn.
        shape: what the draft is.
        source: the folder of its weights; or the network itself, not yet finished, and its memory's weights.
        num_layers: of the target; None: not known.

    Raises:
        CapabilityError: a target that is not known, or too small for the draft.
    """

    network: SpireNetwork  # the draft; `bind` sets it and what follows
    ring: RingCache  # its K/V
    body: SpireSessions
    _bound: tuple[TargetInfo, int, torch.device]  # target, sequences, device

    def __init__(
        self,
        config: SpireConfig,
        shape: SpireShape,
        source: Path | tuple[Decoder, Tensor],
        num_layers: int | None = None,
    ) -> None:
        self.config, self.shape = config, shape
        if num_layers is None or num_layers <= shape.layers:
            wrong = f"it reads activations below the target's last {shape.layers} layers, and the target "
            wrong += "is not known when it is built" if num_layers is None else f"has {num_layers}"
            raise CapabilityError(config.label, wrong, "build it for the target that it was trained for")
        self.depth = config.depth or shape.depth
        self._taps = shape.taps(num_layers)
        self.spec = DrafterSpec(
            name=config.kind,
            taps=tuple(sorted({*self._taps})),
            past=shape.window,
            network=True,
            proposes=config.proposes,
            default_budget=self.depth,
            ahead=config.proposes != "sampled",
            ahead_levels=self.depth,
        )
        self._grower = Grower((1,) * self.depth, proposes=config.proposes)
        self._source = source

    # -- the contract

    def bind(self, target: TargetInfo, max_sequences: int, pool_tokens: int, device: torch.device) -> None:
        """Check the target, load the draft, and allocate its rings.

        Raises:
            CapabilityError: layers with sliding windows or rotations of their own, or a draft of another target.
        """
        check_rotary(self.config.label, target.decoder.config, target.name, "use draft_model or ngram for this target")
        decoder, memory = self._load(target, device)
        c = decoder.config
        self.config.check_shape(c, self.shape.target, target)
        self.network = SpireNetwork(decoder, memory)
        decoder.cut(load_hot(self._source, c.vocab_size) if isinstance(self._source, Path) else None)
        self._bound = target, max_sequences, device
        self.sessions(self.depth)

    def _load(self, target: TargetInfo, device: torch.device) -> tuple[Decoder, Tensor]:
        """Return the network, and its memory's weights."""
        if not isinstance(self._source, Path):
            return self._source
        config = read_config(self._source)
        native = target.decoder.stack is not None and unsupported(config, target.dtype, device) is None
        attention = make_backend(target.dtype)
        decoder = Decoder(config, attention, dtype=target.dtype, device=device, native=native, ends_of=target.handle)
        load_weights(decoder, self._source, layers_only=True)
        return decoder, read_memory(self.shape, self._source)

    def sessions(self, rows: int) -> SpireSessions:
        target, sequences, device = self._bound
        view, shape = SinkWindow(self.shape.sinks, self.shape.window), self.network.decoder.cache_shape
        more = -(-(rows + 1) // (view.sinks + view.window + self.depth))
        self.ring = RingCache(shape, view, self.depth, sequences * (1 + more), target.dtype, device)
        coupled = self.config.proposes == "coupled"
        self.body = SpireSessions(self.network, self.ring, more, target, self._taps, coupled)
        return self.body

    @inference
    def draft(self, want: DraftRequest) -> list[TokenTree]:
        """One chain a sequence, a token a pass, all sequences together."""
        growths = [Growth(*row) for row in want.rows()]
        last = self.network.decoder.config.max_position
        for growth in growths:
            room = last - len(growth.sequence.tokens)
            growth.max_depth = min(growth.max_depth, growth.budget, self.depth, room)
        able = [g for g in growths if g.max_depth > 0 and self.body.ready(g.sequence)]
        grower = self._grower.bounded(want.log_floor)
        if able and self.network.compiled and compiles(able, self.config.proposes):
            want.passes = self._grow_compiled(able, grower.floor)
        else:
            want.passes = grower.grow(able, self.body.logits_after)
        return [g.tree for g in growths]

    # -- its parts

    def _grow_compiled(self, growths: abc.Sequence[Growth], floor: float) -> int:
        """Grow all chains in one compiled call."""
        chains = []
        for growth in growths:
            tokens, text = growth.sequence.tokens, self.body.follow(growth.sequence)
            chains.append(RingChain(tokens[-1], len(tokens) - 1, growth.max_depth, text.ring, text.start, growth.rules))
        chains_out = self.network.roll(chains, self.ring, floor)
        for growth, drafted in zip(growths, chains_out, strict=True):
            growth.follow(drafted)
        return max(map(len, chains_out))
