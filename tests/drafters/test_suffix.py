"""The suffix automaton and its drafts against brute force over the plain texts."""

from __future__ import annotations

import itertools
import math

from hypothesis import given, settings
from hypothesis import strategies as st
from kits.draft import requested
from kits.native import needs_kernels
from kits.suffixes import suffix_config

from paceline import kernels
from paceline.core.sequence import Sequence
from paceline.draft.base import StepFeatures
from paceline.draft.ngram import log_trust
from paceline.draft.suffix import SuffixAutomaton, SuffixDrafter

words = st.lists(st.integers(0, 2), min_size=1, max_size=30)
# Loops are what models fall into, and where an automaton's cost would run away.
loops = st.lists(st.integers(0, 2), min_size=1, max_size=4).map(lambda cycle: (cycle * 40)[:40])
text = st.one_of(words, loops)
corpora = st.lists(text, min_size=1, max_size=4)


def automaton(corpus: list[list[int]], max_match: int) -> SuffixAutomaton:
    built = SuffixAutomaton(max_match)
    for tokens in corpus:
        built.begin()
        built.extend(tokens)
    return built


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


@given(corpora, st.integers(1, 4))
def test_counts_are_exact_for_every_run(corpus, max_match):
    built = automaton(corpus, max_match)
    for n in range(1, max_match + 2):
        for run in itertools.product(range(3), repeat=n):
            state = 0
            for token in run:
                state = built.edges[state].get(token, -1)
                if state < 0:
                    break
            assert (built.count[state] if state >= 0 else 0) == occurrences(corpus, list(run))


@given(text, st.integers(1, 5), st.integers(1, 3), st.sampled_from([1e-6, 0.3, 0.6, 1.0]), st.integers(0, 8))
def test_chain_follows_the_most_frequent_continuation(tokens, max_match, min_match, min_prob, depth):
    min_match = min(min_match, max_match)
    drafts = drafter(max_match=max_match, min_match=min_match, min_prob=min_prob, depth=6)
    proposal = drafts.draft_one(view(tokens), depth, 7)

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
    assert drafts.draft_one(view([9, 10, 11], 1), 8, 8).tokens == [12, 13]
    assert drafts.draft_one(view([9, 20, 21], 2), 8, 8).tokens == []


@given(st.lists(st.lists(st.integers(0, 5), min_size=0, max_size=40), max_size=12), st.integers(0, 50))
def test_shared_memory_stays_within_its_limit_and_keeps_the_newest(outputs, limit):
    drafts = drafter(max_tokens=limit, max_match=8)
    for output in outputs:
        finish(drafts, output)
        assert drafts.shared.size <= limit
        kept = output[-(limit // 2) :] if limit // 2 else []
        if kept:
            assert drafts.shared.generations[0].longest_suffix(kept)[1] == min(len(kept), 8)


def bound(**options) -> tuple[SuffixDrafter, SuffixDrafter]:
    """A drafter that looks up in compiled code, and one that does not."""
    assert kernels.library() is not None
    fast, slow = drafter(**options), drafter(**options)
    fast.bind(None, 8, 1000, "cpu")  # type: ignore[arg-type]  # it reads none of them
    assert fast._texts is not None and slow._texts is None
    return fast, slow


moves = st.lists(st.tuples(st.integers(0, 4), text, st.booleans()), min_size=1, max_size=24)
numbers = st.tuples(st.integers(1, 9), st.integers(1, 3), st.integers(0, 60), st.sampled_from([0.5, 1.0, 4.0, 100.0]))


@needs_kernels
@settings(max_examples=80, deadline=None)
@given(moves, numbers, st.sampled_from([1e-6, 0.1, 0.4]))
def test_compiled_look_ups_are_those_of_the_long_way(moves, numbers, min_prob):
    """Several texts at once, which grow by any number of tokens, end and are remembered; score for score."""
    depth, shortest, memory, reach = numbers
    options = {"min_match": shortest, "max_match": shortest + 3, "reach": reach, "min_prob": min_prob}
    fast, slow = bound(depth=depth, max_tokens=memory, **options)
    views = [view([key % 3], key, 1) for key in range(5)]
    for key, tokens, ends in moves:
        views[key].tokens.extend(tokens)
        for each in (fast, slow):
            each.observe(StepFeatures(views[:2], [[], []]))
        rows = [(v, 1 + (len(v.tokens) + key) % 9, depth - (len(tokens) + v.key) % 4) for v in views]
        found, wanted = fast.draft(requested(rows)), slow.draft(requested(rows))
        assert found == wanted
        if ends:
            fast.release([key, 77])
            slow.release([key, 77])
            views[key] = view([key % 3], key, 1)
            assert fast._texts is not None and fast._texts.size == slow.shared.size
    fast.forget()
    slow.forget()
    assert fast.draft(requested(rows)) == slow.draft(requested(rows))
