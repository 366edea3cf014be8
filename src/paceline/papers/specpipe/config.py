"""The options of the pipeline round, and the drafters that can run in it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar, Literal

from ...core.errors import CapabilityError, ConfigError
from ...core.options import option
from ...draft.base import DrafterSpec
from ...engine.ahead import AheadConfig
from ...engine.base import RoundParts
from ...engine.verification import make_verifier
from ...kv.pool import KVPool
from ...model.decoder import Decoder
from ...model.stage_line import StageLine
from ...model.stages import Stage, StagesInTurn, even_cuts
from .round import PipelineRound
from .source import Source


@dataclass(frozen=True, kw_only=True)
class PipelineConfig(AheadConfig):
    """Fills the stages of a target with the future of a request (SpecPipe)."""

    kind: ClassVar[str] = "pipeline"
    chooser: ClassVar[str] = "source"

    stages: int = option(2, help="consecutive parts of the target's layers", minimum=1)
    layers: str = option("", help="layers of each stage, such as 5x4x3; none: as even as can be")
    width: int = option(8, help="drafted tokens of a request that enter together, at most", minimum=1)
    children: int = option(4, help="candidates below each of them", minimum=1)
    rows: int | None = option(
        None, help="drafted tokens of all requests that enter together, at most; none: no limit", minimum=1
    )
    texts: int | None = option(
        None, help="requests whose text enters together: running / stages make micro-batches; none: all", minimum=1
    )
    source: Literal["here", "process"] = option(
        "here", help="drafts in this process, between the ticks, or next to the stages in a process of its own"
    )

    def validate(self) -> None:
        """Check that a cut names the layers of all stages."""
        super().validate()
        parts = self.layers.split("x") if self.layers else []
        self.require("layers", all(part.isdecimal() and int(part) > 0 for part in parts), "is written like 5x4x3")
        named = len(parts)
        self.require("layers", named in (0, self.stages), f"names {named} stages, and stages={self.stages}")

    def refusal(self, spec: DrafterSpec | None) -> tuple[str, str] | None:
        remedy = "use drafter='draft_model:MODEL', ngram or suffix"
        if spec is None or not (spec.ahead or spec.window):  # nothing is drafted
            if self.place is not None:
                return "no drafter is named that a process could serve", remedy
            return None if self.rows is None else ("rows is for drafts, and no drafter is named", remedy)
        return self.misfit(spec, f"which ends {self.stages} ticks too late", remedy)

    def build(self, parts: RoundParts) -> PipelineRound:
        spec = None if parts.drafter is None else parts.drafter.spec
        if make_verifier(parts.verifier, spec).verify is not None:
            wrong = "the target's own choice decides here"
            raise CapabilityError(f"verifier={parts.verifier!r} with round='pipeline'", wrong, "leave out the verifier")
        stage_line = StagesInTurn(self.cut(parts.target, parts.pool)) if parts.start is None else parts.start()
        return self.over(parts, stage_line)

    def bounds(self, layers: int) -> list[int]:
        """First layer of every stage, and one past the last one's last.

        Raises:
            ConfigError: more stages than layers, or a cut of another number of layers.
        """
        if not self.layers:
            return even_cuts(layers, self.stages)
        bounds = [0, *accumulate(map(int, self.layers.split("x")))]
        if bounds[-1] != layers:
            wrong = f"these are {bounds[-1]} layers, and the target has {layers}"
            raise ConfigError(f"round='pipeline,layers={self.layers}'", wrong, "name all of them")
        return bounds

    def cut(self, target: Decoder, pool: KVPool) -> list[Stage]:
        """Return the stages, over their part of the pool's K/V.

        Raises:
            ConfigError: as of `bounds`.
        """
        bounds = self.bounds(target.num_layers)
        pairs = zip(bounds[:-1], bounds[1:], strict=True)
        return [Stage(target, a, b, pool.tensors.part(a, b)) for a, b in pairs]

    def over(self, parts: RoundParts, stage_line: StageLine) -> PipelineRound:
        """Return the round over stages wherever they are; ``parts`` are those of `build`."""
        source = None
        if parts.drafter is not None and parts.drafter.spec.ahead:
            source = Source(self.sessions(parts, self.nodes), self.children, parts.target.config.vocab_size)
        return PipelineRound(self, parts, stage_line, source)

    @property
    def nodes(self) -> int:
        """Drafted nodes that a session may hold at once: a level for every stage, and what is owed."""
        return (self.stages + 2) * self.width * self.children
