"""Suffix decoding: continue the longest run of last tokens seen before, here or in earlier outputs.

A suffix automaton over the sequence's own tokens and one over the outputs of earlier requests answer two
questions in constant time: which is the longest suffix seen before, and how often did each token follow it.

Sources: SuffixDecoding (Oliaro et al., arXiv 2411.04975), sections 3.1-3.3, for the pattern lookup, the score of a
draft and its size limit; the automaton is that of Blumer et al. (1985). Differences: an automaton in place of a suffix
tree, which keeps contexts of up to ``max_match`` tokens only: that bounds the work a token and makes repetitive text
free; the likeliest chain is drafted, no tree.
"""

from __future__ import annotations

import math
from collections import abc, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from .. import kernels
from ..core.sequence import Sequence
from ..core.tree import TokenTree
from ..kernels.lookup import SuffixTexts
from .base import DrafterSpec, DraftRequest, StepFeatures
from .ngram import log_trust
from .registry import DrafterConfig, DrafterContext, option
from .text_sessions import LookUp

if TYPE_CHECKING:
    import torch

    from ..model.decoder import TargetInfo


@dataclass(frozen=True, kw_only=True)
class SuffixConfig(DrafterConfig):
    """Suffix decoding: continues the longest match in the prompt, the output and earlier outputs. Needs no model."""

    kind: ClassVar[str] = "suffix"
    min_match: ClassVar[int] = 1  # shortest run of last tokens that counts as a match
    max_match: ClassVar[int] = 32  # longest run of last tokens that is distinguished
    reach: ClassVar[float] = 4.0  # tokens drafted at most for each matched token
    min_prob: ClassVar[float] = 0.1  # a draft stops where its estimated chance falls below

    depth: int = option(16, help="deepest token drafted", minimum=1, maximum=1024)
    max_tokens: int = option(
        100_000, help="tokens of earlier outputs remembered, about 1 kB each; 0 remembers none", minimum=0
    )

    def build(self, context: DrafterContext) -> SuffixDrafter:
        return SuffixDrafter(self)


