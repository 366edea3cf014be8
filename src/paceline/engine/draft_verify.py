"""Draft, verify, repeat; with streams the pass that verifies a draft makes the next one.

    propose -> one target pass over pending rows and tree nodes -> decide -> emit -> keep K/V -> observe

The pass is one compiled call where it can be, else it goes part by part. With streams beside the target's rows (the
fused round) trees may be pruned and streams begin between two layers, and what the streams of the last accepted node
say is read behind the pass, for the drafter to observe.

Source: Speculative Streaming, sections 2.1 to 2.3 and appendix G.1 (streams).
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import ClassVar

from torch import Tensor

from ..core.errors import CapabilityError
from ..core.inference import inference
from ..core.sequence import Sequence
from ..draft.base import DrafterSpec, DraftRule, Levels, StreamRules
from ..model.base import Taps
from ..papers.streaming.model import StreamSet, check_exit
from ..papers.streaming.pass_rows import Carriers, StreamInsertion, choose_carriers
from ..papers.streaming.pruning import prune
from ..papers.streaming.reading import count_streams, read_streams
from .base import Round, RoundConfig, RoundParts, StepResult, Work
from .compiled import StreamDrafts, count_stream_drafts, decide_compiled
from .drafting import GuardedDrafter
from .outcome import Emitter, keep
from .passes import Pass, decide, embed, lay_out, packed, read_logits, whole_run
from .taps import Tapped, show


@dataclass(frozen=True, kw_only=True)
class SerialConfig(RoundConfig):
    """Draft, verify, repeat."""

    kind: ClassVar[str] = "serial"

    def refusal(self, spec: DrafterSpec | None) -> tuple[str, str] | None:
        if spec is None or spec.streams is None:
            return None
        return "it drafts with streams beside the target's rows, and this round has none", "use round='fused'"

    def build(self, parts: RoundParts) -> Round:
        return DraftVerifyRound(self.kind, parts)


@dataclass(frozen=True, kw_only=True)
class FusedConfig(RoundConfig):
    """One pass of the target verifies the last draft and makes the next, with streams."""

    kind: ClassVar[str] = "fused"

    def refusal(self, spec: DrafterSpec | None) -> tuple[str, str] | None:
        if spec is not None and spec.streams is not None:
            return None
        return "it drafts with streams, and this one has none", "use drafter='streams:FOLDER', or round='serial'"

    def build(self, parts: RoundParts) -> Round:
        return DraftVerifyRound(self.kind, parts)


class DraftVerifyRound:
    """At most one proposal and exactly one target pass a step: the schedule of classical speculative decoding.

    Args:
        name: serial; or fused, where the drafter drafts with streams.
        parts: target, drafter (none: plain decoding), verifier, and a pool with scratch slots for the streams of the
            widest pass.

    Raises:
        ConfigError: a verifier that does not fit the drafter.
        CapabilityError: stream rules that these layers do not support.
    """

    busy = False  # a pass ends in the step that began it

    def __init__(self, name: str, parts: RoundParts) -> None:
        self.name, self.target, self.pool, self.drafter = name, parts.target, parts.pool, parts.drafter
        self.guard = GuardedDrafter(parts.drafter, parts.verifier, parts.target.config.vocab_size)
        spec = None if parts.drafter is None else parts.drafter.spec
        self.emitter = Emitter(parts.target.num_layers, spec)
        self.rules = None if spec is None else spec.streams
        # Whether a pass that prunes nothing may be one compiled call: the default verdict, no streams that are drawn.
        self.compiled = self.guard.verifier.verify is None and (self.rules is None or self.rules.k > 0)
        self.admits: Callable[[StreamSet], None] | None = None
        if spec is not None and self.rules is not None:
            self._check(spec, self.rules)
            self._make_room(self.rules.gamma)
            self.admits = self._admit

    def _check(self, spec: DrafterSpec, rules: StreamRules) -> None:
        """Refuse streams that these layers, or the drafter's taps, do not go with."""
        low = [tap for tap in spec.taps if tap not in (-1, self.target.num_layers - 1)]
        if low and rules.prunes:
            raise CapabilityError(
                f"pruning with drafter {spec.name!r}",
                f"it reads states after layer {low[0]}, where rows are that pruning drops later",
                "leave out prune_threshold and prune_count, or the part that reads these states",
            )

    def _admit(self, streams: StreamSet) -> None:
        """See `Round.admits`."""
        assert self.rules is not None
        wanted, trained = self.rules.wanted, streams.config.gamma
        if wanted is not None and trained < wanted:
            raise CapabilityError(
                f"gamma={wanted} with the streams of an application",
                f"it is more than the {trained} streams that were trained",
                f"leave gamma out, give {trained} or less, or train the application with gamma={wanted}",
            )
        if self.rules.prunes:
            check_exit("pruning with the streams of an application", streams)
        self._make_room(trained)

    def _make_room(self, gamma: int) -> None:
        """Rows of the context's last positions carry streams, too: stream j of position t has position t + j."""
        self.target.expect(self.target.config.max_position - 1 + gamma)

    @property
    def sources(self) -> tuple[str, ...]:
        """See `Round.sources`."""
        return () if self.drafter is None else self.drafter.spec.choices

    @property
    def failure(self) -> str | None:
        """Why the drafter was disabled, if it failed."""
        return self.guard.failure

    @property
    def past(self) -> int | None:
        """Last tokens of a text that its drafter needs the states of."""
        return self.guard.past

    def release(self, sequences: abc.Sequence[Sequence]) -> None:
        """Let the drafter drop the state of ended or preempted sequences."""
        self.guard.release(sequences)

    def forget(self) -> None:
        """Let the drafter forget sequences that ended."""
        self.guard.forget()

    @inference
    def step(self, works: abc.Sequence[Work], rule: DraftRule | None = None) -> StepResult:
        """One round."""
        began = perf_counter()
        drafting = [w for w in works if w.budget > 0 and w.generates]
        tree = self.guard.propose(drafting, rule)
        drafted = perf_counter()
        p = lay_out(works, drafting, tree)
        carriers = self._carriers(p)
        said, tapped = self._decide(p, carriers)
        checked = perf_counter()
        self.emitter.emit(p)
        emitted = perf_counter()
        shown = None if tapped is None else show(p, tapped)
        taken = perf_counter()
        keep(p, self.pool)
        late, logits, levels = self._read(p, carriers, said)
        read = perf_counter()
        self.guard.observe(p, shown, logits, levels)
        ended = perf_counter()
        taps = 0.0 if tapped is None else tapped.ms / 1e3
        asked = drafted - began + late
        draft = asked + taps + taken - emitted + ended - read
        verify = checked - drafted - taps - (said.late_ms / 1e3 if said else 0.0)
        return p.result(draft * 1e3, verify * 1e3, (ended - began - draft - verify) * 1e3, asked * 1e3)

    def _carriers(self, p: Pass) -> list[Carriers]:
        """The rows that carry streams."""
        if self.rules is None or self.drafter is None:
            return []
        return choose_carriers(p, self.drafter.stream_set if self.failure is None else None)

    def _decide(self, p: Pass, carriers: list[Carriers]) -> tuple[StreamDrafts | None, Tapped | None]:
        """Pass and verdict; what the streams said, where that came with it, and the states that were taken."""
        prunes, tapped = self._prunes(p), self.guard.tapped(p)
        if self.compiled and not prunes:
            said = decide_compiled(p, carriers, self.rules, self.target, self.pool, tapped)
            if said is not None:
                return said, tapped
        taps = None if tapped is None else Taps(tapped.layers)
        batch, verify = packed(p, self.target), self.guard.verifier.verify
        whole = nullcontext() if self.rules else whole_run(p, self.target, batch, self.pool, verify)
        with whole:
            embed(p, self.target, batch)
            self._run(p, carriers, prunes, taps)
            chosen = read_logits(p, self.target, verify)
        if prunes:
            tapped = self.guard.tapped(p)  # of the rows that pruning left
        if tapped is not None and taps is not None:
            tapped.source = {name: states[: p.main_rows] for name, states in taps.hidden.items()}
        decide(p, verify, chosen)
        return None, tapped

    def _read(
        self, p: Pass, carriers: abc.Sequence[Carriers], said: StreamDrafts | None
    ) -> tuple[float, abc.Sequence[Tensor | None], abc.Sequence[Levels | None]]:
        """Count the streams; the seconds that they took behind the pass, and what they say: logits, or levels."""
        if self.rules is None:
            return 0.0, (), ()
        if said is not None:
            count_stream_drafts(p, said, self.target.num_layers)
            return said.late_ms / 1e3, (), said.levels(len(p.works))
        began = perf_counter()
        count_streams(p, carriers, self.target.num_layers)
        logits = read_streams(p, carriers, self.target, self.pool)
        return perf_counter() - began, logits, ()

    def _prunes(self, p: Pass) -> bool:
        """Whether the trees of this pass are pruned: in batches there are neither trees nor pruning (appendix L)."""
        rules = self.rules
        return rules is not None and rules.prunes and 0 < sum(s.nodes > 1 for s in p.spans) < rules.best_path_batch

    def _run(self, p: Pass, carriers: abc.Sequence[Carriers], prunes: bool, taps: Taps | None) -> None:
        """All layers, with pruning and insertion where each set wants them."""
        done = 0
        if self.rules is not None:
            insertion = StreamInsertion(p, self.target, self.pool, self.rules)
            for layer in sorted({c.insertion for c in carriers}):
                self.target.run_layers(p.state, done, layer, self.pool, taps)
                done = layer
                begun = [c for c in carriers if c.insertion == layer]
                self._insert(p, insertion, begun if prunes else (), begun)
        self.target.run_layers(p.state, done, self.target.num_layers, self.pool, taps)

    def _insert(
        self, p: Pass, insertion: StreamInsertion, cut: abc.Sequence[Carriers], begun: abc.Sequence[Carriers]
    ) -> None:
        """Prune the trees of some, then add the streams' rows of others, or keep what their streams will start from."""
        pruned = bool(cut) and prune(p, cut, insertion, self.target, insertion.rules)
        now = [c for c in begun if c.shared or insertion.rules.at == "nodes"]
        if now:
            insertion.append(now)
        if now or pruned:
            insertion.plan()
        for c in begun:
            if c.segment is None:
                span = p.spans[c.work]
                c.hidden = p.state.hidden[span.root : span.stop]
