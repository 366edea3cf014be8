"""The options of the mirror round, and the drafters that can run in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from ...core.errors import CapabilityError, ConfigError
from ...core.options import option
from ...draft.base import DrafterSpec
from ...engine.ahead import AheadConfig
from ...engine.base import UNKNOWN, ModelOrigin, RoundParts
from ...model.decoder import Decoder
from ...weights.files import fingerprint
from .exits import ExitHead, exit_layer, exit_of
from .round import MirrorRound

# Candidates by batch size, from each size on (Mirror-SD, appendix D.1).
KAPPA_BY_BATCH = {1: 8, 16: 4, 32: 2, 64: 1}

AUTO, OWN = "auto", "own"  # in place of a folder of exits


@dataclass(frozen=True, kw_only=True)
class MirrorConfig(AheadConfig):
    """Drafts for every likely outcome of a pass while the pass is under way (Mirror Speculative Decoding)."""

    kind: ClassVar[str] = "mirror"
    chooser: ClassVar[str] = "rollout"

    kappa: int | None = option(
        None, help="candidates of each position, 1 or more; none: by batch size, from 8 alone to 1 of 64", minimum=1
    )
    exit: str = option("1/2", help="after which layers: a number of layers, or a share of them such as 1/2")
    heads: str = option(
        AUTO,
        help="folder of trained early exits, one of them after these layers; own: the target's own norm and head; "
        "auto: the zoo's for the model where it has such exits, else own",
    )
    rollout: Literal["between", "beside", "process"] = option(
        "between",
        help="drafts while the target stands still at its exit, or next to its other layers: in a thread, in a process",
    )

    def refusal(self, spec: DrafterSpec | None) -> tuple[str, str] | None:
        remedy = "use drafter='draft_model:MODEL'"
        if spec is None:
            return "it has nothing to draft with", remedy
        return self.misfit(spec, "which ends too late", remedy)

    def build(self, parts: RoundParts) -> MirrorRound:
        assert parts.drafter is not None
        if self.rollout == "beside" and parts.drafter.spec.taps and parts.target.ranks is not None:
            wrong = "drafter and target would use the ranks at the same time"
            raise CapabilityError(f"rollout={self.rollout} with tensor_parallel", wrong, "leave out rollout")
        exit_head = self.exit_head(parts.target, parts.origin)  # before anything is allocated or started
        sessions = self.sessions(parts, self.capacity(parts.drafter.spec), self.rollout == "beside")
        return MirrorRound(self, parts, exit_head, sessions)

    def capacity(self, spec: DrafterSpec) -> int:
        """Drafted nodes that a sequence may hold at once: a window, and a branch below every candidate."""
        gamma = spec.window
        return (gamma + 1) * (1 + max(self.kappas.values()) * gamma)

    @property
    def kappas(self) -> Mapping[int, int]:
        """Candidates of a position by batch size, from each size on."""
        return KAPPA_BY_BATCH if self.kappa is None else {1: self.kappa}

    def exit_head(self, target: Decoder, origin: ModelOrigin = UNKNOWN) -> ExitHead:
        """Return the exit of a target, and check all other options against it.

        Raises:
            ConfigError: an exit outside the target, more candidates than tokens, a folder without trained exits.
            CapabilityError: exits that were trained for another target, or none after these layers.
        """
        vocab = target.config.vocab_size
        if self.kappa is not None and self.kappa > vocab:
            wrong = f"the vocabulary has {vocab} tokens"
            raise ConfigError(f"round='mirror,kappa={self.kappa}'", wrong, f"give {vocab} or fewer")
        layer = exit_layer(self.exit, target.num_layers, f"round='mirror,exit={self.exit}'")
        name = origin.trained(self.kind) if self.heads == AUTO else self.heads
        if name is None or name == OWN:
            return ExitHead(target, layer)
        mark = None if origin.folder is None else fingerprint(origin.folder)
        try:
            return exit_of(origin.find(name), target, layer, origin.name, mark)
        except CapabilityError:  # none of them lies there
            if self.heads != AUTO:
                raise
            return ExitHead(target, layer)
