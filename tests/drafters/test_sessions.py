"""Draft sessions against the whole text computed anew: after any growth, cut and commit the draft says the same."""

from __future__ import annotations

import math
import random
from collections import abc
from typing import Any

import pytest
import torch
from kits.tiny import VOCAB, draft_model, full_logits, tiny_decoder

from paceline.core.sampling import SamplingParams
from paceline.core.sequence import Sequence
from paceline.draft.draft_model import DraftModel
from paceline.draft.model_sessions import ModelSessions
from paceline.draft.sessions import ROOT, Expand, NewNodes, Opening
from paceline.draft.text_sessions import LookUps, opened

TARGET = tiny_decoder()
GREEDY = SamplingParams(temperature=0, max_tokens=64)
WARM = SamplingParams(temperature=0.9, repetition_penalty=1.3, max_tokens=64)
CUT = SamplingParams(temperature=0.9, top_k=2, max_tokens=64)  # candidates and chains are ranked differently
PROMPT = [(5 * i + 11) % (VOCAB - 10) + 10 for i in range(21)]


def sessions(
    rows: int = 64, pool_tokens: int = 1024, sequences: int = 4, **options: Any
) -> tuple[DraftModel, ModelSessions]:
    drafter = draft_model(noise=0.2, depth=4, **options)
    drafter.bind(TARGET.info("tiny"), sequences, pool_tokens, torch.device("cpu"))
    return drafter, drafter.sessions(rows)


def opening(key: int, tokens: list[int], params: SamplingParams = GREEDY, prompt_len: int | None = None) -> Opening:
    return Opening(key, tokens, prompt_len or len(tokens), params, seed=5, sample_index=0)


class Knowing:
    """A look-up that is sure of every third text and tells nonsense of another third."""

    def continuations(self, sequence: Sequence, path: abc.Sequence[int], width: int) -> list[tuple[int, float]]:
        return self.says([*sequence.tokens, *path])

    @staticmethod
    def says(text: list[int]) -> list[tuple[int, float]]:
        chance = {0: 0.9, 1: 0.3}.get(sum(text) % 3)
        return [] if chance is None else [(10 + sum(text) % (VOCAB - 10), math.log(chance))]

    def release(self, keys: abc.Sequence[int]) -> None:
        pass


class Twin:
    """A session's text and tree in plain lists, and what the draft says of it when everything is computed anew."""

    def __init__(self, drafter: DraftModel, opened: Opening, knows: bool = False) -> None:
        self.decoder, self.opened, self.knows = drafter.decoder, opened, knows
        self.looked_up = 0
        self.text = [*opened.tokens]
        self.tokens: dict[int, int] = {}
        self.parents: dict[int, int] = {}

    def path(self, node: int) -> list[int]:
        return [] if node == ROOT else [*self.path(self.parents[node]), node]

    def drafted(self, node: int) -> list[int]:
        return [self.tokens[n] for n in self.path(node)]

    def says(self, node: int, width: int) -> tuple[list[int], list[float]]:
        path = self.drafted(node)
        found = Knowing.says([*self.text, *path]) if self.knows else []
        if found and found[0][1] > math.log(0.5):
            self.looked_up += 1
            return [found[0][0]], [found[0][1]]
        logits = full_logits(self.decoder, [*self.text, *path])[-1:]
        sampler = opened(self.opened, VOCAB, ()).sampler
        sampler.commit(self.text[len(self.opened.tokens) :])
        below = torch.tensor([path]) if path else None
        places = [len(self.text) + len(path)]
        chain = width == 1
        ranked = sampler.scores(logits, below, places) if chain else sampler.candidates(logits, [path], places, True)
        log_q = ranked.log_softmax(-1)[0]
        best = log_q.topk(width)
        return best.indices.tolist(), best.values.tolist()

    def grow(self, ask: Expand, grown: NewNodes) -> None:
        for (parent, token), node in zip(ask.added, grown.added, strict=True):
            self.parents[node], self.tokens[node] = parent, token
        children: dict[int, list[tuple[int, float]]] = {}
        for parent, node, token, log_q in zip(grown.parents, grown.nodes, grown.tokens, grown.log_q, strict=True):
            self.parents[node], self.tokens[node] = parent, token
            children.setdefault(parent, []).append((token, log_q))
        assert {*children} == {*grown.added, *ask.expand}
        for parent, said in children.items():
            tokens, log_q = self.says(parent, ask.width)
            assert [token for token, _ in said] == tokens
            assert [value for _, value in said] == pytest.approx(log_q, abs=1e-9)

    def go_on(self, said: list[int], root: int | None) -> None:
        below = {n for n in self.tokens if root is not None and root in self.path(n)[:-1]}
        self.text += said
        self.parents = {n: ROOT if self.parents[n] == root else self.parents[n] for n in below}
        self.tokens = {n: self.tokens[n] for n in below}


