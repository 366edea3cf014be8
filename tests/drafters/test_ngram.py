"""Prompt lookup against a brute-force search of the whole context."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.draft import requested
from kits.native import needs_kernels

from paceline import native
from paceline.core.errors import ConfigError
from paceline.drafters.base import DraftRequest, SequenceView
from paceline.drafters.ngram import NgramConfig, NgramDrafter, NgramIndex
from paceline.drafters.proposal import Proposal
from paceline.drafters.registry import DrafterContext
from paceline.native.lookup import NgramTexts

# Few distinct tokens: matches of every length occur, and so do contexts without any.
texts = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def drafter(**options) -> NgramDrafter:
    return NgramConfig(**options).build(DrafterContext())


def view(tokens: list[int], key: int = 0) -> SequenceView:
    return SequenceView(key=key, tokens=tokens, prompt_len=len(tokens), sampler=None)


def lookup(tokens: list[int], n: int) -> list[int]:
    """Positions that follow earlier occurrences of the last n tokens, most recent first."""
    if n > len(tokens):
        return []
    return [at for at in range(len(tokens) - 1, n - 1, -1) if tokens[at - n : at] == tokens[len(tokens) - n :]]


def periodic(tokens: list[int], follower: int, depth: int) -> list[int]:
    text = list(tokens)
    for at in range(follower, follower + depth):
        text.append(text[at])
    return text[len(tokens) :]


@given(texts, st.integers(1, 3), st.integers(0, 3), st.integers(0, 9), st.integers(0, 9))
def test_chain_is_the_latest_continuation_of_the_longest_match(tokens, low, more, budget, max_depth):
    proposal = drafter(min_ngram=low, max_ngram=low + more, depth=6).draft_one(view(tokens), budget, max_depth)

    found = [at for n in range(low + more, low - 1, -1) for at in lookup(tokens, n)]
    wanted = periodic(tokens, found[0], min(6, budget, max_depth)) if found else []
    assert proposal.tokens == wanted
    assert proposal.parents == list(range(len(wanted)))


@given(texts, st.data())
def test_growing_step_by_step_equals_starting_afresh(tokens, data):
    live: list[int] = []
    growing = drafter()
    while len(live) < len(tokens):
        live += tokens[len(live) : len(live) + data.draw(st.integers(1, 5))]
        assert growing.draft_one(view(live), 12, 12) == drafter().draft_one(view(live, 7), 12, 12)


def test_a_step_indexes_new_tokens_only():
    class Counting(list):
        reads = 0

        def __getitem__(self, item):
            if isinstance(item, slice):
                Counting.reads += len(range(*item.indices(len(self))))
            return super().__getitem__(item)

    tokens = Counting(range(5000))
    index = NgramIndex(1, 4)
    index.extend(tokens)
    Counting.reads = 0
    tokens.append(17)
    index.extend(tokens)
    assert 0 < Counting.reads <= 1 + 2 + 3 + 4


def test_periodic_text_is_continued_past_its_end():
    proposal = drafter(depth=8).draft_one(view([5, 1, 2, 3, 1, 2, 3, 1]), 8, 8)
    assert proposal.tokens == [2, 3, 1, 2, 3, 1, 2, 3]


def test_a_longer_match_expects_more():
    short = drafter().draft_one(view([1, 2, 9, 2]), 8, 8)
    long = drafter().draft_one(view([1, 2, 3, 4, 9, 1, 2, 3, 4]), 8, 8)
    assert 0 < short.expected_accepted < long.expected_accepted


def test_a_batch_becomes_valid_trees():
    views = [view([1, 2, 3, 1, 2], 1), view([4], 2), view([7, 8, 7, 9, 7], 3)]
    tree = drafter(depth=3).propose(DraftRequest(views, [6, 6, 3], [9, 9, 2]))
    tree.check()
    assert [row[0] for row in tree.tokens] == [2, 4, 7]
    assert tree.counts == [4, 1, 3]
    assert max(tree.depths()[2]) == 2


def test_release_forgets():
    lookups = drafter()
    lookups.propose(DraftRequest([view([1, 1], 1), view([2, 2], 2)], [4, 4], [4, 4]))
    lookups.release([1, 99])
    assert list(lookups._indices) == [2]
    assert lookups.draft_one(view([5, 6, 5], 1), 4, 4).tokens == [6, 5, 6, 5]  # nothing of the old sequence 1


def test_nothing_is_drafted_before_anything_repeats():
    assert len(drafter().draft_one(view([1, 2, 3]), 8, 8)) == 0


@pytest.mark.parametrize("options", [{"min_ngram": 5}, {"depth": 0}, {"max_ngram": 65}])
def test_bad_options_are_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        NgramConfig(**options)


def bound(**options) -> tuple[NgramDrafter, NgramDrafter]:
    """A drafter that looks up in compiled code, and one that does not."""
    assert native.library() is not None
    fast, slow = drafter(**options), drafter(**options)
    fast.bind(None, 8, 1000, "cpu")  # type: ignore[arg-type]  # it reads none of them
    assert fast._texts is not None and slow._texts is None
    return fast, slow


@needs_kernels
@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), texts), min_size=1, max_size=30), st.integers(1, 3), st.integers(0, 4),
    st.integers(1, 9),
)  # fmt: skip
def test_compiled_look_ups_are_those_of_the_long_way(more, shortest, wider, depth):
    """Several texts at once, growing from call to call by any number of tokens; node for node, score for score."""
    fast, slow = bound(min_ngram=shortest, max_ngram=shortest + wider, depth=depth)
    views = [view([key], key) for key in range(4)]
    met = 0
    for key, tokens in more:
        views[key].tokens.extend(tokens)
        rows = [(v, 1 + (len(v.tokens) + key) % 5, depth - (len(tokens) + v.key) % 4) for v in views]
        found, wanted = fast.draft(requested(rows)), slow.draft(requested(rows))
        assert found == wanted
        met += sum(map(len, found))
        want = DraftRequest(*[[*column] for column in zip(*rows, strict=True)])
        fast_tree, slow_tree = fast.propose(want), slow.propose(want)
        assert (fast_tree.tokens, fast_tree.parents) == (slow_tree.tokens, slow_tree.parents)
        assert (fast_tree.scores, fast_tree.sources) == (slow_tree.scores, slow_tree.sources)
    assert met or len(more) < 20
    fast.release([0, 7])
    views[0] = view([5, 6, 5], 0)  # nothing of the old text is left
    anew = drafter(min_ngram=shortest, max_ngram=shortest + wider, depth=depth)
    assert fast.draft(requested([(views[0], 4, 4)])) == anew.draft(requested([(views[0], 4, 4)]))


@needs_kernels
def test_matches_are_measured_and_repeat_in_compiled_code():
    fast, slow = bound(depth=12)
    text = [*range(40)] * 3
    for tokens in (text, [*text, 7, 8, 9, 0], [5, 1, 2, 3, 1, 2, 3, 1]):
        row = [(view([*tokens], len(tokens)), 12, 12)]
        assert fast.draft(requested(row)) == slow.draft(requested(row)) != [Proposal()]


@needs_kernels
def test_compiled_look_ups_refuse_what_they_cannot_do():
    native.library()
    with pytest.raises(RuntimeError, match="n-grams of 3 to 2"):
        NgramTexts(3, 2, 8)
    with pytest.raises(ValueError, match="no token"):
        NgramTexts(1, 2, 8).draft([(0, [1, 2, 3], 0)])
