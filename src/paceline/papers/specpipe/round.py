"""The pipeline round: each tick a level of the tree enters the stages, and while drafts hold a token leaves them.

a level enters -> all stages compute, the source drafts -> what the last one has is decided -> trees are cut
-> K/V is settled -> all stages learn of it -> the drafted level waits for the next tick

Whatever the source gives, and when, the tokens are those of plain decoding: a level that is late or wrong costs ticks.

Source: SpecPipe, algorithm 1. Of its lines 8 and 9, which can be read in two ways, here: where the newest level was
pruned away but an older one is left, drafting continues below that; the emitted token is computed again only where
it is not in flight.
"""

from __future__ import annotations

from collections import Counter, abc
from collections.abc import Callable, Container, Mapping
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

from torch import Tensor

from ...core.errors import WorkerRestarted
from ...core.inference import inference
from ...core.sequence import Sequence
from ...draft.base import DraftRule, StepFeatures
from ...draft.sessions import Opening
from ...engine.ahead import SessionGuard
from ...engine.base import RoundParts, StepResult, Work
from ...engine.outcome import logprobs_of, source_name
from ...engine.passes import record_prompt
from ...engine.verification import choose_nodes
from ...model.stage_line import StageLine
from ...model.stages import TEXT, Frame, StageRows
from .flight import Cut, InFlightTree, Offer
from .records import Running, Tick
from .source import Source

LAST = -1  # the tap of the last layer

if TYPE_CHECKING:
    from .config import PipelineConfig


