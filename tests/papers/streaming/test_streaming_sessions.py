"""A draft model with streams drafts what it drafts without them, in fewer passes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.draft import text
from kits.stream_sets import MODEL, save_set
from kits.tiny import VOCAB, draft_model, streaming_model, tiny_decoder

from paceline.api.llm import LLM
from paceline.core.sampling import SamplingParams
from paceline.draft.draft_model import DraftModel
from paceline.draft.sessions import ROOT, Expand, NewNodes, Opening
from paceline.papers.streaming.draft_sessions import StreamingSessions

GREEDY = SamplingParams(temperature=0, max_tokens=64)
WARM = SamplingParams(temperature=0.9, repetition_penalty=1.3, max_tokens=64)
CPU = torch.device("cpu")


def drafters(streams: bool, **options: Any) -> DraftModel:
    drafter = (streaming_model if streams else draft_model)(noise=0.2, depth=6, **options)
    drafter.bind(tiny_decoder().info("tiny"), 4, 1024, CPU)
    return drafter


def plain_chain(served: Any, key: int, tip: int, levels: int) -> list[tuple[int, float]]:
    """What is drafted a token at a time."""
    found: list[tuple[int, float]] = []
    while len(found) < levels:
        (grown,) = served.grow([Expand(key, expand=[tip])])
        if not grown.nodes:
            break
        found.append((grown.tokens[0], grown.log_q[0]))
        tip = grown.nodes[0]
    return found


@pytest.mark.parametrize("proposes", ["point", "coupled"])
@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "warm"])
def test_chains_are_those_without_streams(params: SamplingParams, proposes: str) -> None:
    """Random lives: branches below given nodes, cuts and commits; every chain is the plain one, score by score.

    Streams that were not trained are seldom right, so that what they guessed is put right now and then: such passes
    find several tokens, and a wrong one behind right ones.
    """
    draw = random.Random(11)
    plain, streaming = (drafters(on, proposes=proposes).sessions(200) for on in (False, True))
    assert isinstance(streaming, StreamingSessions)
    for key in (0, 1):
        tokens = text(9 + 8 * key, key)
        for served in (plain, streaming):
            served.open(Opening(key, tokens, len(tokens), params, seed=5, sample_index=0))
    several = wrong = 0
    for _ in range(12):
        asks, expected = [], dict[tuple[int, int], list[tuple[int, float]]]()
        candidates = {key: draw.sample(range(10, VOCAB), 2) for key in (0, 1)}
        levels = {key: [draw.randrange(1, 7) for _ in range(3)] for key in (0, 1)}
        for key in (0, 1):
            twins = plain.grow([Expand(key, [(ROOT, token) for token in candidates[key]], [ROOT])])[0]
            for place, node in enumerate([*twins.added, ROOT]):
                first = twins.parents.index(node)
                rest = plain_chain(plain, key, twins.nodes[first], levels[key][place] - 1)
                expected[key, place] = [(twins.tokens[first], twins.log_q[first]), *rest]
            asks.append(Expand(key, [(ROOT, token) for token in candidates[key]], [ROOT], most=levels[key]))
        found: dict[tuple[int, int], list[tuple[int, float]]] = {place: [] for place in expected}
        tips: dict[tuple[int, int], int] = {}
        while asks:
            grown = streaming.grow(asks)
            for ask, one in zip(asks, grown, strict=True):
                if one.added:
                    tips |= {(ask.key, place): node for place, node in enumerate([*one.added, ROOT])}
                for place in range(3):
                    before = len(found[ask.key, place])
                    tips[ask.key, place] = follow(one, tips[ask.key, place], found[ask.key, place])
                    several += len(found[ask.key, place]) - before > 1
            asks = []
            for key in (0, 1):
                open_ = [place for place in range(3) if len(found[key, place]) < len(expected[key, place])]
                if open_:
                    most = [len(expected[key, place]) - len(found[key, place]) for place in open_]
                    asks.append(Expand(key, expand=[tips[key, place] for place in open_], most=most))
                    for place in open_:
                        guesses = streaming._guessed[key].get(tips[key, place])
                        if guesses is not None and draw.random() < 0.7:
                            right = [token for token, _ in expected[key, place][len(found[key, place]) :]]
                            share = draw.randrange(1, 4)
                            guesses[:share] = right[:share]
                            wrong += guesses[: len(right)] != right[: len(guesses)]
        for place, chain in expected.items():
            assert [token for token, _ in found[place]] == [token for token, _ in chain]
            assert [value for _, value in found[place]] == pytest.approx([value for _, value in chain], abs=1e-9)
        for key in (0, 1):
            said = [token for token, _ in expected[key, 2]][: draw.randrange(3)] + [draw.randrange(10, VOCAB)]
            for served in (plain, streaming):
                served.commit(key, said)
                served.pool.check_integrity()
    assert several > 10 and wrong > 3 and streaming.tokens > streaming.passes
    for served in (plain, streaming):
        for key in (0, 1):
            served.close(key)
        served.pool.check_idle()


def follow(grown: NewNodes, tip: int, chain: list[tuple[int, float]]) -> int:
    """Append what was drafted below a tip; returns the new one."""
    while tip in grown.parents:
        at = grown.parents.index(tip)
        chain.append((grown.tokens[at], grown.log_q[at]))
        tip = grown.nodes[at]
    return tip


@pytest.mark.parametrize("round_", ["serial", "mirror", "mirror,rollout=process"])
def test_answers_with_streams_in_the_draft(tmp_path: Path, round_: str) -> None:
    """The embedded pair with a made-up set: ids are those of plain decoding."""
    own = save_set(tmp_path / "set", gamma=3)
    prompts = ["def add(a, b):", "The capital of France is"]
    params = SamplingParams(temperature=0, max_tokens=24)
    plain = [one.outputs[0].token_ids for one in LLM("paceline-small").generate(prompts, params)]
    drafter = f"streaming_draft:{MODEL},depth=4,streams={own}"
    outputs = LLM("paceline-small", drafter=drafter, budget=4, round=round_).generate(prompts, params)
    assert [one.outputs[0].token_ids for one in outputs] == plain
    assert sum(one.stats.accepted for one in outputs) > 0
