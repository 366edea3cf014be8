"""Draft, verify, repeat.

    draft -> one target pass over pending rows and tree nodes -> decide -> emit -> keep K/V -> observe

The pass is one compiled call where it can be, else it goes part by part. A `PassHook` takes part in it: before a layer
it may add rows, drop rows and read states, and after the verdict it may read rows of the last accepted node.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import ClassVar

from ..core.inference import inference
from ..core.sequence import Sequence
from ..draft.base import DrafterSpec, DraftRule
from ..model.applications import Application
from ..model.base import Taps
from .base import Round, RoundConfig, RoundParts, StepResult, Work
from .compiled import NO_HOOK, PassHook, decide_compiled
from .drafting import GuardedDrafter
from .outcome import Emitter, keep
from .passes import Pass, decide, embed, lay_out, packed, read_logits, whole_run
from .taps import Tapped, show


@dataclass(frozen=True, kw_only=True)
class SerialConfig(RoundConfig):
    """Draft, verify, repeat."""

    kind: ClassVar[str] = "serial"

    def refusal(self, spec: DrafterSpec | None) -> tuple[str, str] | None:
        if spec is None or not spec.in_pass:
            return None
        return "it drafts with rows of its own in the target's pass, and this round has none", "use round='fused'"

    def build(self, parts: RoundParts) -> Round:
        return DraftVerifyRound(self.kind, parts)


class DraftVerifyRound:
    """At most one proposal and exactly one target pass a step: the schedule of classical speculative decoding.

    Args:
        name: of the round.
        parts: target, drafter (none: plain decoding), verifier, and a pool.

    Raises:
        ConfigError: a verifier that does not fit the drafter.
    """

    busy = False  # a pass ends in the step that began it
    admits: Callable[[Application], None] | None = None

    def __init__(self, name: str, parts: RoundParts) -> None:
        self.name, self.target, self.pool, self.drafter = name, parts.target, parts.pool, parts.drafter
        self.guard = GuardedDrafter(parts.drafter, parts.verifier, parts.target.config.vocab_size)
        self.emitter = Emitter(parts.target.num_layers, None if parts.drafter is None else parts.drafter.spec)
        self.compiled = self.guard.verifier.verify is None  # whether a pass may be one compiled call

    def hook(self, p: Pass) -> PassHook:
        """Return what takes part in a pass besides its rows."""
        return NO_HOOK

    @property
    def sources(self) -> tuple[str, ...]:
        """Implement `Round.sources`."""
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
        trees = self.guard.draft(drafting, rule)
        drafted = perf_counter()
        p = lay_out(works, drafting, trees)
        hook = self.hook(p)
        tapped = self._decide(p, hook)
        checked = perf_counter()
        taps = 0.0 if tapped is None else tapped.ms / 1e3
        verify = checked - drafted - taps - hook.late_ms / 1e3
        self.emitter.emit(p)
        emitted = perf_counter()
        seen = None if self.drafter is None else show(p, tapped)
        finished = perf_counter()
        keep(p, self.pool)
        levels = hook.after()
        if seen is not None:
            seen.levels = levels
        read = perf_counter()
        self.guard.observe(seen)
        ended = perf_counter()
        propose_s = drafted - began + hook.late_ms / 1e3
        draft = propose_s + taps + finished - emitted + ended - read
        return p.result(draft * 1e3, verify * 1e3, (ended - began - draft - verify) * 1e3, propose_s * 1e3)

    def _decide(self, p: Pass, hook: PassHook) -> Tapped | None:
        """Pass and verdict; the states that were taken."""
        tapped = self.guard.tapped(p)
        if self.compiled and hook.compiles and decide_compiled(p, self.target, self.pool, tapped, hook):
            return tapped
        taps = None if tapped is None else Taps(tapped.layers)
        batch, verify = packed(p, self.target), self.guard.verifier.verify
        with nullcontext() if hook.layers else whole_run(p, self.target, batch, self.pool, verify):
            embed(p, self.target, batch)
            done = 0
            for layer in hook.layers:
                self.target.run_layers(p.state, done, layer, self.pool, taps)
                done = layer
                hook.before(layer)
            self.target.run_layers(p.state, done, self.target.num_layers, self.pool, taps)
            chosen = read_logits(p, self.target, verify)
        if hook.drops:
            tapped = self.guard.tapped(p)  # of the rows that are left
        if tapped is not None and taps is not None:
            tapped.source = {name: states[: p.main_rows] for name, states in taps.hidden.items()}
        decide(p, verify, chosen)
        return tapped
