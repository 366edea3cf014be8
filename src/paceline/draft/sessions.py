"""Draft sessions: drafting below nodes of a tree that the target has not decided on yet.

A round that drafts while the target computes requests levels, not drafts. A session holds one sequence's text and
the nodes drafted below it, until the verdict states which of them the text continues with:

    open      the sequence, as plain data
    grow      one level: nodes that are given with their tokens, and drafted children below them and below others
    reroot    the text continues to a drafted node: nodes below it stay, all others go
    commit    the text continues with other tokens: every node goes
    close     the sequence ended or was preempted

All messages and answers are plain data, so that sessions can be served in another process as well. Node 0 is the
root, the text's last token, whichever that is; other nodes have the number that they were given while they are there.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from ..core.grammar import Matcher
from ..core.sampling import SamplingParams

if TYPE_CHECKING:
    from ..core.sequence import Sequence

ROOT = 0


@dataclass(frozen=True, slots=True)
class Opening:
    """A sequence as a session begins with it."""

    key: int  # unique while the session is open
    tokens: abc.Sequence[int]  # prompt and output so far
    prompt_len: int
    params: SamplingParams
    seed: int  # with ``sample_index`` the noise of the target's own choices
    sample_index: int
    max_len: int | None = None  # prompt and output together cannot grow beyond this
    prediction: abc.Sequence[int] = ()  # text that the output is likely to repeat
    sources: frozenset[int] | None = None  # marks of the drafters that are called for it; None: all
    matcher: Matcher | None = None  # of the grammar in ``params``; of this session alone

    @staticmethod
    def of(view: Sequence) -> Opening:
        """Return the opening of a running sequence, as it is now."""
        sampler = view.sampler
        rules = sampler.params, sampler.seed, sampler.sample_index
        wishes = view.max_len, view.prediction, view.sources
        matcher = None if sampler.matcher is None else sampler.matcher.copy()
        return Opening(view.key, [*view.tokens], view.prompt_len, *rules, *wishes, matcher)


@dataclass(frozen=True, slots=True)
class Expand:
    """One level that a session's tree is to grow by."""

    key: int
    added: abc.Sequence[tuple[int, int]] = ()  # parent and token of nodes to add, below which children are drafted
    expand: abc.Sequence[int] = ()  # nodes that are there already below which children are drafted
    width: int = 1  # children of each
    # For `AsyncSessions.begin`: of each added, then each expanded node, the levels wanted below it; none: one.
    levels: abc.Sequence[int] = ()


@dataclass(slots=True)
class NewNodes:
    """Describe what a session's tree has grown by."""

    added: list[int] = field(default_factory=list)  # nodes of `Expand.added`; a child with that token is used again
    parents: list[int] = field(default_factory=list)  # of each drafted child
    nodes: list[int] = field(default_factory=list)  # its number
    tokens: list[int] = field(default_factory=list)
    log_q: list[float] = field(default_factory=list)  # of its token, among those that the sequence's rules allow
    sources: list[int] = field(default_factory=list)  # mark of the drafter that proposed it

    def add(self, parent: int, node: int, token: int, log_q: float, source: int) -> None:
        """Append a drafted child."""
        self.parents.append(parent)
        self.nodes.append(node)
        self.tokens.append(token)
        self.log_q.append(log_q)
        self.sources.append(source)


class DraftSessions(Protocol):
    """Sessions of several sequences, which grow together. A level costs one pass, whatever the number of nodes."""

    def open(self, opening: Opening) -> None:
        """Begin with a sequence."""

    def grow(self, asks: abc.Sequence[Expand]) -> list[NewNodes]:
        """One level for each of several sequences; nodes that cannot be expanded (for want of room) get no child.

        Raises:
            KeyError: a sequence, or a node, that is not there.
        """

    def reroot(self, key: int, node: int) -> None:
        """Append the tokens from below the root to ``node``, which becomes the root, to the text."""

    def commit(self, key: int, tokens: abc.Sequence[int]) -> None:
        """Append ``tokens``, drafted or not, to the text; no node stays but the last of them, the root."""

    def close(self, key: int) -> None:
        """Drop all state of a sequence."""

    def forget(self) -> None:
        """Drop what was kept of sequences that are closed."""


class Pending(Protocol):
    """The levels of a growth that have arrived."""

    levels: list[dict[int, NewNodes]]  # by level, then by sequence; finished sequences are missing
    times: list[tuple[float, float]]  # by level: when it was drafted, by `time.perf_counter` of this host
    done: bool  # nothing more will come


@runtime_checkable
class AsyncSessions(DraftSessions, Protocol):
    """Sessions served elsewhere: growths continue there by themselves, a level at a time.

    `commit`, `reroot` and `close` of a sequence call off the rest of its growths. Whatever is lost on the way, or
    comes too late, raises; then all sessions are gone, and are opened again once `ready` returns true.
    """

    def ready(self) -> bool:
        """Return whether sessions may be opened now.

        Raises:
            ConfigError: they never will be.
        """

    def begin(self, asks: abc.Sequence[Expand]) -> Pending:
        """Begin to grow, each of another sequence and with a node or more, and wait for nothing."""

    def look(self) -> None:
        """Take what came of all growths."""

    def wait(self, growing: Pending, first: bool = False) -> None:
        """Wait until a growth is done, or for its first level alone."""
