"""The serial round: draft, verify, repeat.

propose -> one target pass over pending rows and tree nodes -> decide -> emit -> keep K/V -> observe
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from ..core.inference import inference
from ..drafters.base import Drafter
from ..kv.pool import KVPool
from ..target.base import Taps
from ..target.decoder import Decoder
from .base import RunningSequence, StepResult, Work
from .compiled import decide_compiled
from .drafting import GuardedDrafter
from .outcome import Emitter, keep
from .passes import Pass, decide, lay_out, main_adapters, pack, read_logits
from .verification import DEFAULT_VERIFIER, match


class SerialRound:
    """Draft, verify, repeat: the schedule of classical speculative decoding.

    Args:
        target: the model that verifies.
        pool: its K/V.
        drafter: the drafter; None: plain decoding.
        verifier: name of the verifier.

    Raises:
        ConfigError: a drafter that does not run in this round, or a verifier that does not fit it.
    """

    name = "serial"

    def __init__(
        self, target: Decoder, pool: KVPool, drafter: Drafter | None, verifier: str = DEFAULT_VERIFIER
    ) -> None:
        self.target, self.pool, self.drafter = target, pool, drafter
        self.guard = GuardedDrafter(drafter, self.name, verifier, target.config.vocab_size)
        self.emitter = Emitter(target.num_layers, drafter.spec if drafter else None)
        self._taps = drafter.spec.taps if drafter else ()
        # Whether a pass may be one compiled call; it shows no states, and its verdict is the default one.
        self.compiled = self.guard.verifier.verify is match and not self._taps

    @property
    def failure(self) -> str | None:
        """Why the drafter was disabled, if it failed."""
        return self.guard.failure

    @inference
    def step(self, works: Sequence[Work]) -> StepResult:
        """One round: at most one proposal and exactly one target pass."""
        began = perf_counter()
        drafting = [w for w in works if w.budget > 0 and w.generates]
        tree = self.guard.propose(drafting)
        drafted = perf_counter()
        p = lay_out(works, drafting, tree)
        taps = Taps(self._taps) if self._taps else None
        if not (self.compiled and decide_compiled(p, self.target, self.pool)):
            self._decide(p, taps)
        checked = perf_counter()
        self.emitter.emit(p)
        keep(p, self.pool)
        self.guard.observe(p, taps)
        ended = perf_counter()
        return p.result((drafted - began) * 1e3, (checked - drafted) * 1e3, (ended - checked) * 1e3)

    def _decide(self, p: Pass, taps: Taps | None) -> None:
        """The pass and the verdict, part by part."""
        state = self.target.embed(pack(p, self.target))
        state.adapters = main_adapters(p)
        p.state = self.target.run_layers(state, 0, self.target.num_layers, self.pool, taps)
        read_logits(p, self.target)
        decide(p, self.guard.verifier.verify)

    def release(self, sequences: Sequence[RunningSequence]) -> None:
        """Let the drafter drop the state of ended or preempted sequences."""
        self.guard.release(sequences)
