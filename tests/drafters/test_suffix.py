"""Drafts of the longest suffix against brute force over the plain texts."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from kits.draft import requested
from kits.native import needs_kernels
from kits.suffixes import suffix_config

from paceline.core.sequence import Sequence
from paceline.core.tree import TokenTree
from paceline.draft.base import StepFeatures
from paceline.draft.ngram import log_trust
from paceline.draft.suffix import SuffixDrafter

pytestmark = needs_kernels
words = st.lists(st.integers(0, 2), min_size=1, max_size=30)
# Loops are what models fall into, and where an automaton's cost would run away.
loops = st.lists(st.integers(0, 2), min_size=1, max_size=4).map(lambda cycle: (cycle * 40)[:40])
text = st.one_of(words, loops)
corpora = st.lists(text, min_size=1, max_size=4)


def occurrences(corpus: list[list[int]], run: list[int]) -> int:
    return sum(t[i : i + len(run)] == run for t in corpus for i in range(len(t) - len(run) + 1))


def followers(corpus: list[list[int]], context: list[int], max_match: int) -> tuple[int, dict[int, int]]:
    """The longest suffix of the context that something follows: its length, and what follows how often."""
    for n in range(min(max_match, len(context)), 0, -1):
        counts = {c: occurrences(corpus, [*context[len(context) - n :], c]) for c in range(4)}
        if any(counts.values()):
            return n, {c: k for c, k in counts.items() if k}
    return 0, {}


def drafter(**options) -> SuffixDrafter:
    return SuffixDrafter(suffix_config(**{"min_prob": 1e-6, "reach": 100.0, **options}))


def view(tokens: list[int], key: int = 0, prompt_len: int = 0) -> Sequence:
    return Sequence(key=key, tokens=tokens, prompt_len=prompt_len, sampler=None)


def drafted(drafts: SuffixDrafter, seq: Sequence, budget: int, max_depth: int) -> TokenTree:
    return drafts.draft(requested([(seq, budget, max_depth)]))[0]


@given(text, st.integers(1, 5), st.integers(1, 3), st.sampled_from([1e-6, 0.3, 0.6, 1.0]), st.integers(0, 8))
def test_chain_follows_the_most_frequent_continuation(tokens, max_match, min_match, min_prob, depth):
    min_match = min(min_match, max_match)
    drafts = drafter(max_match=max_match, min_match=min_match, min_prob=min_prob, depth=6)
    proposal = drafted(drafts, view(tokens), depth, 7)

    context, chance, matched = list(tokens), 1.0, 0
    for depth_, (token, score) in enumerate(zip(proposal.tokens, proposal.scores, strict=True), start=1):
        length, counts = followers([tokens], context, max_match)
        matched = matched or length
        score -= log_trust(matched, depth_)
        assert length >= min_match
        assert counts[token] == max(counts.values())
        chance *= counts[token] / sum(counts.values())
        assert math.isclose(math.exp(score), chance) and chance >= min_prob * (1 - 1e-9)
        context.append(token)
    assert proposal.parents == list(range(len(proposal)))
    assert len(proposal) <= min(depth, 6)
    if len(proposal) < min(depth, 6):  # it stopped for a reason
        length, counts = followers([tokens], context, max_match)
        assert length < min_match or chance * max(counts.values()) / sum(counts.values()) < min_prob * (1 + 1e-9)


def finish(drafts: SuffixDrafter, output: list[int], prompt: tuple[int, ...] = (), key: int = -1) -> None:
    seq = view([*prompt, *output], key, len(prompt))
    drafts.observe(StepFeatures([seq], [output]))
    drafts.release([key])


def test_earlier_outputs_are_drafted_from_but_not_their_prompts():
    drafts = drafter()
    finish(drafts, [10, 11, 12, 13], prompt=(20, 21, 22))
    assert drafted(drafts, view([9, 10, 11], 1), 8, 8).tokens == [12, 13]
    assert drafted(drafts, view([9, 20, 21], 2), 8, 8).tokens == []


@given(st.lists(st.lists(st.integers(0, 5), min_size=0, max_size=40), max_size=12), st.integers(0, 50))
def test_shared_memory_stays_within_its_limit_and_keeps_the_newest(outputs, limit):
    drafts = drafter(max_tokens=limit, max_match=8)
    for output in outputs:
        finish(drafts, output)
        assert drafts.texts.size <= limit
        kept = output[-(limit // 2) :] if limit // 2 else []
        if len(kept) > 1:
            assert drafts.texts.followers(7, kept[:-1], [], 1)[0] == min(len(kept) - 1, 8)
            drafts.texts.drop(7)


@given(corpora, text, st.lists(st.integers(0, 3), max_size=3), st.integers(1, 4), st.sampled_from([1e-6, 0.3]))
def test_followers_of_a_text_and_a_path_are_those_of_a_search(corpus, tokens, path, max_match, min_prob):
    """Of the own text or of earlier outputs, whichever matches more of the last tokens; shares are counted."""
    drafts = drafter(max_match=max_match, min_prob=min_prob)
    for output in corpus:
        finish(drafts, output)
    own, earlier = ([*followers(texts, tokens + path, max_match)] for texts in ([tokens], corpus))
    shares = {}
    for length, counts in (own, earlier):
        frequent = {c: k / sum(counts.values()) for c, k in counts.items() if k / sum(counts.values()) >= min_prob}
        if frequent and length > shares.get("length", 0):
            shares = {"length": length, **frequent}
    length = shares.pop("length", 0)
    wanted = sorted(((math.log(s) + log_trust(length, 1), -c) for c, s in shares.items()), reverse=True)
    found = drafts.continuations(view(tokens), path, 4)
    assert [token for token, _ in found] == [-c for _, c in wanted]
    assert all(math.isclose(a, b) for (_, a), (b, _) in zip(found, wanted, strict=True))


class Search:
    """What a suffix drafter drafts, by a search of all texts."""

    def __init__(self, config: Any) -> None:
        self.config, self.generations = config, list[list[list[int]]]()

    def remember(self, output: list[int]) -> None:
        half = self.config.max_tokens // 2
        output = output[-half:] if half else []
        if not output:
            return
        if not self.generations or sum(map(len, self.generations[0])) + len(output) > half:
            self.generations = [[], *self.generations][:2]
        self.generations[0].append(output)

    def draft(self, tokens: list[int], nodes: int, deepest: int) -> tuple[list[int], list[float]]:
        config, best, best_score = self.config, ([], []), 0.0
        for corpus, whole in ([[tokens], tokens[:-1]], *((g, None) for g in self.generations)):
            runs = [whole] if whole is not None else corpus  # a match in the own text ends before its last token
            lengths = range(min(config.max_match, len(tokens)), 0, -1)
            matched = next((n for n in lengths if occurrences(runs, tokens[-n:])), 0)
            limit = min(nodes, max(1, int(config.reach * matched)))
            if matched < config.min_match or limit <= best_score:
                continue
            chain, chances = self.chain(corpus, tokens[-matched:], min(limit, deepest))
            if sum(map(math.exp, chances)) > best_score:
                best_score = sum(map(math.exp, chances))
                best = chain, [c + log_trust(matched, d) for d, c in enumerate(chances, start=1)]
        return best

    def chain(self, corpus: list[list[int]], run: list[int], depth: int) -> tuple[list[int], list[float]]:
        config, chain, chances, chance = self.config, list[int](), list[float](), 1.0
        while len(chain) < depth:
            while run and not (after := self.after(corpus, run)):
                run = run[1:]
            if len(run) < config.min_match:
                break
            token = max(reversed(after), key=lambda one: after[one])  # of equals the one that was first seen last
            chance *= after[token] / sum(after.values())
            if chance < config.min_prob:
                break
            chain.append(token)
            chances.append(math.log(chance))
            run = [*run, token][-config.max_match :]
        return chain, chances

    @staticmethod
    def after(corpus: list[list[int]], run: list[int]) -> dict[int, int]:
        """How often each token follows a run, in the order in which they did first."""
        n = len(run)
        return dict(Counter(t[i + n] for t in corpus for i in range(len(t) - n) if t[i : i + n] == run))


moves = st.lists(st.tuples(st.integers(0, 2), text, st.booleans()), min_size=1, max_size=12)
numbers = st.tuples(st.integers(1, 9), st.integers(1, 2), st.integers(0, 60), st.sampled_from([0.5, 1.0, 4.0, 100.0]))


@settings(max_examples=60, deadline=None)
@given(moves, numbers, st.sampled_from([1e-6, 0.1, 0.4]))
def test_drafts_of_several_texts_are_those_of_a_search(moves, numbers, min_prob):
    """Texts grow by any number of tokens between calls, end and are remembered."""
    depth, shortest, memory, reach = numbers
    lengths = {"min_match": shortest, "max_match": shortest + 3}
    drafts = drafter(depth=depth, max_tokens=memory, reach=reach, min_prob=min_prob, **lengths)
    search, views = Search(drafts.config), [view([key], key, 1) for key in range(3)]
    for key, tokens, ends in moves:
        views[key].tokens.extend(tokens)
        rows = [(v, 1 + (len(v.tokens) + key) % 9, 1 + (len(tokens) + v.key) % 4) for v in views]
        for (v, budget, most), found in zip(rows, drafts.draft(requested(rows)), strict=True):
            wanted, scores = search.draft(v.tokens, min(depth, budget), min(depth, most))
            assert found.tokens == wanted
            assert all(math.isclose(a, b, abs_tol=1e-9) for a, b in zip(found.scores, scores, strict=True))
        if ends:
            search.remember(views[key].tokens[1:])
            drafts.release([key, 77])
            views[key] = view([key], key, 1)
