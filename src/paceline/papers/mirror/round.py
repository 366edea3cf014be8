"""The mirror round: while the target's upper layers decide on a window, the drafter prepares the next for all outcomes.

fresh windows where there are none -> layers 0 .. e - 1 -> token channel -> rollout below every candidate
-> layers e .. N - 1 -> decide -> emit -> keep K/V -> the branch of what was emitted, or a fallback

Source: Mirror Speculative Decoding, sections 3.1 and 3.4. Where the rollout runs changes when a window is there, never
what it is.
"""

from __future__ import annotations

from collections import abc
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from ...core.inference import inference
from ...core.sequence import Sequence
from ...core.tree import TokenTree
from ...draft.base import DraftRule, Levels
from ...draft.sessions import ROOT, AsyncSessions, Opening
from ...engine.ahead import SessionGuard
from ...engine.base import RoundParts, StepResult, Work
from ...engine.outcome import Emitter, keep
from ...engine.passes import Pass, decide, embed, lay_out, read_logits
from ...engine.taps import rows_to_tap, show
from ...engine.verification import make_verifier
from ...model.base import Taps
from .channel import propose
from .exits import ExitHead
from .rollout import Branch, Outcome, Rollout

if TYPE_CHECKING:
    from .config import MirrorConfig


class MirrorRound:
    """Verification of one window and drafting of the next at the same time.

    Args:
        config: its options.
        parts: target, pool, verifier, and a drafter with draft sessions.
        exit_head: the target's prediction in the middle of its layers.
        sessions: of the drafter, with room for `MirrorConfig.capacity`.

    Raises:
        ConfigError: a verifier that does not fit the drafter.
    """

    name = "mirror"
    busy = False  # a pass ends in the step that began it
    admits = None

    def __init__(self, config: MirrorConfig, parts: RoundParts, exit_head: ExitHead, sessions: AsyncSessions) -> None:
        assert parts.drafter is not None
        spec = parts.drafter.spec
        self.sources, self.past = spec.choices, spec.past
        self.config, self.target, self.pool, self.drafter = config, parts.target, parts.pool, parts.drafter
        self.exit, self.sessions = exit_head, sessions
        self.verifier = make_verifier(parts.verifier, spec)
        self.emitter = Emitter(parts.target.num_layers, spec)
        self.gamma = spec.window
        vocab = parts.target.config.vocab_size
        self._kappas = [(size, min(k, vocab)) for size, k in sorted(config.kappas.items(), reverse=True)]
        self._rollout: Rollout | None = None  # the one under way
        self._windows: dict[int, TokenTree] = {}  # by sequence with an open session; empty: the pass has none
        self._guarded = SessionGuard(spec.name, sessions, self._windows.clear)

    @property
    def failure(self) -> str | None:
        """Why drafting has ended."""
        return self._guarded.failure

    @inference
    def step(self, works: abc.Sequence[Work], rule: DraftRule | None = None) -> StepResult:
        """One pass of the target, and one rollout while it is under way."""
        assert rule is None, "a rule weighs drafts by the time that they add to a step"
        began = perf_counter()
        self._open(works)
        self._draft_fresh(works)
        drafting = [w for w in works if w.budget > 0 and w.generates and len(self._window(w))]
        p = lay_out(works, drafting, [self._window(work) for work in drafting])
        windows = {i: p.spans[i].tree or TokenTree() for i in p.generating}
        drafted = perf_counter()
        tapped = rows_to_tap(p, self.drafter.spec)
        taps = None if tapped is None else Taps(tapped.layers)
        embed(p, self.target)
        self.target.run_layers(p.state, 0, self.exit.layer, self.pool, taps)
        halfway = perf_counter()
        rollout = self._prepare(p, windows, self._speak(p, windows))
        self._start(rollout)
        started = perf_counter()
        self.target.run_layers(p.state, self.exit.layer, self.target.num_layers, self.pool, taps)
        verify = self.verifier.verify
        decide(p, verify, read_logits(p, self.target, verify))
        checked = perf_counter()
        self.emitter.emit(p)
        if tapped is not None and taps is not None:
            tapped.source = {name: states[: p.main_rows] for name, states in taps.hidden.items()}
            with self._guarded:
                self.sessions.look()  # a drafting thread rests after this
                self.drafter.observe(show(p, tapped))  # the target's states replace its own
        keep(p, self.pool)
        emitted = perf_counter()
        self._finish(self._said(p), [w.sequence.key for w in works if w.sequence.finished])
        ended = perf_counter()
        draft = (drafted - began + started - halfway + ended - emitted) * 1e3
        verified = (halfway - drafted + checked - started) * 1e3
        return p.result(draft, verified, (emitted - checked) * 1e3, draft)

    def release(self, sequences: abc.Sequence[Sequence]) -> None:
        """Close the sessions of ended or preempted sequences."""
        keys = [sequence.key for sequence in sequences]
        self._finish({}, keys)  # where a step ended in its middle
        for key in keys:
            if self._windows.pop(key, None) is not None:
                with self._guarded:
                    self.sessions.close(key)
        with self._guarded:
            self.drafter.release(keys)

    def forget(self) -> None:
        """Let the sessions forget sequences that ended."""
        self._guarded.forget()

    # -- windows

    def _window(self, work: Work) -> TokenTree:
        """Return the chain that is to be verified of a sequence, within its limits."""
        whole, most = self._windows.get(work.sequence.key) or TokenTree(), min(work.budget, work.max_depth)
        return whole if len(whole) <= most else whole.subset(range(1, most + 1))

    def _open(self, works: abc.Sequence[Work]) -> None:
        """Sessions of sequences that get tokens from now on."""
        with self._guarded:
            if not self._guarded.look():
                return
            for work in works:
                view = work.sequence
                if work.generates and work.may_draft and view.key not in self._windows:
                    self._windows[view.key] = TokenTree()
                    self.sessions.open(Opening.of(view))

    def _draft_fresh(self, works: abc.Sequence[Work]) -> None:
        """Draft a chain below the root where a pass would verify nothing."""
        if not self._windows:
            return
        rollout = Rollout(self.sessions, self.target.config.vocab_size)
        for work in works:
            key = work.sequence.key
            if work.budget > 0 and work.generates and key in self._windows and not self._windows[key]:
                rollout.begin(key, min(work.budget, work.max_depth, self.gamma))
        with self._guarded:
            rollout.run()
        for key, branch in rollout.fresh.items():
            if key in self._windows:
                self._windows[key] = branch.chain

    # -- while the pass is under way

    def _speak(self, p: Pass, windows: abc.Mapping[int, TokenTree]) -> dict[int, Levels]:
        """Return the token channel: by work, where a draft may follow."""
        candidates: dict[int, Levels] = {}
        kappa = next((k for size, k in self._kappas if len(p.generating) >= size), 0)
        able = [i for i in p.generating if p.works[i].may_draft and p.works[i].sequence.key in self._windows]
        # No draft follows where the batch is too large for any.
        listening = [i for i in able if kappa and (p.works[i].rows > 1 or p.works[i].budget)]
        if not listening:
            return candidates
        rows = [row for i in listening for row in range(p.spans[i].root, p.spans[i].stop)]
        logits = self.exit.logits(p.state.hidden[torch.tensor(rows, device=p.state.hidden.device)])
        begin = 0
        for i in listening:
            end = begin + p.spans[i].nodes
            message = propose(p.works[i].sequence, windows[i].tokens, logits[begin:end], kappa)
            if message is not None:
                candidates[i] = message
            begin = end
        return candidates

    def _prepare(self, p: Pass, windows: abc.Mapping[int, TokenTree], candidates: abc.Mapping[int, Levels]) -> Rollout:
        """Begin a branch below every candidate that leaves room for a draft."""
        rollout = Rollout(self.sessions, self.target.config.vocab_size)
        for i, (tokens_of, _) in candidates.items():
            work, window = p.works[i], windows[i]
            length = min(work.budget or self.gamma, self.gamma)
            key, branches = work.sequence.key, list[Branch]()
            for place, tokens in enumerate(tokens_of):
                levels = min(length, work.max_depth - place - 1)  # so many tokens may be drafted after it
                if levels > 0:
                    node = window.numbers[place - 1] if place else ROOT
                    branches += [Branch(key, node, levels, token, place) for token in tokens]
            rollout.prepare(branches)
        return rollout

    def _start(self, rollout: Rollout) -> None:
        """Have the rollout drafted."""
        if self.failure is None:
            self._rollout = rollout
            with self._guarded:
                rollout.start()

    def _finish(
        self, outcomes: abc.Mapping[Outcome, abc.Sequence[int]], ended: abc.Sequence[int]
    ) -> abc.Mapping[Outcome, Branch]:
        """Apply the verdict: return the branches that are reused, whose windows come next; other windows are empty."""
        rollout, reused = self._rollout, dict[Outcome, Branch]()
        if rollout is None:
            return reused
        with self._guarded:
            tracked = {outcome: tokens for outcome, tokens in outcomes.items() if outcome[0] in self._windows}
            reused = rollout.finish(tracked, [key for key in ended if key in self._windows])
        self._rollout = None
        for key in ended:
            self._windows.pop(key, None)
        for outcome in outcomes:
            key, branch = outcome[0], reused.get(outcome)
            if key in self._windows:
                self._windows[key] = TokenTree() if branch is None else branch.chain
        return reused

    # -- the verdict

    def _said(self, p: Pass) -> dict[Outcome, list[int]]:
        """Return the emitted tokens of answers that continue."""
        outcomes = {}
        for i in p.generating:
            sequence, count = p.works[i].sequence, p.emitted[i]
            if count and not sequence.finished:
                tokens = p.tokens[i][:count]
                outcomes[sequence.key, count - 1, tokens[-1]] = tokens
        return outcomes
