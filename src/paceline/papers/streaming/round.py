"""The fused round: the plain round, whose passes verify the last draft and make the next by streams.

Trees may be pruned and streams begin between two layers, and what the streams of the last accepted node predict is read
after the pass, for the drafter to observe.

Source: Speculative Streaming, sections 2.1 to 2.3 and appendix G.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import ClassVar

from ...core.errors import CapabilityError
from ...draft.base import DrafterSpec, LevelScores
from ...engine.base import Round, RoundConfig, RoundParts
from ...engine.compiled import PassHook
from ...engine.draft_verify import DraftVerifyRound
from ...engine.passes import Pass
from ...kernels.calls import NativeTaps, TokenPass
from ...kernels.layers import Stack
from ...kv.pool import KVPool
from ...model.applications import Application
from .compiled import stream_run
from .drafter import StreamsDrafter
from .model import check_exit
from .native import StreamRun, StreamTokens, decide_streams
from .pass_rows import StreamAnchors, StreamInsertion, choose_carriers
from .pruning import prune
from .reading import count_carrier, count_streams, read_streams


@dataclass(frozen=True, kw_only=True)
class FusedConfig(RoundConfig):
    """One pass of the target verifies the last draft and makes the next, with streams."""

    kind: ClassVar[str] = "fused"

    def refusal(self, spec: DrafterSpec | None) -> tuple[str, str] | None:
        if spec is not None and spec.in_pass:
            return None
        return "it drafts with streams, and this one has none", "use drafter='streams:FOLDER', or round='serial'"

    def build(self, parts: RoundParts) -> Round:
        return FusedRound(parts)


class FusedRound(DraftVerifyRound):
    """The plain round with the hooks of streams.

    Args:
        parts: of the round, with a pool that has scratch slots for the streams of the widest pass.

    Raises:
        CapabilityError: pruning with a drafter that reads states of low layers.
    """

    def __init__(self, parts: RoundParts) -> None:
        super().__init__(FusedConfig.kind, parts)
        assert self.drafter is not None, "see `FusedConfig.refusal`"
        drafters = [part for part in (self.drafter, *self.drafter.parts) if isinstance(part, StreamsDrafter)]
        self.streams, self.rules = drafters[0], drafters[0].config
        self.admits = self._admit
        low = [tap for tap in self.drafter.spec.taps if tap not in (-1, self.target.num_layers - 1)]
        if low and self.rules.prunes:
            raise CapabilityError(
                f"pruning with drafter {self.drafter.spec.name!r}",
                f"it reads states after layer {low[0]}, where rows are that pruning drops later",
                "leave out prune_threshold and prune_count, or the part that reads these states",
            )

    def _admit(self, application: Application) -> None:
        """Check an application's streams against the rules of the drafter."""
        streams = application.beside
        gamma, trained = self.rules.gamma, streams.config.gamma
        if gamma is not None and trained < gamma:
            raise CapabilityError(
                f"gamma={gamma} with the streams of an application",
                f"it is more than the {trained} streams that were trained",
                f"leave gamma out, give {trained} or less, or train the application with gamma={gamma}",
            )
        if self.rules.prunes:
            check_exit("pruning with the streams of an application", streams)

    def hook(self, p: Pass) -> PassHook:
        """Return the streams of a pass."""
        carriers = choose_carriers(p, self.streams.stream_set if self.failure is None else None)
        # In batches there are neither trees nor pruning (appendix L).
        prunes = self.rules.prunes and 0 < sum(s.nodes > 1 for s in p.spans) < self.rules.best_path_batch
        return StreamHook(self, p, carriers, prunes)


class StreamHook(PassHook):
    """The streams of one pass."""

    def __init__(self, round_: FusedRound, p: Pass, carriers: list[StreamAnchors], prunes: bool) -> None:
        self.rules, self.target, self.pool = round_.rules, round_.target, round_.pool
        self.p, self.carriers, self.drops = p, carriers, prunes
        # One compiled call takes streams of one lossless set, and of sequences without rules other than temperature
        # and truncations.
        samplers = [p.works[c.work].sequence.sampler for c in carriers]
        alike = all(c.streams is carriers[0].streams and not c.shared for c in carriers)
        self.compiles = not prunes and alike and all(s.plain or s.draws for s in samplers)
        self.layers = sorted({c.insertion for c in carriers})
        self._insertion: StreamInsertion | None = None
        self._run: StreamRun | None = None  # of a compiled pass
        self._answers: Sequence[StreamTokens | None] = ()  # of each carrier, in a compiled pass

    # -- a compiled pass

    def prepare(self, stack: Stack, pool: KVPool) -> None:
        """Choose the nodes that carry streams in the pass."""
        if self.carriers:
            form = self.rules.at == "nodes", self.rules.k, self.rules.proposes == "coupled"
            self._run = stream_run(self.p, self.carriers, *form, pool, self.target)
            self.rows = self._run.rows

    def decide(self, stack: Stack, token_pass: TokenPass, pool: KVPool, taps: NativeTaps | None) -> list[int]:
        """Return the choices of the pass; predictions of its streams are kept for `after`."""
        if self._run is None:
            return super().decide(stack, token_pass, pool, taps)
        chosen, self._answers, self.late_ms = decide_streams(stack, token_pass, self._run, pool, taps)
        return chosen

    # -- a pass in parts

    def before(self, layer: int) -> None:
        """Prune the trees of some sequences, then add their streams' rows, or keep their starting states."""
        if self._insertion is None:
            self._insertion = StreamInsertion(self.p, self.target, self.pool)
        insertion, begun = self._insertion, [c for c in self.carriers if c.insertion == layer]
        limits = self.rules.prune_threshold, self.rules.prune_count
        pruned = self.drops and prune(self.p, begun, insertion, self.target, *limits)
        now = [c for c in begun if c.shared or self.rules.at == "nodes"]
        if now:
            insertion.append(now)
        if now or pruned:
            insertion.plan()
        for c in begun:
            if c.segment is None:
                span = self.p.spans[c.work]
                c.hidden = self.p.state.hidden[span.root : span.stop]

    def after(self) -> list[LevelScores | None]:
        """Count the streams, and read those of each sequence's last accepted node."""
        if self._run is not None:
            answers: list[LevelScores | None] = [None] * len(self.p.works)
            for c, rows, answer in zip(self.carriers, self._run.carriers, self._answers, strict=True):
                in_pass = answer is not None and answer.rode
                streams = rows.streams * (len(rows.riders) + (answer is not None and not in_pass))
                count_carrier(self.p, c, streams, answer is not None, in_pass, self.target.num_layers)
                if answer is not None:
                    answers[c.work] = answer.tokens, answer.log_q
            return answers
        began = perf_counter()
        count_streams(self.p, self.carriers, self.target.num_layers)
        logits = read_streams(self.p, self.carriers, self.target, self.pool)
        self.late_ms = (perf_counter() - began) * 1e3
        return [*logits]
