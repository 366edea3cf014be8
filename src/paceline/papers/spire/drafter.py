"""SPIRe's drafter: chains of a draft that reads the target's activations, in constant memory a text.

What rows see of a verified token is a target activation, of the root and of drafted tokens the draft's own memory. The
root is verified but has no activation yet. When a pass has verified tokens, their memory is written anew from what the
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
from ...core.sequence import Sequence
from ...draft.base import Drafter, DrafterSpec, DraftRequest, StepFeatures
from ...draft.fit import TrainedDrafterConfig, check_rotary
from ...draft.growth import Grower, Growth, compiles
from ...draft.proposal import Proposal
from ...draft.registry import DrafterContext, option, proposes_option
from ...draft.resampling import REFUSED
from ...kernels.drafts import RingChain
from ...kernels.layers import unsupported
from ...kv.pool import KVPool
from ...kv.ring import RingCache
from ...kv.views import SinkWindow
from ...model.applications import adapter_ranges
from ...model.attention import make_backend
from ...model.base import Taps
from ...model.decoder import Decoder
from ...model.hot import load_hot
from ...model.packing import RowPacker
from ...weights.loader import load_weights
from ...weights.source import read_config
from .model import SpireShape, read_memory, read_shape
from .network import SpireNetwork

if TYPE_CHECKING:
    from ...model.decoder import TargetInfo


@dataclass(frozen=True, kw_only=True)
class SpireConfig(TrainedDrafterConfig):
    """SPIRe: a draft of the target's last layers with feedback memory, in constant K/V memory a text."""

    kind: ClassVar[str] = "spire"
    refuses = REFUSED

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


@dataclass(slots=True)
class _RingText:
    """What is held of a running sequence: memory of positions ``start`` .. ``seen`` - 1 and of ``sunk`` sinks."""

    ring: int
    start: int
    seen: int
    sunk: int = 0


