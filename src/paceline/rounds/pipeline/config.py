"""The options of the pipeline round, and the drafters that can run in it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar, Literal

from ...core.errors import CapabilityError, ConfigError
from ...core.options import option
from ...drafters.base import Drafter, DrafterSpec
from ...drafters.sessions import DraftSessions
from ...kv.pool import KVPool
from ...network.decoder import Decoder
from ...network.stages import Stage, StagesInTurn, even_cuts
from ..ahead import AheadConfig
from ..base import UNKNOWN, Origin, Serve
from ..verification import make_verifier
from . import lossy
from .round import Filling, PipelineRound
from .source import Levels, Source, levels_of
from .stage_line import StageLine
from .widths import Widths

MEASURED = "auto"  # in place of a cut


@dataclass(frozen=True, kw_only=True)
class PipelineConfig(AheadConfig):
    """Fills the stages of a target with the future of a request (SpecPipe)."""

    kind: ClassVar[str] = "pipeline"
    chooser: ClassVar[str] = "source"

    stages: int = option(2, help="parts of the target's layers, one behind the other", minimum=1)
    layers: str = option(
        "", help="layers of each stage, such as 5x4x3; auto: by measured times; none: as even as can be"
    )
    width: int = option(8, help="drafted tokens of a request that enter together, at most", minimum=1)
    adapt: bool = option(
        False, help="w follows what trees of each width would have cost, and is width at most; ids do not depend on it"
    )
    children: int = option(4, help="candidates below each of them", minimum=1)
    rows: int | None = option(
        None, help="drafted tokens of all requests that enter together, at most; none: no limit", minimum=1
    )
    texts: int | None = option(
        None, help="requests whose text enters together: running / stages make micro-batches; none: all", minimum=1
    )
    tree: str = option(
        "", help="in place of levels a whole tree, such as SpecInfer's 1x1x3x1x1x1x1x1: children by level"
    )
    accept: Literal["strict", "lossy_relaxed", "lossy_top_p"] = option(
        "strict",
        help="what the target says; or, lossy, what it likes best of the drafts that cost no tick, or the best draft "
        "in its top-p set",
    )
    accept_p: float | None = option(
        None, help="with accept=lossy_top_p: p of that set; none: 0.9", minimum=0, maximum=1
    )

    source: Literal["here", "process"] = option(
        "here", help="drafts in this process, between the ticks, or beside the stages in a process of its own"
    )

    def validate(self) -> None:
        """Trees and cuts are numbers of at least 1; a cut names all stages."""
        super().validate()
        for name, text in (("tree", self.tree), ("layers", "" if self.layers == MEASURED else self.layers)):
            parts = text.split("x") if text else []
            self.require(name, all(part.isdecimal() and int(part) > 0 for part in parts), "is written like 1x1x3x1")
        self.require("accept_p", self.accept_p is None or self.accept == "lossy_top_p", "is for accept=lossy_top_p")
        self.require("rows", self.rows is None or not self.tree, "is for levels, and tree= lets whole trees enter")
        self.require("adapt", not (self.adapt and self.tree), "is for levels, and tree= lets whole trees enter")
        named = 0 if self.layers == MEASURED else len(_numbers(self.layers))
        self.require("layers", named in (0, self.stages), f"names {named} stages, and stages={self.stages}")

    @property
    def filling(self) -> Filling:
        """What enters in a tick."""
        return Filling(width=self.width, rows=self.rows, texts=self.texts, tree=_numbers(self.tree))

    def refusal(self, spec: DrafterSpec | None) -> tuple[str, str] | None:
        remedy = "use drafter='draft_model:MODEL', ngram or suffix"
        if spec is None or not (spec.ahead or spec.window):  # nothing is drafted
            return self._needless(remedy)
        late = f"which ends {self.stages} ticks too late", f"which leave the last stage {self.stages} ticks too late"
        return self.misfit(spec, *late, remedy)

    def _needless(self, remedy: str) -> tuple[str, str] | None:
        """What is asked for that needs a drafter, where there is none."""
        if self.place is not None:
            return "no drafter is named that a process could serve", remedy
        named = [name for name in ("rows", "tree", "adapt") if getattr(self, name)] + ["accept"] * (
            self.accept != "strict"
        )
        return (f"{named[0]} is for drafts, and no drafter is named", remedy) if named else None

    def build(
        self,
        target: Decoder,
        pool: KVPool,
        drafter: Drafter | None,
        verifier: str,
        origin: Origin = UNKNOWN,
        serve: Serve | None = None,
        start: Callable[[], StageLine] | None = None,
    ) -> PipelineRound:
        """See `RoundConfig`.

        Args:
            start: starts stages elsewhere, where the target has the last one's layers alone.
        """
        self._fit(verifier, drafter)
        stage_line = StagesInTurn(self.cut(target, pool)) if start is None else start()
        return self.over(target, pool, drafter, verifier, stage_line, serve)

    def bounds(self, layers: int) -> list[int]:
        """First layer of every stage, and one past the last one's last.

        Raises:
            ConfigError: more stages than layers, a cut of another number of layers, or one that is still to be
                measured.
        """
        if not self.layers:
            return even_cuts(layers, self.stages)
        if self.layers == MEASURED:
            wrong = "times are measured where stages start in processes of this host"
            raise ConfigError("round='pipeline,layers=auto'", wrong, "give pipeline=STAGES, or name the layers")
        found = [0, *accumulate(_numbers(self.layers))]
        if found[-1] != layers:
            wrong = f"these are {found[-1]} layers, and the target has {layers}"
            raise ConfigError(f"round='pipeline,layers={self.layers}'", wrong, "name all of them")
        return found

    def cut(self, target: Decoder, pool: KVPool) -> list[Stage]:
        """The stages, over their part of the pool's K/V.

        Raises:
            ConfigError: as of `bounds`.
        """
        bounds, stretch = self.bounds(target.num_layers), target.config.stretch
        pairs = zip(bounds[:-1], bounds[1:], strict=True)
        return [Stage(target, a, b, pool.tensors.part(a * stretch, b * stretch)) for a, b in pairs]

    def over(
        self,
        target: Decoder,
        pool: KVPool,
        drafter: Drafter | None,
        verifier: str,
        stage_line: StageLine,
        serve: Serve | None = None,
        levels: Callable[[DraftSessions], Levels] = levels_of,
    ) -> PipelineRound:
        """The round over stages wherever they are.

        Args:
            target, pool, drafter, verifier, serve: as for `build`.
            stage_line: the stages.
            levels: how the drafter's sessions grow.

        Raises:
            ConfigError, CapabilityError: a verifier that does not fit.
        """
        self._fit(verifier, drafter)
        source = None
        if drafter is not None and drafter.spec.ahead:
            sessions = self.sessions(drafter, self.nodes, self.place, serve)
            source = Source(sessions, levels(sessions), self.children, target.config.vocab_size, self.filling.tree)
        accept = lossy.rule(self.accept, 0.9 if self.accept_p is None else self.accept_p)
        widths = Widths(self.width, stage_line.count) if self.adapt else None
        return PipelineRound(target, pool, stage_line, source, self.filling, accept, drafter, widths)

    @staticmethod
    def _fit(verifier: str, drafter: Drafter | None) -> None:
        if make_verifier(verifier, None if drafter is None else drafter.spec).verify is not None:
            wrong = "what the target says itself decides here, and nothing else"
            raise CapabilityError(f"verifier={verifier!r} with round='pipeline'", wrong, "leave out the verifier")

    @property
    def nodes(self) -> int:
        """Drafted nodes that a session may hold at once: a level for every stage, and what is owed."""
        tree = self.filling.tree
        if tree:
            return (self.stages + 2 + len(tree)) * math.prod(tree) ** 2  # the next one below each leaf
        return (self.stages + 2) * self.width * self.children


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("x")) if text else ()
