"""Priority, a bound on waiting requests, deadlines: who runs when; what is said never changes."""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter

import pytest
import torch
from kits.tiny import VOCAB, alone, assemble, draft_model, ids, tiny_decoder

from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine

pytestmark = pytest.mark.timeout(60)
TARGET = tiny_decoder()
GREEDY = SamplingParams(temperature=0, seed=1, max_tokens=12, ignore_eos=True)
LONG = replace(GREEDY, max_tokens=40)


def prompts(count: int, size: int = 9) -> list[list[int]]:
    draw = torch.Generator().manual_seed(4)
    return [torch.randint(10, VOCAB, (size,), generator=draw).tolist() for _ in range(count)]


def ended(engine: Engine) -> list[str]:
    """Ids of the requests in the order in which they end."""
    order: list[str] = []
    while engine.busy:
        order += [live.id for live in engine.step() if live.finished]
        engine.pool.check_integrity()
    return order


def test_the_urgent_are_served_first_and_equals_as_they_came():
    engine = assemble(decoder=TARGET, max_sequences=1)
    given = prompts(6)
    for prompt, name, priority in zip(given, "abcdef", (5, 0, 5, -1, 0, 5), strict=True):
        engine.submit(prompt, GREEDY, name, priority=priority)
    assert ended(engine) == [*"dbeacf"]


def test_the_least_urgent_is_preempted_and_says_the_same():
    given = prompts(3, 30)
    whole = ids(alone(TARGET, [(prompt, LONG) for prompt in given]))
    engine = assemble(decoder=TARGET, kv_tokens=112)
    lives = []
    for prompt, name, priority in zip(given, "abc", (9, 0, 0), strict=True):
        engine.submit(prompt, LONG, name, priority=priority)
        lives.append(engine.live[name])
        engine.step()
    assert ended(engine)[-1] == "a"  # the oldest, which would be the last to suffer
    assert [engine.output(live).outputs[0].token_ids for live in lives] == whole
    preempted = [engine.output(live).stats.preemptions for live in lives]
    assert preempted[0] > 0 and preempted[1] == 0


@pytest.mark.parametrize("drafting", [False, True])
def test_a_deadline_ends_a_request_between_two_steps(drafting: bool):
    engine = assemble(draft_model(depth=3) if drafting else None, decoder=TARGET, max_sequences=2)
    given = prompts(4)
    whole = ids(alone(TARGET, [(prompt, LONG) for prompt in given]))
    heard: list[str] = []
    lives = []
    for prompt, name, seconds in zip(given, "abcd", (1e4, None, 1e4, None), strict=True):
        engine.submit(prompt, LONG, name, deadline_s=seconds, on_end=lambda live: heard.append(live.id))
        lives.append(engine.live[name])
    for _ in range(3):
        engine.step()
    for live in lives[::2]:
        live.deadline = perf_counter()  # one runs, one waits
    assert {live.id for live in engine.step()} >= {"a", "c"}
    assert sorted(heard) == ["a", "c"] and "a" not in engine.live
    ended(engine)
    outputs = [engine.output(live).outputs[0] for live in lives]
    assert [output.finish_reason for output in outputs] == ["deadline", "length", "deadline", "length"]
    assert [len(outputs[1].token_ids), len(outputs[2].token_ids)] == [40, 0] and 0 < len(outputs[0].token_ids) < 40
    for output, tokens in zip(outputs, whole, strict=True):
        assert output.token_ids == tokens[: len(output.token_ids)]
    assert sorted(heard) == [*"abcd"]
