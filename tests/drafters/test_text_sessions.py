"""Sessions of drafters that look texts up, against a search of the whole text; and at work in the mirror round."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import pytest
from kits.suffixes import suffix_config
from kits.tiny import tiny_decoder

from paceline.core.sampling import SamplingParams
from paceline.draft.ngram import NgramConfig, log_trust
from paceline.draft.registry import DrafterContext
from paceline.draft.sessions import ROOT, Expand, Opening
from paceline.draft.suffix import SuffixConfig

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
DECODER = tiny_decoder()


def sessions(config: Any) -> Any:
    drafter = config.build(DrafterContext())
    drafter.bind(DECODER.info("tiny"), 4, 1024, DECODER.device)
    return drafter.sessions(64)


def opening(tokens: list[int], key: int = 0) -> Opening:
    return Opening(key, tokens, len(tokens), GREEDY, seed=5, sample_index=0)


def by_ngrams(text: list[int], path: list[int], config: NgramConfig) -> list[int]:
    """What followed the n-grams that end text and path, longest first, latest first."""
    whole, found = text + path, dict[int, None]()
    for n in range(config.max_ngram, config.min_ngram - 1, -1):
        ends = [at for at in range(len(text) - 1, n - 1, -1) if n <= len(whole) and text[at - n : at] == whole[-n:]]
        found |= dict.fromkeys(text[at] for at in ends)
    return [*found]


def by_suffix(text: list[int], path: list[int], config: SuffixConfig) -> Counter[int]:
    """How often each token followed the longest suffix of text and path that something follows."""
    whole = text + path
    for n in range(min(config.max_match, len(whole)), config.min_match - 1, -1):
        after = Counter(text[at] for at in range(n, len(text)) if text[at - n : at] == whole[-n:])
        if after:
            return after
    return Counter()


def lives(config: Any, seed: int) -> Any:
    """Random growths and verdicts of two texts; yields what is drafted below which text and path."""
    draw, served = random.Random(seed), sessions(config)
    texts = {key: draw.choices(range(6), k=30 + key) for key in range(2)}
    for key, text in texts.items():
        served.open(opening([*text], key))
    for turn in range(60):
        key = turn % 2
        tree = served._open[key]
        places = [ROOT, *({*tree.nodes} - {tree.root})]
        parent, node = draw.choice(places), draw.choice(places)
        ask = Expand(key, [(parent, draw.randrange(6))], [node], draw.choice([1, 3]))
        (grown,) = served.grow([ask])
        for place in dict.fromkeys([*grown.added, node]):
            rows = zip(grown.parents, grown.tokens, grown.log_q, strict=True)
            said = [(token, log_q) for parent, token, log_q in rows if parent == place]
            yield texts[key], tree.tokens(tree.number(place)), ask.width, said
        drafted = [(tree.nodes[node].parent, tree.nodes[node].token) for node in grown.nodes]
        assert drafted == [*zip(map(tree.number, grown.parents), grown.tokens, strict=True)]
        if turn % 5 == 0:
            root = draw.choice(places[1:] or [grown.added[0]])
            texts[key] += tree.tokens(root)
            above = tree.tokens(root)
            paths = {n: tree.tokens(n) for n in tree.nodes}
            below = {n: path[len(above) :] for n, path in paths.items() if path[: len(above)] == above and n != root}
            served.reroot(key, root)
            assert {n: tree.tokens(n) for n in tree.nodes if n != tree.root} == below
        elif turn % 7 == 0:
            texts[key] += [5, 4]
            served.commit(key, [5, 4])
            assert {*tree.nodes} == {tree.root}
        assert tree.view.tokens == texts[key]


def test_ngrams_are_those_of_a_search():
    config = NgramConfig(max_ngram=3)
    wide = 0
    for text, path, width, said in lives(config, 1):
        assert [token for token, _ in said] == by_ngrams(text, path, config)[:width]
        chances = [math.exp(log_q) for _, log_q in said]
        assert chances == sorted(chances, reverse=True) and sum(chances) <= 1
        wide += len(said) > 1
    assert wide > 10


def test_suffixes_are_those_of_a_search():
    config = suffix_config(max_match=8, min_prob=1e-6)
    deep = 0
    for text, path, width, said in lives(config, 2):
        after = by_suffix(text, path, config)
        best = sorted(after.values(), reverse=True)[:width]
        assert [after[token] for token, _ in said] == best
        for token, log_q in said:
            share = math.log(after[token] / after.total())
            assert any(log_q == pytest.approx(share + log_trust(n, 1)) for n in range(1, 9))
        deep += bool(said) and len(path) > 1
    assert deep > 10
