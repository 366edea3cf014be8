"""Prompt lookup against a brute-force search of the whole context."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from kits.draft import requested
from kits.native import needs_kernels

from paceline import kernels
from paceline.core.sequence import Sequence
from paceline.draft.ngram import NgramConfig, NgramDrafter
from paceline.draft.registry import DrafterContext

# Few distinct tokens: matches of every length occur, and so do contexts without any.
texts = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def drafter(**options) -> NgramDrafter:
    return NgramConfig(**options).build(DrafterContext())


def view(tokens: list[int], key: int = 0) -> Sequence:
    return Sequence(key=key, tokens=tokens, prompt_len=len(tokens), sampler=None)


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


def bound(**options) -> tuple[NgramDrafter, NgramDrafter]:
    """A drafter that looks up in compiled code, and one that does not."""
    assert kernels.library() is not None
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
    assert met or len(more) < 20
    fast.release([0, 7])
    views[0] = view([5, 6, 5], 0)  # nothing of the old text is left
    anew = drafter(min_ngram=shortest, max_ngram=shortest + wider, depth=depth)
    assert fast.draft(requested([(views[0], 4, 4)])) == anew.draft(requested([(views[0], 4, 4)]))