class SuffixAutomaton:
    """All runs of up to ``max_match + 1`` tokens of some texts, with how often each occurs.

    A state stands for runs that occur at exactly the same places; the longest has ``length[state]`` tokens,
    the shortest ``length[link[state]] + 1``. ``edges[state]`` are the tokens seen next. State 0 is the empty run.

    Once the last ``max_match`` tokens were seen before, the text is continued from that shorter run in place of
    the whole of it. Runs beyond ``max_match + 1`` are then incomplete, shorter ones stay exact, and the chain of
    links from the current state, which every append walks, has at most ``max_match + 1`` states.
    """

    __slots__ = ("_last", "count", "edges", "length", "link", "max_match", "size")

    def __init__(self, max_match: int) -> None:
        self.max_match = max_match
        self.length = [0]
        self.link = [-1]
        self.edges: list[dict[int, int]] = [{}]
        self.count = [0]  # occurrences of the state's runs; not kept for the empty run
        self.size = 0  # tokens taken in
        self._last = 0

    def begin(self) -> None:
        """Begin a new text: no run crosses the boundary."""
        self._last = 0

    def extend(self, tokens: abc.Sequence[int]) -> None:
        """Append tokens to the current text; at most O(max_match) a token, O(1) amortised on ordinary text."""
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        """Append one token to the current text."""
        link, count = self.link, self.count
        current = state = self._step(token)
        while state > 0:
            count[state] += 1
            state = link[state]
        # Counted in full above; only the next append starts from the shorter run.
        self._last = link[current] if self.length[link[current]] >= self.max_match else current
        self.size += 1

    def _step(self, token: int) -> int:
        """Return the state of the current run with ``token`` appended, made where it is new."""
        edges, length, link = self.edges, self.length, self.link
        state = self._last
        child = edges[state].get(token)
        if child is not None:  # a later text repeats an earlier one
            return child if length[child] == length[state] + 1 else self._split(state, token, child)
        created = self._add(length[state] + 1, 0, {}, 0)
        while state >= 0 and token not in edges[state]:
            edges[state][token] = created
            state = link[state]
        if state >= 0:
            child = edges[state][token]
            link[created] = child if length[child] == length[state] + 1 else self._split(state, token, child)
        return created

    def _split(self, state: int, token: int, original: int) -> int:
        """Part the runs of ``original`` that end a run of ``state`` plus ``token`` from its longer ones."""
        edges, link = self.edges, self.link
        short = self._add(self.length[state] + 1, link[original], edges[original].copy(), self.count[original])
        link[original] = short
        while state >= 0 and edges[state].get(token) == original:
            edges[state][token] = short
            state = link[state]
        return short

    def _add(self, length: int, link: int, edges: dict[int, int], count: int) -> int:
        self.length.append(length)
        self.link.append(link)
        self.edges.append(edges)
        self.count.append(count)
        return len(self.length) - 1

    def follow(self, state: int, matched: int, token: int) -> tuple[int, int]:
        """Return the longest suffix of (a run of ``matched`` tokens at ``state``) + ``token`` that occurs.

        Returns:
            Its state and its length, at most ``max_match``; (0, 0) where not even the token occurs.
        """
        edges, length, link = self.edges, self.length, self.link
        while state > 0 and token not in edges[state]:
            state = link[state]
            matched = length[state]
        state = edges[state].get(token, -1)
        return self.settle(state, min(matched + 1, self.max_match)) if state > 0 else (0, 0)

    def settle(self, state: int, matched: int) -> tuple[int, int]:
        """Return where a run of ``matched`` tokens is now, after states were split or the run was shortened."""
        length, link = self.length, self.link
        while state > 0 and length[link[state]] >= matched:
            state = link[state]
        return state, matched

    def continued(self, state: int, matched: int) -> tuple[int, int]:
        """Return the longest suffix of a context that something follows (a text's end has no next token)."""
        while state > 0 and not self.edges[state]:
            state = self.link[state]
            matched = self.length[state]
        return state, matched

    def most_frequent(self, state: int) -> tuple[int, float]:
        """Return the token that follows a state's runs most often, and its share; of equals the one seen first last."""
        edges, count = self.edges[state], self.count
        if len(edges) == 1:
            return next(iter(edges)), 1.0
        best, highest, total = -1, 0, 0
        for token, target in edges.items():
            total += count[target]
            if count[target] >= highest:
                best, highest = token, count[target]
        return best, highest / total

    def longest_suffix(self, tokens: abc.Sequence[int]) -> tuple[int, int]:
        """State and length of the longest suffix of ``tokens`` that occurs, up to ``max_match`` tokens."""
        state = matched = 0
        for token in tokens[-self.max_match :]:
            state, matched = self.follow(state, matched, token)
        return state, matched


@dataclass(slots=True)
class _Match:
    """The longest suffix of a sequence in one automaton, as of ``seen`` tokens of the one and ``size`` of the other."""

    automaton: SuffixAutomaton
    state: int = 0
    matched: int = 0
    seen: int = 0
    size: int = 0

    def catch_up(self, tokens: abc.Sequence[int]) -> None:
        """Against a foreign automaton: follow the new tokens, or start over if the automaton has grown."""
        automaton = self.automaton
        if self.size != automaton.size or len(tokens) - self.seen > automaton.max_match:
            self.state, self.matched = automaton.longest_suffix(tokens)
        else:
            for token in tokens[self.seen :]:
                self.state, self.matched = automaton.follow(self.state, self.matched, token)
        self.seen, self.size = len(tokens), automaton.size


