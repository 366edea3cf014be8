"""Prompt lookup against a brute-force search of the whole context."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

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
