"""Our look-ups as vLLM's ``custom_class``: driven here as its runner drives them, and in vLLM where it is installed."""

from __future__ import annotations

import importlib.util
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paceline.bridges import vllm as bridge
from paceline.core.errors import CapabilityError, ConfigError
from paceline.weights import zoo

VOCAB, MOST, ROOM = 50, 6, 200


def config(most: int | None = MOST) -> Any:
    """The part of vLLM's config that the bridge reads."""
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=most),
        model_config=SimpleNamespace(max_model_len=ROOM, get_vocab_size=lambda: VOCAB),
        scheduler_config=SimpleNamespace(max_num_seqs=8),
    )


def next_token(text: list[int]) -> int:
    """A target: a pure function of the last two tokens, so that texts repeat themselves."""
    return (3 * text[-1] + 5 * text[-2] + 1) % VOCAB


class Runner:
    """What vLLM's older runner does around a drafter: rows of texts, verification, rows that move and end."""

    def __init__(self, proposer: bridge.Proposer, seed: int) -> None:
        self.proposer, self.random = proposer, random.Random(seed)
        self.texts: list[list[int]] = []
        self.prompts: list[int] = []
        self.drafts: list[list[int]] = []
        self.ended: list[tuple[list[int], int]] = []
        self.checked = self.accepted = 0

    def verify(self, text: list[int], draft: list[int]) -> list[int]:
        """The tokens of one step."""
        new = [next_token(text)]
        for token in draft:
            if new[-1] != token:
                break
            new.append(next_token([*text, *new]))
        self.checked, self.accepted = self.checked + len(draft), self.accepted + len(new) - 1
        return new

    def step(self) -> None:
        """Verify, let a row in or out, shuffle at times, ask for drafts."""
        said = [self.verify(text, draft) for text, draft in zip(self.texts, self.drafts, strict=True)]
        for text, new in zip(self.texts, said, strict=True):
            text += new
        rows = [*zip(self.texts, said, self.prompts, strict=True)]
        self.ended += [(text, prompt) for text, _, prompt in rows if len(text) >= ROOM]
        rows = [row for row in rows if len(row[0]) < ROOM]
        if self.random.random() < 0.3 and len(rows) < 6:
            prompt = [self.random.randrange(VOCAB) for _ in range(self.random.randrange(2, 6))]
            rows.append((prompt, [], len(prompt)))  # still in its prompt
        if self.random.random() < 0.3:
            self.random.shuffle(rows)
        self.texts, said, self.prompts = ([row[i] for row in rows] for i in range(3))
        self.drafts = self.proposer.propose(said, *arrays(self.texts), slot_mappings=None)
        for text, new, draft in zip(self.texts, said, self.drafts, strict=True):
            assert len(draft) <= (min(MOST, ROOM - len(text)) if new else 0)


def arrays(texts: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Lengths and tokens, as vLLM's input batch holds them."""
    tokens = np.full((8, ROOM), -1, dtype=np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    return np.array([len(text) for text in texts] + [0] * (8 - len(texts))), tokens


@pytest.mark.parametrize("drafter", [bridge.Suffix, bridge.Ngram])
def test_texts_are_the_targets_own_and_drafts_are_accepted(drafter: type[bridge.Proposer]) -> None:
    runner = Runner(drafter(config()), seed=1)
    for _ in range(400):
        runner.step()
    assert len(runner.ended) > 5
    for text, prompt in runner.ended:
        assert all(text[i] == next_token(text[:i]) for i in range(prompt, len(text)))
    assert runner.accepted > 0.5 * runner.checked > 500
    assert len(runner.proposer._texts) <= len(runner.texts)


def test_a_request_keeps_its_drafter_state_wherever_its_row_goes() -> None:
    """Drafts of rows that move are those of rows that stay."""
    moving, staying = bridge.Suffix(config()), bridge.Suffix(config())
    order, still = [0, 1, 2], [0, 1, 2]
    texts = [[1, 2, 3, 4, 1, 2], [5, 6, 7, 5, 6, 7], [9, 9, 9, 8, 9, 9]]
    drafted = 0
    for turn in range(20):
        found = []
        for proposer, rows in ((moving, order), (staying, still)):
            drafts = proposer.propose([[texts[i][-1]] for i in rows], *arrays([texts[i] for i in rows]))
            found.append(dict(zip(rows, drafts, strict=True)))
        assert found[0] == found[1]
        drafted += sum(map(len, found[0].values()))
        for text in texts:
            text.append(next_token(text))
        order = order[1:] + order[:1] if turn % 2 else order
    assert drafted and len(moving._texts) == 3 and next(moving._keys) == 3


def test_what_it_cannot_draft_with_is_refused_in_words() -> None:
    class Eagle(bridge.Proposer):
        drafter = "eagle:somewhere"

    with pytest.raises(CapabilityError, match="trained network"):
        Eagle(config())
    with pytest.raises(ConfigError, match="num_speculative_tokens"):
        bridge.Suffix(config(most=None))


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
def test_vllm_with_our_suffix_drafter_says_its_own_tokens() -> None:
    """vLLM's plain ids, over the embedded model."""
    import vllm

    prompts = [{"prompt_token_ids": [5, 6, 7, 8, 5, 6, 7, 8, 5, 6]}, {"prompt_token_ids": [40, 50, 60, 40, 50, 60]}]
    asked = vllm.SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    shape = {"model": str(zoo.find("paceline-small")), "max_model_len": 256, "dtype": "float32"}
    spec = {"method": "custom_class", "model": "paceline.bridges.vllm.Suffix", "num_speculative_tokens": 8}
    ids = [
        [output.outputs[0].token_ids for output in vllm.LLM(**shape, **more).generate(prompts, asked)]
        for more in ({}, {"speculative_config": spec})
    ]
    assert ids[0] == ids[1]
