"""The branch-complete rollout: a chain below every token that a pass may emit next, a level at a time.

    window    w1 - w2 - w3          verified by the pass under way
    position  0    1    2    3      after so many accepted tokens
    branches  c - x - x - x         one for each candidate of each position, all advanced together

Source: Mirror Speculative Decoding, section 3.1, eq. 8 and figure 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field

from ...core.tree import TokenTree
from ...draft.sessions import ROOT, AsyncSessions, Expand, NewNodes, Pending

Outcome = tuple[int, int, int]  # of a pass: a sequence, its accepted tokens, and the token that follows


@dataclass(slots=True)
class Branch:
    """A chain below a token that a pass may emit next, or below the root."""

    key: int  # of the sequence
    tip: int  # node below which the next token is drafted; before ``token`` has a node, that which it follows
    levels: int  # tokens wanted
    token: int = -1  # that may be emitted; -1: a chain below the root
    place: int = -1  # of it: after so many accepted tokens
    node: int = ROOT  # of ``token``
    stuck: bool = False  # it goes no further: want of room, or no token is allowed
    chain: TokenTree = field(default_factory=TokenTree)

    @property
    def outcome(self) -> Outcome:
        """Return the outcome that it is prepared for."""
        return self.key, self.place, self.token


class Rollout:
    """Chains of several sequences that grow together, one batched level a call, wherever their sessions are.

    Nobody else may use the sessions between `start` and `finish`. The verdict calls off the rest of a growth, once
    the nodes are known that it is about; missing parts of the branches that are reused are requested once more.

    Args:
        sessions: of the drafter.
        vocab_size: of the target: nothing else comes out of a drafter that is to be trusted.
    """

    def __init__(self, sessions: AsyncSessions, vocab_size: int) -> None:
        self.sessions, self._vocab = sessions, vocab_size
        self._given: dict[int, list[Branch]] = {}  # by sequence: whose tokens have no nodes yet
        self._open: list[Branch] = []
        self._found: dict[Outcome, Branch] = {}
        self.fresh: dict[int, Branch] = {}  # by sequence: chains below the root
        self._growing: Pending | None = None
        self._taken = 0  # levels of it

    def prepare(self, branches: Iterable[Branch]) -> None:
        """Branches below tokens that may be emitted."""
        for branch in branches:
            self._given.setdefault(branch.key, []).append(branch)

    def begin(self, key: int, levels: int) -> None:
        """Begin a chain below the root."""
        self.fresh[key] = Branch(key, ROOT, levels)
        self._open.append(self.fresh[key])

    # -- drafting

    def run(self) -> None:
        """Draft all of it now.

        Raises what the drafter raises, and ValueError where it answers nonsense; so do `start` and `finish`.
        """
        self.start()
        self._end()

    def start(self) -> None:
        """Have it drafted, now or from now on."""
        self._growing, self._taken = None, 0
        if asks := self.asks():
            self._growing = self.sessions.begin(asks)

    def finish(self, outcomes: Mapping[Outcome, Sequence[int]], ended: Iterable[int]) -> dict[Outcome, Branch]:
        """Return the verdict: waits for what is reused, and for nothing else.

        Args:
            outcomes: the outcomes that came true, and their tokens.
            ended: sequences that have ended.

        Returns:
            The branches that are reused; of the other outcomes nothing is drafted.
        """
        self._look(outcomes)
        reused = self._go_on(outcomes, ended)
        self._end()
        self._given, self._open = {}, []
        for branch in reused.values():  # what came true is wanted whole
            if not branch.stuck and len(branch.chain) < branch.levels:
                self._open.append(branch)
        self.run()
        return reused

    def _look(self, outcomes: Iterable[Outcome]) -> None:
        """Take what came, and at least the nodes of what was emitted."""
        self.sessions.look()
        self._take()
        unnumbered = {branch.outcome for rows in self._given.values() for branch in rows}
        if self._growing is not None and any(outcome in unnumbered for outcome in outcomes):
            self.sessions.wait(self._growing, first=True)
            self._take()

    def _go_on(self, outcomes: Mapping[Outcome, Sequence[int]], ended: Iterable[int]) -> dict[Outcome, Branch]:
        """Move the drafter on to the verdict, all branches of which it keeps or drops (section 3.1)."""
        reused = {}
        for key in ended:
            self.sessions.close(key)
        for outcome, tokens in outcomes.items():
            branch = self._found.get(outcome)
            if branch is None:
                self.sessions.commit(outcome[0], tokens)
            else:
                self.sessions.reroot(outcome[0], branch.node)
                reused[outcome] = branch
        return reused

    def _end(self) -> None:
        """Wait until nothing more comes."""
        if self._growing is not None:
            self.sessions.wait(self._growing)
            self._take()
            self._growing = None

    def _take(self) -> None:
        """Take the levels that came since the last call."""
        if self._growing is not None:
            levels = self._growing.levels[self._taken :]
            for level in levels:
                self.take(level)
            self._taken += len(levels)

    # -- levels

    def asks(self) -> list[Expand]:
        """Return the first level of everything."""
        asks = []
        for key, branches in self._by_key().items():
            added = self._given.get(key, ())
            levels = [branch.levels - len(branch.chain) for branch in [*added, *branches]]
            asks.append(Expand(key, [(b.tip, b.token) for b in added], [b.tip for b in branches], levels=levels))
        return asks

    def take(self, answers: Mapping[int, NewNodes]) -> None:
        """One level, by sequence; of those that are missing nothing came.

        Raises:
            ValueError: the drafter answers nonsense.
        """
        by_key, self._open = self._by_key(), []
        for key, branches in by_key.items():
            answer = answers.get(key)
            if answer is None:
                self._open += branches
                continue
            self._check(key, answer)
            begun = self._given.pop(key, [])
            for branch, node in zip(begun, answer.added, strict=True):
                branch.tip = branch.node = node
                self._found[branch.outcome] = branch
            self._append(branches + begun, answer)

    def _by_key(self) -> dict[int, list[Branch]]:
        by_key: dict[int, list[Branch]] = {key: [] for key in self._given}
        for branch in self._open:
            by_key.setdefault(branch.key, []).append(branch)
        return by_key

    def _append(self, branches: Sequence[Branch], answer: NewNodes) -> None:
        """Append to each branch what was drafted below its tip."""
        below = {parent: at for at, parent in reversed([*enumerate(answer.parents)])}
        for branch in branches:
            at, chain = below.get(branch.tip), branch.chain
            branch.stuck = at is None
            if at is None:
                continue
            branch.tip = answer.nodes[at]
            chain.add(len(chain), answer.tokens[at], chain.score(len(chain)) + answer.log_q[at])
            chain.sources.append(answer.sources[at])
            chain.numbers.append(branch.tip)
            if len(chain) < branch.levels:
                self._open.append(branch)

    def _check(self, key: int, answer: NewNodes) -> None:
        """Refuse a reply that is not an answer."""
        count = len(self._given.get(key, ()))
        columns: list[Sized] = [answer.parents, answer.nodes, answer.tokens, answer.log_q, answer.sources]
        if len(answer.added) != count or len({*map(len, columns)}) > 1:
            raise ValueError("an answer of another form than its question")
        if any(not 0 <= token < self._vocab for token in answer.tokens):
            raise ValueError("a drafted token lies outside the vocabulary")