class _Sequence:
    """One running sequence: its own automaton and its matches in the shared ones."""

    __slots__ = ("own", "prompt_len", "shared", "tokens")

    def __init__(self, seq: Sequence, max_match: int) -> None:
        self.tokens = seq.tokens  # the live list: at release it holds the whole output
        self.prompt_len = seq.prompt_len
        self.own = _Match(SuffixAutomaton(max_match))
        self.shared: list[_Match] = []

    def catch_up(self, tokens: list[int]) -> None:
        """Take in new tokens: first match, then append, so that a match always ends before the last token."""
        self.tokens = tokens
        cursor, automaton = self.own, self.own.automaton
        for token in tokens[cursor.seen :]:
            cursor.state, cursor.matched = automaton.follow(cursor.state, cursor.matched, token)
            automaton.append(token)
            cursor.state, cursor.matched = automaton.settle(cursor.state, cursor.matched)
        cursor.seen = len(tokens)

    def matches(self, generations: abc.Sequence[SuffixAutomaton]) -> Iterator[_Match]:
        """Return the own match, then those in the shared automata, brought up to date when requested."""
        yield self.own
        by_automaton = {id(match.automaton): match for match in self.shared}
        self.shared = [by_automaton.get(id(automaton)) or _Match(automaton) for automaton in generations]
        for match in self.shared:
            match.catch_up(self.tokens)
            yield match


class SharedOutputs:
    """Outputs of earlier requests, in two generations: when the younger is half the limit, the older is dropped.

    Nothing is ever rebuilt, and between half of the limit and all of it is remembered.
    """

    def __init__(self, max_tokens: int, max_match: int) -> None:
        self._half = max_tokens // 2
        self._max_match = max_match
        self.generations: deque[SuffixAutomaton] = deque(maxlen=2)  # younger first

    @property
    def size(self) -> int:
        """Tokens remembered."""
        return sum(automaton.size for automaton in self.generations)

    def add(self, output: abc.Sequence[int]) -> None:
        """Remember an output; of one longer than half of the limit, its last part."""
        output = output[-self._half :] if self._half else ()
        if not output:
            return
        if not self.generations or self.generations[0].size + len(output) > self._half:
            self.generations.appendleft(SuffixAutomaton(self._max_match))
        self.generations[0].begin()
        self.generations[0].extend(output)


