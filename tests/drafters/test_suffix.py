"""The suffix automaton and its drafts against brute force over the plain texts."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.draft import requested
from kits.native import needs_kernels
from kits.suffixes import suffix_config

from paceline import native
from paceline.core.errors import ConfigError
from paceline.drafters.base import DraftRequest, SequenceView, StepFeatures
from paceline.drafters.ngram import log_trust
from paceline.drafters.suffix import SuffixAutomaton, SuffixConfig, SuffixDrafter
from paceline.native.lookup import SuffixTexts

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


def view(tokens: list[int], key: int = 0, prompt_len: int = 0) -> SequenceView:
    return SequenceView(key=key, tokens=tokens, prompt_len=prompt_len, sampler=None)


def paths_of(proposal) -> list[list[int]]:
    paths: list[list[int]] = [[]]
    for node, (parent, token) in enumerate(zip(proposal.parents, proposal.tokens, strict=True)):
        assert parent <= node
        paths.append([*paths[parent], token])
    return paths[1:]


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


@given(corpora, text, st.integers(1, 5))
def test_longest_suffix_is_brute_force(corpus, tokens, max_match):
    state, matched = automaton(corpus, max_match).longest_suffix(tokens)
    candidates = range(min(max_match, len(tokens)), 0, -1)
    assert matched == next((n for n in candidates if occurrences(corpus, tokens[len(tokens) - n :])), 0)
    assert (state == 0) == (matched == 0)


@given(text, st.integers(1, 5))
def test_own_match_is_the_longest_suffix_seen_before(tokens, max_match):
    drafts = drafter(max_match=max_match)
    live: list[int] = []
    for token in tokens:
        live.append(token)
        drafts.draft_one(view(live), 1, 1)
        own = drafts._sequences[0].own
        assert own.matched == followers([live], live, max_match)[0]


def test_repetitive_text_is_free():
    built = automaton([[7] * 20_000, [1, 2, 3] * 5_000], max_match=16)
    assert len(built.length) < 100
    chain, state = 0, built._last
    while state > 0:
        chain, state = chain + 1, built.link[state]
    assert chain <= 17


@given(text, st.integers(1, 5), st.integers(1, 3), st.sampled_from([1e-6, 0.3, 0.6, 1.0]), st.integers(0, 8))
def test_chain_follows_the_most_frequent_continuation(tokens, max_match, min_match, min_prob, depth):
    min_match = min(min_match, max_match)
    drafts = drafter(max_match=max_match, min_match=min_match, min_prob=min_prob, depth=6)
    proposal = drafts.draft_one(view(tokens), depth, 7)

    context, chance = list(tokens), 1.0
    for depth_, (token, score) in enumerate(zip(proposal.tokens, proposal.log_scores, strict=True), start=1):
        score -= log_trust(proposal.matched, depth_)
        length, counts = followers([tokens], context, max_match)
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


@given(st.lists(text, min_size=1, max_size=3), text, st.data())
def test_growing_step_by_step_equals_starting_afresh(earlier, tokens, data):
    drafts = drafter(max_match=4, max_tokens=60)
    live: list[int] = []
    fresh = itertools.count(1000)
    while len(live) < len(tokens):
        live += tokens[len(live) : len(live) + data.draw(st.integers(1, 6))]
        if earlier and data.draw(st.booleans()):  # the shared memory changes in mid-sequence
            finish(drafts, earlier.pop())
        again = view(list(live), next(fresh))
        assert drafts.draft_one(view(live), 9, 9) == drafts.draft_one(again, 9, 9)


def finish(drafts: SuffixDrafter, output: list[int], prompt: tuple[int, ...] = (), key: int = -1) -> None:
    seq = view([*prompt, *output], key, len(prompt))
    drafts.observe(StepFeatures([seq], [output], [0], [[]]))
    drafts.release([key])


def test_earlier_outputs_are_drafted_from_but_not_their_prompts():
    drafts = drafter()
    finish(drafts, [10, 11, 12, 13], prompt=(20, 21, 22))
    assert drafts.draft_one(view([9, 10, 11], 1), 8, 8).tokens == [12, 13]
    assert drafts.draft_one(view([9, 20, 21], 2), 8, 8).tokens == []


def test_the_better_scored_source_wins():
    drafts = drafter(reach=1.0)
    finish(drafts, [1, 2, 3, 4, 5, 6, 7, 8])
    # Own text matches one token (3 -> 9), the earlier output matches three: more tokens expected there.
    assert drafts.draft_one(view([3, 9, 1, 2, 3], 1), 8, 8).tokens == [4, 5, 6]
    # Own text matches as much: it is asked first and ties go to it.
    assert drafts.draft_one(view([1, 2, 3, 9, 8, 7, 1, 2, 3], 2), 8, 8).tokens == [9, 8, 7]


def test_reach_limits_a_draft_by_its_match():
    assert len(drafter(reach=0.5).draft_one(view([1, 2, 3, 4, 5, 6, 1, 2, 3, 4]), 16, 16)) == 2
    assert len(drafter(reach=1.0).draft_one(view([1, 2, 3, 4, 5, 6, 1, 2, 3, 4]), 16, 16)) == 4


@given(st.lists(st.lists(st.integers(0, 5), min_size=0, max_size=40), max_size=12), st.integers(0, 50))
def test_shared_memory_stays_within_its_limit_and_keeps_the_newest(outputs, limit):
    drafts = drafter(max_tokens=limit, max_match=8)
    for output in outputs:
        finish(drafts, output)
        assert drafts.shared.size <= limit
        kept = output[-(limit // 2) :] if limit // 2 else []
        if kept:
            assert drafts.shared.generations[0].longest_suffix(kept)[1] == min(len(kept), 8)


def test_old_outputs_go_by_halves():
    drafts = drafter(max_tokens=20)
    for start in range(0, 50, 5):
        finish(drafts, list(range(start, start + 5)))
    assert 10 <= drafts.shared.size <= 20
    assert drafts.draft_one(view([45, 46], 1), 8, 8).tokens == [47, 48, 49]
    assert drafts.draft_one(view([0, 1], 2), 8, 8).tokens == []


def test_release_frees_the_sequence():
    drafts = drafter()
    drafts.propose(DraftRequest([view([1, 2, 1], 1), view([3, 4], 2)], [4, 4], [4, 4]))
    drafts.release([1, 99])
    assert list(drafts._sequences) == [2]
    drafts.release([2])
    assert not drafts._sequences
    assert drafts.shared.size == 5


def test_no_memory_of_other_requests_where_none_is_wanted():
    drafts = drafter(max_tokens=0)
    finish(drafts, [1, 2, 3, 4])
    assert drafts.shared.size == 0
    assert len(drafts.draft_one(view([1, 2], 1), 8, 8)) == 0


def test_a_batch_becomes_valid_chains_within_each_budget():
    views = [view([1, 2, 1, 3, 1], 1), view([4], 2), view([5, 6, 5, 6, 5, 7, 5], 3)]
    tree = drafter().propose(DraftRequest(views, [8, 8, 3], [3, 8, 1]))
    tree.check()
    assert [row[0] for row in tree.tokens] == [1, 4, 5] and tree.is_chain
    assert [max(row) for row in tree.depths()] == [3, 0, 1]


@pytest.mark.parametrize("options", [{"depth": 0}, {"max_tokens": -1}])
def test_bad_options_are_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        SuffixConfig(**options)


def bound(**options) -> tuple[SuffixDrafter, SuffixDrafter]:
    """A drafter that looks up in compiled code, and one that does not."""
    assert native.library() is not None
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
            each.observe(StepFeatures(views[:2], [[], []], [0, 0], [[], []]))
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


@needs_kernels
def test_compiled_look_ups_of_a_long_text_of_many_tokens():
    """Tables grow, states with many followers are told apart."""
    fast, slow = bound(depth=12, max_tokens=4000)
    draw = random.Random(5)
    for key in range(3):
        grown = view([], key, 1)
        for _ in range(30):
            grown.tokens.extend(draw.choice(PHRASES) if draw.random() < 0.7 else [draw.randrange(300)])
            row = [(grown, 12, 12)]
            assert fast.draft(requested(row)) == slow.draft(requested(row))
        assert len(fast.draft(requested([(grown, 12, 12)]))) == 1
        for each in (fast, slow):
            each.release([key])


PHRASES = [[17, 23, 23, 99, 4], [4, 17, 23, 5, 6, 7, 8, 9], [*range(200, 240)], [3] * 6]


@needs_kernels
def test_draft_sessions_take_the_long_way():
    fast, slow = bound()
    grown = view([1, 2, 3, 1, 2], 0)
    assert fast.continuations(grown, [3], 2) == slow.continuations(grown, [3], 2) != []
    assert fast.draft(requested([(grown, 4, 4)])) == slow.draft(requested([(grown, 4, 4)]))


@needs_kernels
def test_compiled_look_ups_refuse_what_they_cannot_do():
    native.library()
    with pytest.raises(RuntimeError, match="runs of 3 to 2"):
        SuffixTexts(3, 2, 1.0, 0.1, 0)
    with pytest.raises(ValueError, match="no token"):
        SuffixTexts(1, 2, 1.0, 0.1, 0).draft([(0, [1, 2, 3], 0, 4)])
