"""The branch-complete rollout: a chain below every token that a pass may say next, a level at a time.

    window    w1 - w2 - w3          verified by the pass under way
    position  0    1    2    3      after so many accepted tokens
    branches  c - x - x - x         one for each candidate of each position, all advanced together

Source: Mirror Speculative Decoding, section 3.1, eq. 8 and figure 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from ...drafters.sessions import ROOT, Ask, DraftSessions, Grown

Outcome = tuple[int, int, int]  # of a pass: a sequence, its accepted tokens, and the token that follows


@dataclass(slots=True)
class Chain:
    """Drafted tokens in a row, and the session's nodes that hold them."""

    nodes: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.nodes)

    def behind(self, place: int) -> int:
        """The node after so many of its tokens."""
        return self.nodes[place - 1] if place else ROOT


@dataclass(slots=True)
class Branch:
    """A chain below one candidate, or below the root."""

    key: int  # of the sequence
    tip: int  # node below which the next token is drafted
    levels: int  # tokens wanted
    outcome: Outcome | None = None  # that it is prepared for; None: a chain below the root
    candidate: int = -1  # node of the outcome's last token; -1: below the root
    whole: int = 0  # tokens wanted if the outcome comes true
    stuck: bool = False  # it goes no further: want of room, or no token is allowed
    prepared: int = 0  # tokens that were there at the verdict, if the outcome came true
    chain: Chain = field(default_factory=Chain)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token that may come next, and how many tokens are wanted below it."""

    parent: int
    token: int
    place: int  # position of the window
    levels: int
    whole: int = 0  # tokens wanted if it comes; 0: the same


class Rollout:
    """Chains of several sequences that grow together, one batched level a call.

    Args:
        sessions: of the drafter.
        vocab_size: of the target: nothing else comes out of a drafter that is to be trusted.
    """

    def __init__(self, sessions: DraftSessions, vocab_size: int) -> None:
        self.sessions, self._vocab = sessions, vocab_size
        self._given: dict[int, list[Candidate]] = {}
        self.open: list[Branch] = []
        self.found: dict[Outcome, Branch] = {}
        self.fresh: dict[int, Branch] = {}  # by sequence: chains below the root
        self.ms = 0.0  # that its levels took
        self.told_ms = 0.0  # that telling the drafter the verdict took
        self.nodes = 0  # drafted
        self._outcomes: frozenset[Outcome] | None = None  # after the verdict: those that came true

    def prepare(self, key: int, candidates: Sequence[Candidate]) -> None:
        """A branch for each candidate of a sequence."""
        if candidates:
            self._given[key] = [*candidates]

    def start(self, key: int, levels: int) -> None:
        """A chain below the root."""
        self.fresh[key] = Branch(key, ROOT, levels)
        self.open.append(self.fresh[key])

    def narrow(self, outcomes: Iterable[Outcome]) -> None:
        """The verdict: from the next level on nothing is drafted but for these. Safe from another thread."""
        self._outcomes = frozenset(outcomes)

    def lengthen(self, branches: Iterable[Branch]) -> None:
        """What came true is wanted whole: open the branches that were prepared for fewer levels than that."""
        for branch in branches:
            branch.levels = max(branch.levels, branch.whole)
            if branch not in self.open and not branch.stuck and 0 < len(branch.chain) < branch.levels:
                self.open.append(branch)

    def advance(self) -> bool:
        """Draft one level of everything. False: nothing is left to draft.

        Raises:
            ValueError: the drafter answers nonsense.
        """
        began = perf_counter()
        asks, _ = self.asks()
        if asks:
            grown = self.sessions.grow(asks)
            if len(grown) != len(asks):
                raise ValueError(f"{len(grown)} answers to {len(asks)} questions")
            self.take({ask.key: answer for ask, answer in zip(asks, grown, strict=True)})
        self.ms += (perf_counter() - began) * 1e3
        return bool(self.open)

    def asks(self) -> tuple[list[Ask], list[list[int]]]:
        """The next level of everything, and how many tokens are wanted below each of its nodes, given ones first."""
        if self._outcomes is not None:
            self._drop(self._outcomes)
        by_key = self._by_key()
        given = [self._given.get(key, []) for key in by_key]
        levels = [
            [*(c.levels for c in own), *(branch.levels - len(branch.chain) for branch in branches)]
            for branches, own in zip(by_key.values(), given, strict=True)
        ]
        asks = [
            Ask(key, [(c.parent, c.token) for c in own], [branch.tip for branch in branches], most=most)
            for (key, branches), own, most in zip(by_key.items(), given, levels, strict=True)
        ]
        return asks, levels

    def owes(self, outcomes: Iterable[Outcome]) -> bool:
        """Whether one of these was prepared for, and has no node yet."""
        given = {(key, c.place, c.token) for key, own in self._given.items() for c in own}
        return any(outcome in given for outcome in outcomes)

    def take(self, answers: Mapping[int, Grown]) -> None:
        """One level, by sequence; of those that are missing nothing came.

        Raises:
            ValueError: the drafter answers nonsense.
        """
        by_key, self.open = self._by_key(), []
        for key, branches in by_key.items():
            answer = answers.get(key)
            if answer is None:
                self.open += branches
                continue
            self._check(key, answer)
            self._append(branches + self._begun(key, answer), answer)
            self._given.pop(key, None)

    def _by_key(self) -> dict[int, list[Branch]]:
        found: dict[int, list[Branch]] = {key: [] for key in self._given}
        for branch in self.open:
            found.setdefault(branch.key, []).append(branch)
        return found

    def _drop(self, outcomes: frozenset[Outcome]) -> None:
        """Leave the branches of outcomes that did not come true as they are."""
        self.open = [branch for branch in self.open if branch.outcome in outcomes]
        given = {k: [c for c in own if (k, c.place, c.token) in outcomes] for k, own in self._given.items()}
        self._given = {key: own for key, own in given.items() if own}

    def _begun(self, key: int, answer: Grown) -> list[Branch]:
        begun = []
        for candidate, node in zip(self._given.get(key, ()), answer.given, strict=True):
            outcome = key, candidate.place, candidate.token
            whole = candidate.whole or candidate.levels
            branch = self.found[outcome] = Branch(key, node, candidate.levels, outcome, node, whole)
            begun.append(branch)
        return begun

    def _append(self, branches: Sequence[Branch], answer: Grown) -> None:
        """Append to each branch what was drafted below its tip."""
        below = {parent: at for at, parent in reversed([*enumerate(answer.parents)])}
        for branch in branches:
            at, before = below.get(branch.tip), len(branch.chain)
            while at is not None and len(branch.chain) < branch.levels:
                branch.chain.nodes.append(answer.nodes[at])
                branch.chain.tokens.append(answer.tokens[at])
                branch.tip = answer.nodes[at]
                at = below.get(branch.tip)
            self.nodes += len(branch.chain) - before
            branch.stuck = len(branch.chain) == before
            if not branch.stuck and len(branch.chain) < branch.levels:
                self.open.append(branch)

    def _check(self, key: int, answer: Grown) -> None:
        """Refuse what is no answer."""
        given = len(self._given.get(key, ()))
        if len(answer.given) != given or not len(answer.parents) == len(answer.nodes) == len(answer.tokens):
            raise ValueError("an answer of another form than its question")
        if any(not 0 <= token < self._vocab for token in answer.tokens):
            raise ValueError("a drafted token lies outside the vocabulary")


def share_rows(chances: Sequence[float], most: Sequence[int], rows: int, kept: float) -> list[int]:
    """Levels of each branch under one budget, so that what is prepared is worth most.

    A row on level l of a branch is of use where its outcome comes true and the l tokens in front of it are accepted:
    the likeliest rows are taken. Of equals the earlier branch's.

    Args:
        chances: [branches] of the outcomes.
        most: [branches] levels that are wanted at most.
        rows: of all branches together.
        kept: chance of a drafted token to be accepted after those in front of it.

    Returns:
        [branches] levels, 0 for those that are not worth a row.
    """
    worth = [(chance * kept**level, branch) for branch, chance in enumerate(chances) for level in range(most[branch])]
    levels = [0] * len(chances)
    for _, branch in sorted(worth, key=lambda one: (-one[0], one[1]))[:rows]:
        levels[branch] += 1
    return levels


def go_on(rollout: Rollout, said: Mapping[Outcome, Sequence[int]], ended: Iterable[int]) -> dict[Outcome, Branch]:
    """Let the drafter go on to what was said, all branches of which it keeps or drops (section 3.1).

    Args:
        rollout: what was prepared.
        said: the outcomes that came true, and their tokens.
        ended: sequences that have ended.

    Returns:
        The branches that are reused; of the other outcomes nothing is drafted.
    """
    reused, began = {}, perf_counter()
    for key in ended:
        rollout.sessions.close(key)
    for outcome, tokens in said.items():
        branch = rollout.found.get(outcome)
        if branch is None:
            rollout.sessions.commit(outcome[0], tokens)
        else:
            rollout.sessions.reroot(outcome[0], branch.candidate)
            branch.prepared = len(branch.chain)
            reused[outcome] = branch
    rollout.told_ms = (perf_counter() - began) * 1e3
    return reused