class SuffixDrafter(LookUp):
    """Drafts the most frequent continuations of the longest suffix seen before."""

    def __init__(self, config: SuffixConfig) -> None:
        self.config = config
        self.spec = DrafterSpec(name=config.kind, default_budget=config.depth, ahead=True)
        self.shared = SharedOutputs(config.max_tokens, config.max_match)
        self._sequences: dict[int, _Sequence] = {}
        self._texts: SuffixTexts | None = None  # in their place, where chains are looked up by compiled code
        self._outputs: dict[int, tuple[list[int], int]] = {}  # then: live tokens of each sequence, and of its prompt

    def bind(self, target: TargetInfo, max_sequences: int, pool_tokens: int, device: torch.device) -> None:
        """Look up in compiled code, where the target runs on it."""
        config = self.config
        super().bind(target, max_sequences, pool_tokens, device)
        if kernels.in_use() is not None:
            lengths = config.min_match, config.max_match
            self._texts = SuffixTexts(*lengths, config.reach, config.min_prob, config.max_tokens)

    def continuations(self, sequence: Sequence, path: abc.Sequence[int], width: int) -> list[tuple[int, float]]:
        """Return what follows the longest suffix of text and path, of the own text or the shared outputs."""
        self._texts = None  # a drafter is used in one of the two ways
        state = self._sequence(sequence)
        state.catch_up(sequence.tokens)
        best: list[tuple[float, int]] = []  # -chance and token
        longest = self.config.min_match - 1
        for match in state.matches(self.shared.generations):
            place, length = match.state, match.matched
            for token in path:
                place, length = match.automaton.follow(place, length, token)
            place, length = match.automaton.continued(place, length)
            if length > longest and (followers := self._followers(match.automaton, place)):
                best, longest = followers, length
        return [(token, math.log(-negative) + log_trust(longest, 1)) for negative, token in sorted(best)[:width]]

    def observe(self, step: StepFeatures) -> None:
        """Note the running sequences: an output is remembered even if its sequence was never drafted for."""
        for seq in step.sequences:
            if self._texts is None:
                self._sequence(seq).tokens = seq.tokens
            else:
                self._outputs[seq.key] = seq.tokens, seq.prompt_len

    def draft(self, want: DraftRequest) -> list[TokenTree]:
        """`draft_one` for all, in one compiled call where there is one."""
        if self._texts is None:
            return super().draft(want)
        most, texts = self.config.depth, []
        for seq, budget, max_depth in want.rows():
            if budget > 0 and max_depth > 0:
                self._outputs[seq.key] = seq.tokens, seq.prompt_len
                texts.append((seq.key, seq.tokens, min(most, budget), min(most, max_depth)))
        drafts, trees = iter(self._texts.draft(texts) if texts else ()), list[TokenTree]()
        for _, budget, max_depth in want.rows():
            _, tokens, scores = next(drafts) if budget > 0 and max_depth > 0 else (0, [], [])
            trees.append(TokenTree(tokens, [*range(len(tokens))], scores))
        return trees

    def draft_one(self, seq: Sequence, budget: int, max_depth: int) -> TokenTree:
        """Return the best scored draft of the own text and the shared outputs; empty where nothing matches."""
        config = self.config
        depth = min(config.depth, budget, max_depth)
        best, best_score, matched = TokenTree(), 0.0, 0
        if depth <= 0:
            return best
        state = self._sequence(seq)
        state.catch_up(seq.tokens)
        for match in state.matches(self.shared.generations):
            limit = min(depth, max(1, int(config.reach * match.matched)))
            if match.matched < config.min_match or limit <= best_score:  # a node's score is 1 at most
                continue
            drafted = self._chain(match, limit)
            # Expected number of accepted tokens: the score of a speculation tree (SuffixDecoding).
            if (score := sum(map(math.exp, drafted.scores))) > best_score:
                best, best_score, matched = drafted, score, match.matched
        for i, depth in enumerate(best.depths()[1:]):  # frequencies do not depend on the length of the match
            best.scores[i] += log_trust(matched, depth)
        return best

    def release(self, keys: abc.Sequence[int]) -> None:
        """Drop the state of these sequences but remember their outputs.

        One that was preempted comes back under the same key and is remembered once more at its end: its first
        part then counts twice, which changes frequencies a little and nothing else.
        """
        for key in keys:
            ended = self._sequences.pop(key, None)
            if ended is not None:
                self.shared.add(ended.tokens[ended.prompt_len :])
            tokens, prompt_len = self._outputs.pop(key, ([], 0))
            if self._texts is not None:
                self._texts.drop(key)
                self._texts.remember(tokens[prompt_len:])

    def forget(self) -> None:
        """Forget the outputs of earlier requests."""
        if self._texts is not None:
            self._texts.forget()
        self.shared = SharedOutputs(self.config.max_tokens, self.config.max_match)

    def _sequence(self, seq: Sequence) -> _Sequence:
        state = self._sequences.get(seq.key)
        if state is None:
            state = self._sequences[seq.key] = _Sequence(seq, self.config.max_match)
        return state

    def _chain(self, match: _Match, depth: int) -> TokenTree:
        """Follow the most frequent next token; stop where the path's frequency falls below ``min_prob``."""
        automaton, state, matched = match.automaton, match.state, match.matched
        proposal, chance = TokenTree(), 1.0
        while len(proposal) < depth:
            state, matched = automaton.continued(state, matched)
            if matched < self.config.min_match:
                break
            token, share = automaton.most_frequent(state)
            chance *= share
            if chance < self.config.min_prob:
                break
            proposal.add(len(proposal), token, math.log(chance))
            state, matched = automaton.settle(automaton.edges[state][token], min(matched + 1, automaton.max_match))
        return proposal

    def _followers(self, automaton: SuffixAutomaton, state: int) -> list[tuple[float, int]]:
        """(-chance, token) of what follows a state's runs, but what is rarer than ``min_prob``."""
        edges, count = automaton.edges[state], automaton.count
        total = sum(count[target] for target in edges.values())
        shares = [(count[target] / total, token) for token, target in edges.items()]
        return [(-share, token) for share, token in shares if share >= self.config.min_prob]
