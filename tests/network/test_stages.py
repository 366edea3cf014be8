"""A target in stages with stores of their own: the bits of one pass, whatever was dropped or moved on the way."""

from __future__ import annotations

import random
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from kits.native import needs_kernels
from kits.tiny import full_logits, tiny_config, tiny_decoder
from specpipe_parts.cuts import cut_layers

from paceline.kv.store import KVStore
from paceline.model.stages import TEXT, Frame, Stage, StageRows, even_cuts

CONFIG = tiny_config(num_layers=5)
SLOTS = 160
KERNELS = pytest.param({"dtype": torch.bfloat16, "compiled": True}, marks=needs_kernels, id="compiled")
EXACT = pytest.param({"dtype": torch.float32, "exact": True}, id="exact")


def stages(decoder: Any, bounds: list[int]) -> list[Stage]:
    """Each over tensors of its own."""
    _, heads, dim = decoder.cache_shape
    made = []
    for start, stop in pairwise(bounds):
        store = KVStore(stop - start, heads, dim, SLOTS, decoder.dtype, torch.device("cpu"))
        made.append(Stage(decoder, start, stop, store))
    return made


def text(tokens: list[int], first: int, slots: list[int]) -> StageRows:
    """The last tokens of a text, from position ``first`` on; ``slots`` of all of it."""
    own = tokens[first:]
    keys = torch.tensor(slots[: len(tokens)])
    return StageRows(1, 0, own, [TEXT] * len(own), range(first, len(tokens)), keys, len(tokens), first)


def logits(decoder: Any, frame: Frame) -> torch.Tensor:
    assert frame.hidden is not None
    return decoder.read(frame.hidden)


@pytest.mark.parametrize("shape", [KERNELS, EXACT])
@torch.inference_mode()
def test_rows_that_are_left_have_the_bits_of_plain_decoding(shape: dict[str, Any]) -> None:
    """A prompt, and a level of a tree of which a late verdict drops rows in the middle of the pipeline."""
    decoder = tiny_decoder(CONFIG, **shape)
    prompt, level = [11, 12, 13, 14, 15, 16], [30, 31, 32, 33]
    slots = random.Random(1).sample(range(80), 20)
    for heard in range(4):  # the stage that the verdict reaches before the frame
        line = stages(decoder, [0, 2, 3, 5])
        frame = Frame(0, [text(prompt, 0, slots)])
        for stage in line:
            frame = stage.run(frame)
        assert torch.equal(logits(decoder, frame), full_logits(decoder, prompt))
        keys = torch.tensor(slots[: len(prompt) + len(level)])
        eye = torch.eye(len(level), dtype=torch.bool)
        places = [len(prompt)] * len(level)
        tree = StageRows(1, 0, level, [*range(1, 5)], places, keys, len(keys), len(prompt), eye, places)
        frame = Frame(0, [tree])
        for place, stage in enumerate(line):
            if place >= heard:
                stage.tell(1, 1, frozenset({2, 4}))
            frame = stage.run(frame)
        left = [1, 2, 3, 4] if heard == 3 else [2, 4]
        assert [*frame.parts[0].nodes] == left
        for row, node in enumerate(left):
            alone = full_logits(decoder, [*prompt, level[node - 1]])[-1]
            assert torch.equal(logits(decoder, frame)[row], alone)


@pytest.mark.parametrize("shape", [KERNELS, EXACT])
@torch.inference_mode()
def test_moves_ride_behind_the_frames_that_wrote_the_rows(shape: dict[str, Any]) -> None:
    """All frames are under way at once: the second moves what the first has not written everywhere yet."""
    decoder = tiny_decoder(CONFIG, **shape)
    line = stages(decoder, [0, 1, 4, 5])
    prompt = [11, 12, 13, 14, 15, 16]
    before, after = [*range(40, 46)], [*range(43, 50)]  # these overlap
    first = Frame(0, [text(prompt, 0, before)])
    second = Frame(0, [text([*prompt, 17], 6, after)], moves=[(before, after[:6])])
    one = line[0].run(first)
    two = line[0].run(second)  # the first frame is still in front of the second stage
    for stage in line[1:]:
        one, two = stage.run(one), stage.run(two)
    assert torch.equal(logits(decoder, one), full_logits(decoder, prompt))
    assert torch.equal(logits(decoder, two)[-1], full_logits(decoder, [*prompt, 17])[-1])


@torch.inference_mode()
def test_what_is_closed_or_of_another_epoch_is_not_computed() -> None:
    decoder = tiny_decoder(CONFIG)
    stage = stages(decoder, [0, 5])[0]
    frame = Frame(0, [text([11, 12], 0, [3, 4])], moves=[([7], [8])])
    stage.close(1)
    assert stage.run(frame).rows == 0 and not stage.store.all_k.any()
    stage.run(Frame(0, (), ended=[1]))
    assert not stage._closed and not stage._told  # nothing is kept of requests that ended
    stage.forget(1)
    assert stage.run(frame).rows == 0 and not stage.store.all_k.any()
    assert stage.run(Frame(1, frame.parts)).rows == 2 and stage.store.all_k.any()


@pytest.mark.parametrize("seed", range(10))
def test_cuts_are_the_best_of_all(seed: int) -> None:
    rng = random.Random(seed)
    layers, count = rng.randint(4, 9), rng.randint(1, 4)
    costs = [[rng.randint(1, 9) for _ in range(layers)] for _ in range(count)]

    def cost(stage: int, start: int, stop: int) -> float:
        return sum(costs[stage][start:stop]) + (5 if stage == count - 1 else 0)

    def slowest(bounds: list[int]) -> float:
        return max(cost(stage, *pair) for stage, pair in enumerate(pairwise(bounds)))

    assert even_cuts(layers, count) == cut_layers(layers, count, lambda stage, start, stop: float(stop - start))
    found = cut_layers(layers, count, cost)
    ways = [[0, *inner, layers] for inner in combinations(range(1, layers), count - 1)]
    assert found in ways and slowest(found) == min(map(slowest, ways))
