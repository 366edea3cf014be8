"""The serial round: draft, verify, repeat.

propose -> one target pass over pending rows and tree nodes -> decide -> emit -> keep K/V -> observe
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import ClassVar

from ..core.inference import inference
from ..drafters.base import Drafter, DrafterSpec, DraftRule
from ..kv.pool import KVPool
from ..network.base import Taps
from ..network.decoder import Decoder
from .base import Round, RoundConfig, RoundParts, StepResult, Work
from .compiled import decide_compiled
from .drafting import GuardedDrafter, GuardedRound
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
        return SerialRound(parts.target, parts.pool, parts.drafter, parts.verifier)


class SerialRound(GuardedRound):
    """Draft, verify, repeat: the schedule of classical speculative decoding.

    Args:
        target: the model that verifies.
        pool: its K/V.
        drafter: the drafter; None: plain decoding.
        verifier: name of the verifier.

    Raises:
        ConfigError: a verifier that does not fit the drafter.
    """

    name = "serial"

    def __init__(self, target: Decoder, pool: KVPool, drafter: Drafter | None, verifier: str) -> None:
        self.target, self.pool, self.drafter = target, pool, drafter
        self.guard = GuardedDrafter(drafter, verifier, target.config.vocab_size)
        self.emitter = Emitter(target.num_layers, drafter.spec if drafter else None)
        # Whether a pass may be one compiled call: its verdict is the default one.
        self.compiled = self.guard.verifier.verify is None

    @inference
    def step(self, works: Sequence[Work], rule: DraftRule | None = None) -> StepResult:
        """One round: at most one proposal and exactly one target pass."""
        began = perf_counter()
        drafting = [w for w in works if w.budget > 0 and w.generates]
        tree = self.guard.propose(drafting, rule)
        drafted = perf_counter()
        p = lay_out(works, drafting, tree)
        tapped = self.guard.tapped(p)
        if not self.compiled or decide_compiled(p, self.target, self.pool, tapped) is None:
            self._decide(p, tapped)
        checked = perf_counter()
        self.emitter.emit(p)
        emitted = perf_counter()
        shown = show(p, tapped) if tapped is not None else None
        taken = perf_counter()
        keep(p, self.pool)
        kept = perf_counter()
        self.guard.observe(p, shown)
        ended = perf_counter()
        asked, taps_ms = (drafted - began) * 1e3, 0.0 if tapped is None else tapped.ms
        draft = asked + taps_ms + (taken - emitted + ended - kept) * 1e3
        verify = (checked - drafted) * 1e3 - taps_ms
        return p.result(draft, verify, (ended - began) * 1e3 - draft - verify, asked)

    def _decide(self, p: Pass, tapped: Tapped | None) -> None:
        """The pass and the verdict, part by part."""
        batch, verify = packed(p, self.target), self.guard.verifier.verify
        taps = None if tapped is None else Taps(tapped.layers)
        with whole_run(p, self.target, batch, self.pool, verify):
            embed(p, self.target, batch)
            self.target.run_layers(p.state, 0, self.target.num_layers, self.pool, taps)
            chosen = read_logits(p, self.target, verify)
        if tapped is not None and taps is not None:
            tapped.source = taps.hidden
        decide(p, verify, chosen)
