"""What a run met: a fuzz that never meets a preemption tests none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from kit.ticks import watch_ticks

from paceline.draft.base import DraftRule
from paceline.engine.base import StepResult, Work
from paceline.engine.engine import Engine
from paceline.engine.passes import Pass
from paceline.papers.specpipe.records import Tick
from paceline.papers.specpipe.round import PipelineRound

LONG = 5  # accepted lengths from here on are counted together


class Witness:
    """Counts of what was met, over any number of cases."""

    def __init__(self) -> None:
        self.met: Counter[str] = Counter()

    def watch(self, engine: Engine) -> None:
        """See every step of ``engine``, and every verdict on a tree."""
        round_: Any = engine.round
        if isinstance(round_, PipelineRound):
            watch_ticks(round_, self._saw_tick)
            return
        step, emit = round_.step, round_.emitter.emit
        paths: dict[int, int] = {}

        def watched_emit(p: Pass) -> None:
            for i in p.generating:
                if (tree := p.spans[i].tree) is not None:
                    paths[p.works[i].sequence.key] = len(p.paths[i])
                    self._saw_path(p.paths[i], [-1, *tree.parents])
            emit(p)

        def watched_step(works: Sequence[Work], rule: DraftRule | None = None) -> StepResult:
            paths.clear()
            before = [len(w.sequence.tokens) for w in works]
            self.met["chunk edges"] += sum(not w.generates for w in works)
            result = step(works, rule)
            for work, length in zip(works, before, strict=True):
                emitted = len(work.sequence.tokens) - length
                self._saw_end(work, paths.get(work.sequence.key, 0), emitted)
            return result

        round_.step = watched_step
        round_.emitter.emit = watched_emit

    def _saw_tick(self, tick: Tick) -> None:
        self.met["pipelines' hits"] += tick.hits
        self.met["pipelines' flushes"] += sum(not verdict.alive for verdict in tick.verdicts)
        self.met["late siblings"] += tick.late
        self.met["partial refills"] += tick.refills

    def _saw_path(self, path: list[int], parents: list[int]) -> None:
        self.met[f"accepted {len(path)}" if len(path) < LONG else f"accepted {LONG} and more"] += 1
        self.met["later siblings accepted"] += any(parents.index(parents[node]) != node for node in path)

    def _saw_end(self, work: Work, path: int, emitted: int) -> None:
        if emitted >= path + (not work.sequence.finished):
            return
        checker = work.sequence.checker  # more was accepted than came out
        if checker.finish_reason == "stop":
            kind = {type(None): "EOS", int: "stop ids", str: "stop strings"}[type(checker.stop_reason)]
            self.met[f"{kind} in mid-path"] += 1

    def saw_stats(self, stats: Any) -> None:
        """Take in the statistics of an answer."""
        self.met["preemptions"] += stats.preemptions
        self.met["prefix hits"] += bool(stats.cached_prompt_tokens)
        self.met["drafted tokens"] += stats.drafted
        self.met["accepted tokens"] += stats.accepted
        self.met["pruned nodes"] += stats.pruned

    def report(self) -> str:
        """All counts, a line each."""
        return "\n".join(f"  {count:>9,} {name}" for name, count in sorted(self.met.items()))