@pytest.mark.parametrize("looks_up", [False, True], ids=["alone", "beside a look-up"])
@pytest.mark.parametrize("params", [GREEDY, WARM, CUT], ids=["greedy", "warm", "cut"])
def test_random_lives(params: SamplingParams, looks_up: bool) -> None:
    draw = random.Random(3)
    drafter, served = sessions(proposes="coupled")
    if looks_up:
        served.look_ups = LookUps({0: Knowing()}, math.log(0.8))
    opened = [opening(key, PROMPT[: 5 + 7 * key], params) for key in range(2)]
    twins = {one.key: Twin(drafter, one, looks_up) for one in opened}
    for one in opened:
        served.open(one)
    rerooted = stayed = 0
    for _ in range(60):
        asks = []
        for key, twin in twins.items():
            fresh = [n for n in twin.tokens if n not in twin.parents.values()]
            places = [ROOT, *twin.tokens]
            given = {(draw.choice(places), draw.randrange(10, VOCAB)) for _ in range(draw.randrange(3))}
            given -= {(twin.parents[n], twin.tokens[n]) for n in twin.tokens}
            expand = draw.sample(fresh, min(len(fresh), 2))
            if served._open[key].pending and draw.random() < 0.7:
                expand.append(ROOT)
            if given or expand:
                asks.append(Expand(key, sorted(given), expand, draw.choice([1, 3])))
        if asks:
            for ask, grown in zip(asks, served.grow(asks), strict=True):
                twins[ask.key].grow(ask, grown)
        key = draw.choice([*twins])
        twin = twins[key]
        if twin.tokens and draw.random() < 0.3:
            node = draw.choice(sorted(twin.tokens)[:3])
            said = twin.drafted(node)
            served.reroot(key, node)
            twin.go_on(said, node)
            rerooted += 1
            stayed += served._open[key].cache.ahead
        elif draw.random() < 0.2:
            said = [*(twin.drafted(draw.choice([*twin.tokens])) if twin.tokens else []), draw.randrange(10, VOCAB)]
            served.commit(key, said)
            twin.go_on(said, None)
        assert served._open[key].view.tokens == twin.text
        assert {*served._open[key].nodes} - {served._open[key].root} == {*twin.tokens}
        served.pool.check_integrity()
    assert rerooted > 3 and stayed > 3
    assert (sum(twin.looked_up for twin in twins.values()) > 10) is looks_up
    for key in twins:
        served.close(key)
    served.pool.check_idle()


def test_nothing_grows_where_there_is_no_room() -> None:
    """A pool that is full, the end of the draft's context, a token that the draft lacks: no child, and no fault."""
    _, served = sessions(rows=1, pool_tokens=16, sequences=1)
    served.open(opening(0, PROMPT))
    grown = served.grow([Expand(0, [(ROOT, 10 + i) for i in range(60)])])[0]
    assert len(grown.added) == 60 and not grown.nodes
    assert served.grow([Expand(0, expand=[ROOT])])[0].nodes
    _, served = sessions()
    last = served.decoder.config.max_position
    served.open(opening(1, [12] * last))
    (grown,) = served.grow([Expand(1, expand=[ROOT])])
    assert grown.nodes and not served.grow([Expand(1, expand=grown.nodes)])[0].nodes
