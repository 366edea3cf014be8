"""The options of the pipeline round, and the drafters that can run in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, cast

from ...core.errors import CapabilityError
from ...core.options import option
from ...drafters.base import Drafter, DrafterSpec
from ...drafters.sessions import AheadDrafter, DraftSessions, GoingSessions
from ...kv.pool import KVPool
from ...target.decoder import Decoder
from ...target.stages import Stage, even_cuts
from ..base import Place, Round, RoundConfig, Serve
from ..verification import make_verifier, match
from .belt import Belt, StagesInTurn
from .round import PipelineRound
from .source import AtOnce, Going, Levels, Source


@dataclass(frozen=True, kw_only=True)
class PipelineConfig(RoundConfig):
    """Fills the stages of a target with the future of a request (SpecPipe)."""

    kind: ClassVar[str] = "pipeline"
    automatic: ClassVar[bool] = False
    weighs: ClassVar[bool] = False

    stages: int = option(2, help="parts of the target's layers, one behind the other", minimum=1)
    width: int = option(8, help="drafted tokens that enter together, at most", minimum=1)
    children: int = option(4, help="candidates below each of them", minimum=1)

    source: Literal["here", "process"] = option(
        "here", help="drafts in this process, between the ticks, or beside the stages in a process of its own"
    )
    cores: tuple[int, ...] = option((), help="with source=process: CPU cores of the drafter, such as <1>")
    threads: int | None = option(None, help="with source=process: threads of the drafter; none: one a core", minimum=1)

    def validate(self) -> None:
        """Cores and threads are those of a process."""
        for name in ("cores", "threads"):
            self.require(name, self.source == "process" or not getattr(self, name), "is for source=process")

    @property
    def place(self) -> Place | None:
        """See `RoundConfig`."""
        return Place(self.cores, self.threads) if self.source == "process" else None

    def refusal(self, spec: DrafterSpec | None) -> tuple[str, str] | None:
        remedy = "use drafter='draft_model:MODEL', ngram or suffix"
        if spec is None:
            return None if self.place is None else ("no drafter is named that a process could serve", remedy)
        who = spec.name
        if spec.streams is not None:
            return (
                f"{who} drafts with streams in the target's own pass, which ends {self.stages} ticks too late",
                remedy,
            )
        if spec.taps:
            late = f"which leave the last stage {self.stages} ticks after its draft is due"
            return f"{who} drafts from the target's states, {late}", remedy
        if spec.proposes == "sampled":
            return (
                f"{who} draws its drafts for rejection, and this verification is strict",
                "leave out proposes=sampled",
            )
        if not spec.ahead:
            return f"{who} cannot draft below tokens that are not decided on (it has no draft sessions)", remedy
        return None

    def build(
        self,
        target: Decoder,
        pool: KVPool,
        drafter: Drafter | None,
        verifier: str,
        start: Callable[[], Belt] | None = None,
    ) -> Round:
        """See `RoundConfig`.

        Args:
            start: starts stages elsewhere, where the target has the last one's layers alone.
        """
        self._fit(verifier, drafter)
        return self.over(target, pool, drafter, verifier, self._belt(target, pool, start))

    def build_apart(
        self,
        target: Decoder,
        pool: KVPool,
        drafter: Drafter,
        verifier: str,
        serve: Serve,
        start: Callable[[], Belt] | None = None,
    ) -> Round:
        """See `RoundConfig`; ``start`` as for `build`."""
        self._fit(verifier, drafter)
        assert self.place is not None
        sessions = cast(GoingSessions, serve(rows=self.rows, place=self.place))
        source = Source(sessions, Going(sessions), self.children, target.config.vocab_size)
        return PipelineRound(target, pool, self._belt(target, pool, start), source, self.width)

    def _belt(self, target: Decoder, pool: KVPool, start: Callable[[], Belt] | None) -> Belt:
        return StagesInTurn(self.cut(target, pool)) if start is None else start()

    def cut(self, target: Decoder, pool: KVPool) -> list[Stage]:
        """Stages of as many layers each, over their part of the pool's K/V.

        Raises:
            ConfigError: more stages than layers.
        """
        bounds, stretch = even_cuts(target.num_layers, self.stages), target.config.stretch
        pairs = zip(bounds[:-1], bounds[1:], strict=True)
        return [Stage(target, a, b, pool.tensors.part(a * stretch, b * stretch)) for a, b in pairs]

    def over(
        self,
        target: Decoder,
        pool: KVPool,
        drafter: Drafter | None,
        verifier: str,
        belt: Belt,
        levels: Callable[[DraftSessions], Levels] = AtOnce,
    ) -> PipelineRound:
        """The round over stages wherever they are.

        Args:
            target, pool, drafter, verifier: as for `build`.
            belt: the stages.
            levels: how the drafter's sessions grow.

        Raises:
            ConfigError, CapabilityError: a verifier that does not fit.
        """
        self._fit(verifier, drafter)
        source = None
        if drafter is not None:
            sessions = cast(AheadDrafter, drafter).sessions(self.rows)
            source = Source(sessions, levels(sessions), self.children, target.config.vocab_size)
        return PipelineRound(target, pool, belt, source, self.width)

    @staticmethod
    def _fit(verifier: str, drafter: Drafter | None) -> None:
        if make_verifier(verifier, None if drafter is None else drafter.spec).verify is not match:
            wrong = "what the target says itself decides here, and nothing else"
            raise CapabilityError(f"verifier={verifier!r} with round='pipeline'", wrong, "leave out the verifier")

    @property
    def rows(self) -> int:
        """Drafted nodes that a session may hold at once: a level for every stage, and what is owed."""
        return (self.stages + 2) * self.width * self.children