class SpireDrafter(Drafter):
    """Drafts chains with a trained draft.

    Args:
        config: how long drafts are, and how they are drawn.
        shape: what the draft is.
        source: the folder of its weights; or the network itself, not yet finished, and its memory's weights.
        num_layers: of the target; None: not known.

    Raises:
        CapabilityError: a target that is not known, or too small for the draft.
    """

    trusted = True
    network: SpireNetwork  # the draft; `bind` sets it and what follows
    ring: RingCache  # its K/V
    _target: Decoder
    _scratch: KVPool  # the target's K/V of a text's sinks, while they are computed

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
            raise CapabilityError(config.asked, wrong, "build it for the target that it was trained for")
        self.depth = config.depth or shape.depth
        self._taps = shape.taps(num_layers)
        self.spec = DrafterSpec(
            name=config.kind,
            taps=tuple(sorted({*self._taps})),
            past=shape.window,
            network=True,
            proposes=config.proposes,
            default_budget=self.depth,
            observes=True,
        )
        self._grower = Grower((1,) * self.depth, proposes=config.proposes)
        self._source = source
        self._texts: dict[int, _RingText] = {}

    # -- the contract

    def bind(self, target: TargetInfo, max_sequences: int, pool_tokens: int, device: torch.device) -> None:
        """Check the target, load the draft, and allocate its rings.

        Raises:
            CapabilityError: layers with sliding windows or rotations of their own, or a draft of another target.
        """
        check_rotary(self.config.asked, target.decoder.config, target.name, "use draft_model or ngram for this target")
        self._target = target.decoder
        decoder, memory = self._load(target, device)
        c = decoder.config
        self.config.check_shape(c, self.shape.target, target)
        self.network = SpireNetwork(decoder, memory)
        decoder.cut(load_hot(self._source, c.vocab_size) if isinstance(self._source, Path) else None)
        view = SinkWindow(self.shape.sinks, self.shape.window)
        self.ring = RingCache(decoder.cache_shape, view, self.depth, max_sequences, target.dtype, device)
        if self.shape.sinks:
            self._scratch = KVPool(*self._target.cache_shape, self.shape.sinks, target.dtype, device)

    def _load(self, target: TargetInfo, device: torch.device) -> tuple[Decoder, Tensor]:
        """The network, and its memory's weights."""
        if not isinstance(self._source, Path):
            return self._source
        config = read_config(self._source)
        native = target.decoder.stack is not None and unsupported(config, target.dtype, device) is None
        attention = make_backend(target.dtype)
        decoder = Decoder(config, attention, dtype=target.dtype, device=device, native=native, lender=target.handle)
        load_weights(decoder, self._source, layers_only=True)
        return decoder, read_memory(self.shape, self._source)

    def release(self, keys: abc.Sequence[int]) -> None:
        """Give the rings of ended or preempted sequences back."""
        for key in keys:
            text = self._texts.pop(key, None)
            if text is not None:
                self.ring.close(text.ring)

    @inference
    def observe(self, step: StepFeatures) -> None:
        """Write the memory of verified tokens from the target's activations."""
        if not step.hidden:
            return
        rows: list[int] = []
        places: list[int] = []
        slots: list[int] = []
        for view, taken, first in zip(step.sequences, step.hidden_rows, step.first, strict=True):
            stop = first + taken.stop - taken.start
            kept = self._note(view.key, first, stop)
            rows += [taken.start + position - first for position in kept]
            places += kept
            slots += self.ring.slots(self._texts[view.key].ring, kept) if kept else []
        if rows:
            self.network.write(self.ring, [step.hidden[tap] for tap in self._taps], rows, places, slots)

    @inference
    def draft(self, want: DraftRequest) -> list[Proposal]:
        """One chain a sequence, a token a pass, all sequences together."""
        growths = [Growth(*row) for row in want.rows()]
        last = self.network.decoder.config.max_position
        for growth in growths:
            room = last - len(growth.sequence.tokens)
            growth.max_depth = min(growth.max_depth, growth.budget, self.depth, room)
        able = [g for g in growths if g.max_depth > 0 and self._ready(g.sequence)]
        grower = self._grower.bounded(want.log_floor)
        if able and self.network.compiled and compiles(able, self.config.proposes):
            want.passes = self._grow_compiled(able, grower.floor)
        else:
            want.passes = self._grow(able, grower)
        return [g.draft for g in growths]

    # -- its parts

    def _note(self, key: int, first: int, stop: int) -> list[int]:
        """Positions first .. stop - 1 of a text are verified: those of them whose memory is kept."""
        if stop <= first:
            return []
        sinks, window = self.shape.sinks, self.shape.window
        begin = max(first, stop - window)
        text = self._texts.get(key)
        if text is None:
            text = self._texts[key] = _RingText(self.ring.open(), begin, first)
        if text.seen != first:  # a gap
            text.start, text.sunk = begin, 0
        if begin > first:  # what lies before the window is not written
            text.start = begin
        if first <= text.sunk < sinks:
            text.sunk = min(sinks, stop)
        text.seen = stop
        return [*range(first, min(sinks, stop)), *range(max(begin, sinks), stop)]

    def _ready(self, view: Sequence) -> bool:
        """Whether a draft can start: memory of all that the root sees is there, or made now."""
        root = len(view.tokens) - 1
        if root < 1:
            return False  # nothing is earlier than the root
        text = self._texts.get(view.key)
        if text is None or text.seen != root:
            return False
        wanted = min(self.shape.sinks, root)
        if text.sunk < wanted:
            self._compute_sinks(view, text, wanted)
        return True

    def _compute_sinks(self, view: Sequence, text: _RingText, count: int) -> None:
        """Memory of a text's first tokens, which no pass has shown: the target runs once more over these alone, whose
        activations depend on nothing behind them."""
        target, pool = self._target, self._scratch
        packer, places = RowPacker(target, target.device), [*range(count)]
        packer.add(view.tokens[:count], places, slice(0, count), slice(0, count), count, 0)
        state, taps = target.embed(packer.batch()), Taps(self.spec.taps)
        state.adapters = adapter_ranges([view.application], [(0, count)])
        target.run_layers(state, 0, target.num_layers, pool, taps)
        slots = self.ring.slots(text.ring, places)
        self.network.write(self.ring, [taps.hidden[tap] for tap in self._taps], places, places, slots)
        text.sunk = count

    def _grow_compiled(self, growths: abc.Sequence[Growth], floor: float) -> int:
        """The same as `_grow`, in one compiled call."""
        chains = []
        for growth in growths:
            tokens, text = growth.sequence.tokens, self._texts[growth.sequence.key]
            chains.append(RingChain(tokens[-1], len(tokens) - 1, growth.max_depth, text.ring, text.start, growth.rules))
        found = self.network.roll(chains, self.ring, floor)
        for growth, drafted in zip(growths, found, strict=True):
            growth.follow(drafted)
        return max(map(len, found))

    def _grow(self, growths: abc.Sequence[Growth], grower: Grower) -> int:
        """Grow all chains, a pass a level; returns the passes that it took."""
        level = 0
        while growths:
            logits, memory = self._forward(growths)
            grower.expand(growths, logits, level)
            level += 1
            alive = [row for row, growth in enumerate(growths) if growth.frontier]
            growths = [growths[row] for row in alive]
            if alive:
                self._write_memory(growths, memory, alive, level - 1)
        return level

    def _forward(self, growths: abc.Sequence[Growth]) -> tuple[Tensor, Tensor]:
        """Logits after the last node of each, and its memory [layers, growths, d_model]."""
        packer = RowPacker(self.network.decoder, self.network.decoder.device)
        for growth in growths:
            text, (node,) = self._texts[growth.sequence.key], growth.frontier
            position = len(growth.sequence.tokens) - 1 + node  # of a chain a node is its depth, too
            token = growth.token(node)
            slots = self.ring.slots(text.ring, self._seen(text, position))
            own = [self.ring.unseen(text.ring)]
            where, keys = (torch.tensor(x, device=self.network.decoder.device) for x in (own, slots))
            packer.add([token], [position], where, keys, len(slots), len(slots))
        return self.network.run(packer, self.ring)

    def _seen(self, text: _RingText, position: int) -> list[int]:
        """Return the positions whose memory a row sees: sinks, and a window of strictly earlier tokens."""
        sinks = min(self.shape.sinks, position)
        return [*range(sinks), *range(max(sinks, text.start, position - self.shape.window), position)]

    def _write_memory(self, growths: abc.Sequence[Growth], memory: Tensor, rows: abc.Sequence[int], level: int) -> None:
        """The memory of some rows of a level [layers, n, d_model], for the rows below them."""
        places = [len(growth.sequence.tokens) - 1 + level for growth in growths]
        rings = [self._texts[growth.sequence.key].ring for growth in growths]
        slots = [self.ring.slot(ring, place) for ring, place in zip(rings, places, strict=True)]
        self.network.write(self.ring, [*memory], rows, places, slots)