class PipelineRound:
    """Levels of trees enter a target's stages one after the other.

    Args:
        config: its options.
        parts: the target, which reads the states of the last stage; a pool whose slots the stages' stores have, and
            whose moves go with the frames; the drafter.
        stage_line: the stages.
        source: of tokens; None: a plain pipeline, in which a token enters when the one before it was emitted.
    """

    name = "pipeline"
    admits = None

    def __init__(self, config: PipelineConfig, parts: RoundParts, stage_line: StageLine, source: Source | None) -> None:
        self.config, self.target, self.pool, self.drafter = config, parts.target, parts.pool, parts.drafter
        self.stage_line, self.source = stage_line, source
        self._spec = None if parts.drafter is None else parts.drafter.spec
        self.sources = () if self._spec is None else self._spec.choices
        self.past = 0 if self._spec is None else self._spec.past
        self._taps = () if self._spec is None else tuple(tap for tap in sorted(self._spec.taps) if tap != LAST)
        self._guard = None
        if source is not None and self._spec is not None:
            self._guard = SessionGuard(self._spec.name, source.sessions, self._lost)
        self._running: dict[int, Running] = {}  # by request
        self._requests: dict[int, int] = {}  # by sequence's key
        self._queue: list[tuple[Running, Work]] = []  # text that waits for its turn
        self._ended: list[int] = []  # requests that the stages may forget
        self._moves: list[tuple[abc.Sequence[int], abc.Sequence[int]]] = []  # of K/V, that the next frame takes along
        self.pool.store = self
        self._fresh = self._epoch = 0
        self._turn = 0  # the first where not all have room in a tick
        self._verdicts: list[Cut] = []  # of the tick
        self._came: Mapping[int, abc.Sequence[Offer]] = {}  # in the tick, by sequence
        self._added = 0, 0  # refills and late siblings of the tick
        self._ticks = 0  # since the last frame that has rows entered
        self._torn = False  # whether a step has begun, or ended in its middle

    @property
    def failure(self) -> str | None:
        """Why drafting has ended."""
        return None if self._guard is None else self._guard.failure

    @property
    def busy(self) -> bool:
        """Return whether rows are in flight, or wait."""
        return bool(self._running)

    @inference
    def step(self, works: abc.Sequence[Work], rule: DraftRule | None = None) -> StepResult:
        """Tick until a token is emitted, or until nothing is in flight."""
        assert rule is None, "a rule weighs drafts by the time that they add to a pass"
        began, self._torn = perf_counter(), True
        fresh = [(self._admit(work), work) for work in works]
        # Work that has waited is scheduled again, as it is now, and keeps its place.
        now = {running.request: (running, work) for running, work in fresh}
        waiting = [now.pop(running.request, (running, work)) for running, work in self._queue]
        self._queue = [*waiting, *now.values()]
        emitted: abc.Sequence[tuple[Running, int]] = ()
        while not emitted and (self._queue or self._ticks < self.stage_line.count):
            emitted = self.tick().emitted
        self._torn = False
        emissions = [(running.sequence, count) for running, count in emitted]
        passes = [Work(running.sequence, 1, True, 0, 0) for running, _ in emitted]
        return StepResult(passes, {}, emissions, 0.0, (perf_counter() - began) * 1e3, 0.0, 0.0)

    def release(self, sequences: abc.Sequence[Sequence]) -> None:
        """Drop what is in flight of sequences that ended or were preempted; nothing is written to their slots.

        Frames continue without these rows: what they move may belong to text that others find.
        """
        for sequence in sequences:
            request = self._requests.pop(sequence.key, None)
            if request is None:
                continue
            del self._running[request]
            self._queue = [item for item in self._queue if item[0].request != request]
            self.stage_line.close(request)
            self._ended.append(request)
            self._asked(partial(self._close, sequence.key))
        if self._torn:  # the engine starts over: nothing of the stages' K/V will be found again
            self._epoch, self._torn = self.stage_line.clear(), False
            self._moves.clear()
            self._ended.clear()

    def forget(self) -> None:
        """Let the source forget requests that ended."""
        if self._guard is not None:
            self._guard.forget()

    def copy_slots(self, sources: abc.Sequence[int], targets: abc.Sequence[int]) -> None:
        """Implement `SlotStore`: moves go with the next frame."""
        self._moves.append((sources, targets))

    # -- what enters

    def _admit(self, work: Work) -> Running:
        """Return the sequence of some work, known or new."""
        sequence = work.sequence
        request = self._requests.get(sequence.key)
        if request is None:
            request = self._requests[sequence.key] = self._fresh
            self._fresh += 1
            assert sequence.cache is not None
            self._running[request] = Running(request, sequence, sequence.cache)
        return self._running[request]

    def tick(self) -> Tick:
        """Advance everything by one tick."""
        frame = self._frame()
        self._look()
        self._asked(self._ask)
        self._ticks = 0 if frame is not None and frame.rows else self._ticks + 1
        out = self.stage_line.tick(frame)
        # Take the level before the verdict, which cancels growths that the source has not begun.
        drafts = self._guard is not None and self._guard.there
        came = drafts and self._asked(self._take)
        while drafts and not came and self.stage_line.rest():
            came = self._asked(self._take)
        emitted, hits = self._decide(out)
        if came and self._guard is not None and self._guard.there:
            self._extend(self._came)
        verdicts, self._verdicts = self._verdicts, []
        added, self._added = self._added, (0, 0)
        return Tick(emitted, 0 if frame is None else frame.rows, hits, drafts and not came, verdicts, *added)

    def _frame(self) -> Frame | None:
        """Return what enters now: text that waits, and a level of each tree."""
        entering = self._queue[: self.config.texts]
        self._queue = self._queue[len(entering) :]
        parts = [self._text(running, work) for running, work in entering]
        parts += self._levels({running.request for running, _ in entering})
        ended, self._ended = self._ended, []
        moves, self._moves = self._moves, []
        if not (parts or moves or ended):
            return None
        return Frame(self._epoch, parts, None, moves, ended, self._taps)

    def _width(self, running: Running) -> int:
        """Return w: drafted tokens of a request in a tick, at most what it allows."""
        return min(self.config.width, running.sequence.max_nodes or self.config.width)

    def _levels(self, begun: Container[int]) -> list[StageRows]:
        """Return the next level of each tree but those that have just begun, ragged, in rows that all share.

        What one request leaves the others take; where there are fewer rows than requests, they take turns.
        """
        live = [one for one in self._running.values() if one.flight is not None and one.request not in begun]
        if not live:
            return []
        self._turn += 1
        start = self._turn % len(live)
        parts: list[StageRows] = []
        rows_left = self.config.rows
        for place, running in enumerate([*live[start:], *live[:start]]):
            share = self._width(running)
            if rows_left is not None:
                share = min(share, -(-rows_left // (len(live) - place)))
            part = self._level(running, share) if share else None
            if part is not None:
                parts.append(part)
                rows_left = None if rows_left is None else rows_left - len(part.nodes)
        return parts

    def _text(self, running: Running, work: Work) -> StageRows:
        """Rows of a text; its last one is the root. Those before it are committed, so later rows find them."""
        sequence, cache = running.sequence, running.cache
        view, rows = sequence, work.rows
        first = cache.committed
        nodes = [TEXT] * rows
        part = StageRows(
            running.request,
            0 if running.flight is None else running.flight.version,
            view.tokens[first : first + rows],
            nodes,
            range(first, first + rows),
            cache.slots(0, first + rows),
            first + rows,
            first,
            application=sequence.application,
        )
        cache.advance(rows - work.generates)
        if work.generates:
            cache.reserve_here(1)
            cache.enter()
            self._begin(running, work)
            assert running.flight is not None
            nodes[-1] = running.flight.root
            running.flight.enter(1)
        return part

    def _begin(self, running: Running, work: Work) -> None:
        """Begin the tree of a sequence whose text ends here, where there is none."""
        if running.flight is not None:
            return
        tokens = running.sequence.tokens
        root = len(tokens) - 1
        running.farthest = root + (work.max_depth if work.may_draft else 0)
        running.flight = InFlightTree(tokens[-1], root)
        if running.farthest > root:
            self._asked(lambda source: source.begin(Opening.of(running.sequence)))

    def _level(self, running: Running, width: int) -> StageRows | None:
        """Return the part of a tree's next level that finds free slots: drafts displace nobody."""
        flight = running.flight
        if flight is None or flight.nodes[flight.root].row < 0:  # its root comes with the text
            return None
        level = flight.enter(min(width, self._room(running)))
        running.counted.update(flight.nodes[number].mark for number in level)
        return self._rows(running, flight, level) if level else None

    def _room(self, running: Running) -> int:
        """Slots for rows of a tree."""
        cache = running.cache
        blocks = self.pool.allocator.num_free * self.pool.block_size
        return cache.capacity - cache.committed - cache.ahead + blocks

    def _rows(self, running: Running, flight: InFlightTree, level: abc.Sequence[int]) -> StageRows:
        """Nodes that have just entered, as rows."""
        cache = running.cache
        cache.reserve(len(level))
        first = cache.enter()
        places = [flight.nodes[number].place for number in level]
        prefix, stop = cache.committed, first + len(level)
        return StageRows(
            running.request,
            flight.version,
            [flight.nodes[number].token for number in level],
            level,
            places,
            cache.slots(0, stop),
            stop,
            prefix,
            flight.visible(level),
            [node.place for node in flight.computed()],
            running.sequence.application,
        )

    # -- the source

    def _asked(self, call: Callable[[Source], bool | None]) -> bool:
        """Call the source; return what it gives, False where it fails or is away."""
        if self.source is None or self._guard is None or not self._guard.there:
            return False
        with self._guard:
            return call(self.source) is not False
        return False

    def _lost(self) -> None:
        """All sessions are gone."""
        assert self.source is not None
        self.source.lost()
        for running in self._running.values():
            if running.flight is not None:
                running.flight.detach_source()

    def _look(self) -> None:
        """Open the sessions that a source has lost, if it is there again."""
        if self.source is None or self._guard is None or self._guard.there:
            return
        with self._guard:
            if self._guard.look():
                for running in self._running.values():
                    if running.flight is not None and running.flight.place < running.farthest:
                        self.source.begin(Opening.of(running.sequence))

    def _observe(self, running: Running, place: int, states: Tensor) -> None:
        """Show the drafter states of tokens from ``place`` on: [rows, d_model] of the last layer, then of each tap."""
        if self.drafter is not None and self.drafter.spec.taps:
            layers, observe = states.split(self.target.config.d_model, dim=1), self.drafter.observe
            hidden = {tap: part.contiguous() for tap, part in zip((LAST, *self._taps), layers, strict=True)}
            seen = StepFeatures([running.sequence], [[]], hidden, [slice(0, len(states))], [place])
            self._asked(lambda source: observe(seen))

    def _close(self, key: int, source: Source) -> None:
        source.close(key)
        if self.drafter is not None:
            self.drafter.release([key])

    def _ask(self, source: Source) -> None:
        running = self._running.values()
        source.ask({one.sequence.key: (one.flight, one.farthest) for one in running if one.flight is not None})

    def _take(self, source: Source) -> bool:
        """Take the requested level. False: it is late, and its room stays free."""
        self._came = source.take()
        return not source.owes

    def _extend(self, came: Mapping[int, abc.Sequence[Offer]]) -> None:
        """Append to every tree what came for it, and where there is room what earlier levels had no room for."""
        for running in self._running.values():
            if running.flight is not None:
                self._append(running, running.flight, came.get(running.sequence.key, ()))

    def _append(self, running: Running, flight: InFlightTree, offers: abc.Sequence[Offer]) -> None:
        deepest = max(node.place for node in flight.nodes.values())
        waiting = sum(number != flight.root for number in flight.waiting)
        width, rows = self._width(running), self.config.rows
        if rows is not None:
            width = max(1, min(width, rows // len(self._running)))
        room = width - waiting  # rows that have not entered yet are part of the coming level
        places = [flight.nodes[number].place for number in flight.append(offers, max(0, room))]
        refills, late = self._added
        refilled = any(deepest < place <= running.newest for place in places)
        self._added = refills + refilled, late + sum(place <= deepest for place in places)
        running.newest = max([running.newest, deepest, *places])

    # -- what leaves

    def _decide(self, out: Frame | None) -> tuple[list[tuple[Running, int]], int]:
        """Decide on roots that the last stage has computed: return who got how many tokens, and how many were hits."""
        emitted: list[tuple[Running, int]] = []
        hits = begin = 0
        width = self.target.config.d_model
        for part in () if out is None else out.parts:
            assert out is not None and out.hidden is not None
            hidden = out.hidden[begin : begin + len(part.nodes)]
            begin += len(part.nodes)
            running = self._running[part.request]
            sequence = running.sequence
            if part.visible is None:  # a text
                if sequence.params.prompt_logprobs is not None:
                    try:
                        record_prompt(sequence, part.positions[0], hidden[:, :width].contiguous(), self.target)
                    except WorkerRestarted:  # of a rank: nothing of the request's own
                        raise
                    except Exception as error:
                        sequence.fault = error
                self._observe(running, part.positions[0], hidden)
            count, more_hits = self._say(running, part, hidden)
            hits += more_hits
            if sequence.fault is not None:
                sequence.checker.end("error")
            if count or sequence.fault is not None:
                emitted.append((running, count))
        return emitted, hits

    def _say(self, running: Running, part: StageRows, hidden: Tensor) -> tuple[int, int]:
        """Choose the token after the root, where its row is among these, and after what becomes the root."""
        count = hits = 0
        flight, sequence = running.flight, running.sequence
        while flight is not None and not (sequence.fault or sequence.finished) and flight.root in part.nodes:
            row = part.nodes.index(flight.root)
            logits = self.target.read(hidden[row : row + 1, : self.target.config.d_model])
            token = int(choose_nodes(sequence, logits)[0])
            emitted = self._emit(running, token, logits)
            if not emitted or sequence.finished:
                return count + emitted, hits
            count += 1
            if part.visible is not None:
                self._observe(running, flight.place, hidden[row : row + 1])
            hits += self._go_on(running, flight, token)
        return count, hits

    def _emit(self, running: Running, token: int, logits: Tensor) -> int:
        """One token for the output, and its statistics; 0: a fault, which the view notes."""
        sequence, flight = running.sequence, running.flight
        assert flight is not None
        if sequence.fault is not None:  # its own sampling rules
            return 0
        hit = flight.holds(token)
        try:
            emitted = sequence.emit([token], int(hit), logprobs_of(sequence, logits, [token]))
            counted, running.counted = running.counted, Counter()
            stats = sequence.stats
            stats.row_layers += (1 + counted.total()) * self.stage_line.layers
            right = flight.child(token) if hit else None
            if right is not None:  # it may have entered before the last verdict
                counted[right.mark] = max(1, counted[right.mark])
            if emitted:
                names, drafted = partial(source_name, self._spec), counted.total()
                sources = {names(m): (n, [1] * (right is not None and right.mark == m)) for m, n in counted.items()}
                offered = min(1, drafted)
                stats.record_pass(drafted=drafted, accepted=int(hit), emitted=emitted, offered=offered, sources=sources)
                if sequence.trace is not None:
                    sequence.trace.append(flight.trace(token, len(sequence.output_ids) - 1, names))
        except Exception as error:
            sequence.fault = error
            return 0
        return emitted

    def _go_on(self, running: Running, flight: InFlightTree, token: int) -> bool:
        """Cut the tree, and let ledger, stages and source know; returns whether the token was in flight."""
        node = flight.child(token)
        verdict = flight.say(token)
        self._verdicts.append(verdict)
        if node is None:
            running.newest = 0
        self.pool.settle([(running.cache, verdict.rows, 1)])
        running.cache.publish(running.sequence.tokens)
        self.stage_line.tell(running.request, verdict.version, verdict.alive)
        key = running.sequence.key
        if self.source is not None and key in self.source.open:
            number = -1 if node is None else node.source
            self._asked(lambda source: source.go_on(key, token, number))
            if number < 0:  # what the source has of it begins here
                flight.ask_again([flight.root])
        return verdict.hit
