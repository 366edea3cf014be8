"""The fused round: one pass of the target verifies the last draft and makes the next.

propose -> embed -> layers 0 .. N - Ns - 1 -> prune the trees -> insert streams -> layers N - Ns .. N - 1
-> decide -> emit -> keep K/V -> read the streams of the last accepted node -> observe

Source: Speculative Streaming, sections 2.1 to 2.3 and appendix G.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import ClassVar

from ..core.errors import CapabilityError
from ..core.inference import inference
from ..drafters.base import Drafter, DrafterSpec, DraftRule
from ..kv.pool import KVPool
from ..network.base import Taps
from ..network.decoder import Decoder
from ..network.streams import StreamSet, check_exit
from .base import Round, RoundConfig, RoundParts, StepResult, Work
from .compiled_streams import StreamDrafts, count_stream_drafts, decide_streams_compiled
from .drafting import GuardedDrafter, GuardedRound
from .outcome import Emitter, keep
from .passes import Pass, decide, embed, lay_out, read_logits
from .pruning import prune
from .stream_reading import count_streams, read_streams
from .stream_rows import Carriers, StreamInsertion, choose_carriers
from .taps import Shown, Tapped, show


@dataclass(frozen=True, kw_only=True)
class FusedConfig(RoundConfig):
    """One pass of the target verifies the last draft and makes the next, with streams."""

    kind: ClassVar[str] = "fused"

    def refusal(self, spec: DrafterSpec | None) -> tuple[str, str] | None:
        if spec is not None and spec.streams is not None:
            return None
        return "it drafts with streams, and this one has none", "use drafter='streams:FOLDER', or round='serial'"

    def build(self, parts: RoundParts) -> Round:
        assert parts.drafter is not None
        return FusedRound(parts.target, parts.pool, parts.drafter, parts.verifier)


class FusedRound(GuardedRound):
    """Verification and drafting in one pass, by streams beside the target's rows.

    Args:
        target: the model that verifies.
        pool: its K/V, with scratch slots for the streams of the widest pass.
        drafter: one that drafts with streams.
        verifier: name of the verifier.

    Raises:
        ConfigError: a verifier that does not fit the drafter.
        CapabilityError: stream rules that these layers do not support.
    """

    name = "fused"

    def __init__(self, target: Decoder, pool: KVPool, drafter: Drafter, verifier: str) -> None:
        self.guard = GuardedDrafter(drafter, verifier, target.config.vocab_size)
        assert drafter.spec.streams is not None
        low = [tap for tap in drafter.spec.taps if tap not in (-1, target.num_layers - 1)]
        if low and drafter.spec.streams.prunes:
            raise CapabilityError(
                f"pruning with drafter {drafter.spec.name!r}",
                f"it reads states after layer {low[0]}, where rows are that pruning drops later",
                "leave out prune_threshold and prune_count, or the part that reads these states",
            )
        self.target, self.pool, self.rules = target, pool, drafter.spec.streams
        self.drafter = drafter
        self.emitter = Emitter(target.num_layers, drafter.spec)
        if target.stack is not None and self.rules.rotates:
            raise _needs_torch("streams that rotate values", "they rotate no values")
        # Whether a pass that prunes nothing may be one compiled call: the default verdict, no drafts that are drawn.
        self.compiled = self.guard.verifier.verify is None and self.rules.k > 0
        self._make_room(self.rules.gamma)

    def admit(self, streams: StreamSet) -> None:
        """Check that an application's set fits the drafter's rules.

        Raises:
            CapabilityError: it has fewer streams than are wanted, no early exit where trees are pruned, or rotates
                values in layers that cannot.
        """
        wanted, trained = self.rules.wanted, streams.config.gamma
        if wanted is not None and trained < wanted:
            raise CapabilityError(
                f"gamma={wanted} with the streams of an application",
                f"it is more than the {trained} streams that were trained",
                f"leave gamma out, give {trained} or less, or train the application with gamma={wanted}",
            )
        if self.rules.prunes and self.rules.prune_exit == "trained":
            check_exit("pruning with the streams of an application", streams, self.rules.prune_layer)
        if streams.config.value_rotation is not None and self.target.stack is not None:
            raise _needs_torch("a set that rotates values", "they rotate no values")
        self._make_room(trained)

    def _make_room(self, gamma: int) -> None:
        """Rows of the context's last positions carry streams, too: stream j of position t has position t + j."""
        self.target.expect(self.target.config.max_position - 1 + gamma)

    @inference
    def step(self, works: Sequence[Work], rule: DraftRule | None = None) -> StepResult:
        """One round: at most one proposal, one target pass, and the reading of the next draft's distributions."""
        began = perf_counter()
        drafting = [w for w in works if w.budget > 0 and w.generates]
        tree = self.guard.propose(drafting, rule)
        drafted = perf_counter()
        p = lay_out(works, drafting, tree)
        carriers = choose_carriers(p, self.drafter.stream_set if self.failure is None else None)
        said, tapped = self._decide(p, carriers)
        checked = perf_counter()
        self.emitter.emit(p)
        emitted = perf_counter()
        shown = None if tapped is None else show(p, tapped)
        taken = perf_counter()
        keep(p, self.pool)
        late, observing = self._read(p, carriers, said, shown)
        ended = perf_counter()
        taps = 0.0 if tapped is None else tapped.ms / 1e3
        asked = drafted - began + late
        draft = asked + taps + taken - emitted + observing
        verify = checked - drafted - taps - (said.late_ms / 1e3 if said else 0.0)
        return p.result(draft * 1e3, verify * 1e3, (ended - began - draft - verify) * 1e3, asked * 1e3)

    def _decide(self, p: Pass, carriers: list[Carriers]) -> tuple[StreamDrafts | None, Tapped | None]:
        """Pass and verdict; what the streams said, where that came with it, and the states that were taken."""
        prunes = self._prunes(p)
        if self.compiled and not prunes:
            tapped = self.guard.tapped(p)
            said = decide_streams_compiled(p, carriers, self.rules, self.target, self.pool, tapped)
            if said is not None:
                return said, tapped
        taps = Taps(self.guard.taps) if self.guard.taps else None
        self._run(p, carriers, prunes, taps)
        tapped = self.guard.tapped(p)  # of the rows that pruning left
        if tapped is not None and taps is not None:
            tapped.source = {name: states[: p.main_rows] for name, states in taps.hidden.items()}
        verify = self.guard.verifier.verify
        decide(p, verify, read_logits(p, self.target, verify))
        return None, tapped

    def _read(
        self, p: Pass, carriers: list[Carriers], said: StreamDrafts | None, shown: Shown | None
    ) -> tuple[float, float]:
        """Count the streams, and show the drafter what they say; returns the seconds that they took behind the pass,
        and those of showing."""
        began = perf_counter()
        if said is not None:
            count_stream_drafts(p, said, self.target.num_layers)
            self.guard.observe(p, shown, stream_levels=said.levels(len(p.works)))
            return said.late_ms / 1e3, perf_counter() - began
        count_streams(p, carriers, self.target.num_layers)
        stream_logits = read_streams(p, carriers, self.target, self.pool)
        read = perf_counter()
        self.guard.observe(p, shown, stream_logits)
        return read - began, perf_counter() - read

    def _prunes(self, p: Pass) -> bool:
        """Whether the trees of this pass are pruned: in batches there are neither trees nor pruning (appendix L)."""
        return self.rules.prunes and 0 < sum(s.nodes > 1 for s in p.spans) < self.rules.best_path_batch

    def _run(self, p: Pass, carriers: Sequence[Carriers], prunes: bool, taps: Taps | None) -> None:
        """All layers, with pruning and insertion where each set wants them."""
        embed(p, self.target)
        insertion = StreamInsertion(p, self.target, self.pool, self.rules)
        pruned_at = [self.rules.prunes_before(c.streams.config) if prunes else -1 for c in carriers]
        done = 0
        for layer in sorted({c.insertion for c in carriers} | {at for at in pruned_at if at >= 0}):
            self.target.run_layers(p.state, done, layer, self.pool, taps)
            done = layer
            cut = [c for c, at in zip(carriers, pruned_at, strict=True) if at == layer]
            self._insert(p, insertion, cut, [c for c in carriers if c.insertion == layer])
        self.target.run_layers(p.state, done, self.target.num_layers, self.pool, taps)

    def _insert(self, p: Pass, insertion: StreamInsertion, cut: Sequence[Carriers], begun: Sequence[Carriers]) -> None:
        """Prune the trees of some, then add the streams' rows of others, or keep what their streams will start from."""
        pruned = bool(cut) and prune(p, cut, insertion, self.target, self.rules)
        now = [c for c in begun if c.shared or self.rules.at == "nodes"]
        if now:
            insertion.append(now)
        if now or pruned:
            insertion.plan()
        for c in begun:
            if c.segment is None:
                span = p.spans[c.work]
                c.hidden = p.state.hidden[span.root : span.stop]


def _needs_torch(asked: str, why: str) -> CapabilityError:
    return CapabilityError(f"{asked} with the compiled layers", why, "use kernels='torch'")
