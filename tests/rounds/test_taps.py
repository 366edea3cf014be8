"""States of a pass, as drafters are shown them: of which tokens, at which positions, from whichever kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from kits.native import needs_kernels
from kits.tiny import assemble, draft_model, run, tiny_config, tiny_decoder

from paceline.core.sampling import SamplingParams
from paceline.core.tree import TokenTree
from paceline.draft.base import Drafter, DrafterSpec, DraftRequest, StepFeatures
from paceline.kv.pool import KVPool
from paceline.model.attention.base import Segment
from paceline.model.base import Batch, Taps
from paceline.model.decoder import Decoder, TargetInfo

pytestmark = pytest.mark.timeout(60)
LAYERS = (-1, 0)
CONFIG = tiny_config()
KINDS: dict[str, dict[str, Any]] = {
    "float64": {"dtype": torch.float64},
    "compiled float32": {"dtype": torch.float32, "compiled": True},
    "compiled bf16": {"dtype": torch.bfloat16, "compiled": True},
}
TIGHT = {"max_batch_rows": 13, "max_sequences": 4, "kv_tokens": 112, "block_size": 4}
PARAMS = [
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=2, ignore_eos=True),
]
PROMPTS = [[*range(20, 62)], [*range(30, 41)], [8], [*range(20, 54), 3, 9], [*range(9, 50)]]
JOBS = [(prompt, PARAMS[i % 3]) for i, prompt in enumerate(PROMPTS)]


@dataclass
class Seen:
    """States of one sequence, since it was last released."""

    states: dict[int, tuple[torch.Tensor, ...]] = field(default_factory=dict)  # by position
    ready: bool = False  # the last pass made a new token


class Watching(Drafter):
    """A draft model that writes down all states that it is shown, and checks what is promised of them."""

    def __init__(self, kind: str, past: int | None) -> None:
        self.inner = draft_model(topk=2, depth=3, nodes=5, target={"config": CONFIG, **KINDS[kind]}, noise=0.05)
        self.spec: DrafterSpec = replace(self.inner.spec, taps=LAYERS, past=past, observes=True)
        self.now: dict[int, Seen] = {}
        self.all: list[tuple[list[int], dict[int, tuple[torch.Tensor, ...]]]] = []
        self.holes = self.unseen = 0
        self.rows: list[int] = []

    def bind(self, target: TargetInfo, max_sequences: int, pool_tokens: int, device: torch.device) -> None:
        self.inner.bind(target, max_sequences, pool_tokens, device)

    def observe(self, step: StepFeatures) -> None:
        self.rows.append(sum(rows.stop - rows.start for rows in step.hidden_rows))
        for b, rows in enumerate(step.hidden_rows):
            view, count = step.sequences[b], rows.stop - rows.start
            seen = self.now.setdefault(view.key, Seen())
            if not seen.states:
                self.all.append((view.tokens, seen.states))
            for i in range(count):
                seen.states[step.first[b] + i] = tuple(step.hidden[layer][rows.start + i] for layer in LAYERS)
            end = step.first[b] + count
            assert end == len(view.tokens) - 1 or not step.committed[b] or not count
            seen.ready = bool(count and step.committed[b])

    def propose(self, want: DraftRequest) -> TokenTree:
        for view in want.sequences:
            seen, past = self.now.get(view.key, Seen()), self.spec.past
            if not seen.ready:  # no pass was seen yet: a prompt of one token, or the rest was in the cache
                self.unseen += 1
                continue
            last = len(view.tokens) - 2  # of the tokens in front of the root
            needed = range(last + 1 if past is None else min(max(1, past), last + 1))
            assert all(last - i in seen.states for i in needed)
            self.holes += len(seen.states) < last + 1
        return self.inner.propose(want)

    def release(self, keys: Sequence[int]) -> None:
        for key in keys:
            self.now.pop(key, None)
        self.inner.release(keys)


def whole(decoder: Decoder, tokens: Sequence[int]) -> dict[int, torch.Tensor]:
    """States of a text, computed in one causal pass."""
    count = len(tokens)
    cache = KVPool(*decoder.cache_shape, count, decoder.dtype, decoder.device)
    places, taps = torch.arange(count), Taps(LAYERS)
    segment = Segment(0, count, slice(0, count), count, 0, None, None)
    batch = Batch(torch.tensor(tokens), places, slice(0, count), decoder.plan([segment], places))
    with torch.inference_mode():
        decoder.run_layers(decoder.embed(batch), 0, decoder.num_layers, cache, taps)
    return taps.hidden


@pytest.mark.parametrize("past", [0, 7, None])
@pytest.mark.parametrize("kind", [pytest.param(k, marks=needs_kernels if k != "float64" else ()) for k in KINDS])
def test_a_drafter_is_shown_the_states_of_the_past_that_it_asked_for(kind: str, past: int | None):
    """In chunks, after preemption, after prefix hits, and behind accepted nodes of trees."""
    target = tiny_decoder(CONFIG, **KINDS[kind])
    drafter = Watching(kind, past)
    engine = assemble(drafter, decoder=target, **TIGHT)
    outputs = [*run(engine, JOBS), *run(engine, JOBS)]
    assert engine.round.failure is None  # type: ignore[attr-defined]
    met = {"preemptions": 0, "cached_prompt_tokens": 0, "accepted": 0}
    for output in outputs:
        for name in met:
            met[name] += getattr(output.stats, name)
    assert met["preemptions"] and met["accepted"] > 20
    assert bool(met["cached_prompt_tokens"]) == (past is not None) == bool(drafter.holes)
    assert drafter.unseen or past is None
    for tokens, states in drafter.all:
        right = whole(target, tokens)
        for position, found in states.items():
            for layer, state in zip(LAYERS, found, strict=True):
                if kind == "float64":
                    assert torch.allclose(state, right[layer][position], rtol=1e-9, atol=1e-9)
                else:
                    assert torch.equal(state, right[layer][position])


@needs_kernels
@pytest.mark.parametrize("kind", ["compiled float32", "compiled bf16"])
def test_states_of_a_compiled_pass_are_those_of_the_long_way(kind: str):
    found = []
    for compiled in (True, False):
        drafter = Watching(kind, None)
        engine = assemble(drafter, decoder=tiny_decoder(CONFIG, **KINDS[kind]), **TIGHT)
        engine.round.compiled = compiled  # type: ignore[attr-defined]
        run(engine, JOBS)
        assert engine.round.failure is None  # type: ignore[attr-defined]
        found.append((drafter.rows, drafter.all))
    (rows, fast), (others, slow) = found
    assert rows == others and len(fast) == len(slow) > len(JOBS)
    for (tokens, states), (same, right) in zip(fast, slow, strict=True):
        assert tokens == same and [*states] == [*right]
        for position, state in states.items():
            assert all(torch.equal(a, b) for a, b in zip(state, right[position], strict=True))
