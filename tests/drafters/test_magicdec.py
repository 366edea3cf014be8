"""MagicDec: what its passes see, against texts with their keys moved by hand; compiled drafts against the long way."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from kits.draft import paths_of, text, view
from kits.tiny import tiny_config, tiny_decoder

from paceline import kernels
from paceline.core.sequence import Sequence
from paceline.draft.base import DraftRequest
from paceline.draft.magicdec import MagicDec, MagicDecConfig
from paceline.kernels.drafts import roll
from paceline.kv.pool import KVPool, SequenceCache
from paceline.kv.views import SinkWindow
from paceline.model.decoder import Decoder
from paceline.model.families import DecoderConfig
from paceline.model.packing import RowPacker
from paceline.model.rope import RopeConfig, RopeTable

CPU = torch.device("cpu")
WHOLE = (None, None, None)
LENGTHS = (3, 14, 15, 40, 97)  # around and beyond what a view of 2 + 12 tokens holds


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def whole(**changes: Any) -> DecoderConfig:
    return tiny_config(**{"windows": WHOLE} | changes)


class Stage:
    """A target with texts in its pool, and a drafter bound to it."""

    def __init__(self, decoder: Decoder, lengths: tuple[int, ...] = LENGTHS, block_size: int = 16, **options: Any):
        self.decoder = decoder
        self.drafter = MagicDec(MagicDecConfig(**{"window": 12, "sinks": 2, "depth": 4} | options))
        scratch = self.drafter.spec.scratch * len(lengths)
        shape = decoder.cache_shape
        self.pool = KVPool(*shape, 1024, decoder.dtype, CPU, block_size, scratch_slots=scratch)
        self.drafter.bind(decoder.info("tiny"), len(lengths), self.pool.num_tokens, CPU)
        self.views: list[Sequence] = []
        self.caches: list[SequenceCache] = []
        for key, length in enumerate(lengths):
            self.add(text(length, key), key)

    def add(self, tokens: list[int], key: int, **params: Any) -> None:
        """A text, computed up to its root, with room for a draft."""
        cache = self.pool.open()
        cache.reserve(len(tokens) + self.drafter.config.depth)
        if self.pool.block_size < 16:  # blocks out of order, as a full pool gives them
            random.Random(key).shuffle(cache.blocks)
            cache._contiguous = len(cache.blocks) < 2
        cache.reserve(len(tokens) - 1)
        if len(tokens) > 1:
            self.compute(cache, tokens[:-1])
            self.pool.commit([(cache, range(len(tokens) - 1))])
        cache.reserve(1 + self.drafter.config.depth)
        self.views.append(view(tokens, key, **params))
        self.caches.append(cache)

    def compute(self, cache: SequenceCache, tokens: list[int]) -> None:
        packer, count = RowPacker(self.decoder, CPU), len(tokens)
        packer.add(tokens, range(count), cache.slots(0, count), cache.slots(0, count), count, 0)
        self.decoder.run_layers(self.decoder.embed(packer.batch()), 0, self.decoder.num_layers, self.pool)

    def want(self, **options: Any) -> DraftRequest:
        many = len(self.views)
        return DraftRequest(self.views, [64] * many, [64] * many, caches=self.caches, **options)

    def params(self, **params: Any) -> None:
        """Other sampling rules for all texts."""
        self.views = [view(v.tokens, v.key, **params) for v in self.views]


def moved(x: torch.Tensor, rope: RopeConfig, positions: torch.Tensor, back: bool) -> torch.Tensor:
    """Keys [layers, heads, n, head_dim] turned by their positions [n], or back."""
    cos, sin = (part[:, 0] for part in RopeTable(rope, x.dtype, CPU).rows(positions))
    dim = cos.shape[-1]
    part = x[..., :dim]
    turned = part * cos + part.roll(dim // 2, -1) * (-sin if back else sin)
    return torch.cat((turned, x[..., dim:]), -1)


def by_hand(stage: Stage, index: int, path: list[int]) -> torch.Tensor:
    """[V] what the target says behind a drafted path, over a text that is nothing but sinks and window: all keys of the
    view lie in a pool of their own at positions 0, 1, .., where the rows of the path are computed."""
    decoder, shape, rope = stage.decoder, stage.drafter.shape, stage.decoder.config.rope
    assert rope is not None
    known = len(stage.views[index].tokens) - 1
    k, v = (torch.stack(x)[:, :, stage.caches[index].slots(0, known)] for x in (stage.pool.k, stage.pool.v))
    bare = moved(k, rope, torch.arange(known), back=True)
    logits = torch.empty(0)
    own_k, own_v = [], []  # of the rows of the path, bare
    for step, token in enumerate([stage.views[index].tokens[-1], *path]):
        position = known + step
        seen = [p for p in range(position) if p < shape.sinks or p > position - shape.window]
        old = [p for p in seen if p < known]
        count = len(seen) + 1
        pool = KVPool(*decoder.cache_shape, count, decoder.dtype, CPU)
        keys = torch.cat([bare[:, :, old], *[own_k[p - known] for p in seen if p >= known]], 2)
        values = torch.cat([v[:, :, old], *[own_v[p - known] for p in seen if p >= known]], 2)
        pool.tensors.all_k[:, :, : count - 1] = moved(keys, rope, torch.arange(count - 1), back=False)
        pool.tensors.all_v[:, :, : count - 1] = values
        packer = RowPacker(decoder, CPU)
        packer.add([token], [count - 1], slice(count - 1, count), slice(0, count), count, count - 1)
        state = decoder.run_layers(decoder.embed(packer.batch()), 0, decoder.num_layers, pool)
        logits = decoder.logits(state)[0]
        own_k.append(moved(pool.tensors.all_k[:, :, count - 1 : count], rope, torch.tensor([count - 1]), back=True))
        own_v.append(pool.tensors.all_v[:, :, count - 1 : count].clone())
    return logits


@pytest.mark.parametrize(
    "changes",
    [{}, {"rope": RopeConfig(dim=4)}, {"qk_norm": True}, {"num_kv_heads": 4}],
    ids=["", "part rotated", "normed keys", "one head each"],
)
@pytest.mark.parametrize("sinks", [0, 1, 3])
def test_a_pass_sees_the_view_at_its_own_positions(changes: dict[str, Any], sinks: int) -> None:
    stage = Stage(tiny_decoder(whole(**changes)), sinks=sinks)
    tree = stage.drafter.draft(stage.want())
    for b in range(len(LENGTHS)):
        found = paths_of(tree, b)
        assert max(map(len, found)) == 4
        for path, score in found.items():
            fresh = by_hand(stage, b, list(path[:-1])).log_softmax(0)
            assert score - found.get(path[:-1], 0.0) == pytest.approx(float(fresh[path[-1]]), abs=1e-9)
            assert int(fresh.argmax()) == path[-1]


def test_what_is_read_and_held_stays_the_same_as_the_text_grows() -> None:
    stage = Stage(tiny_decoder(whole()), (20, 90, 300))
    keys = [stage.drafter.view.keys(c, len(v.tokens) - 1, 0) for v, c in zip(stage.views, stage.caches, strict=True)]
    assert {len(x) if isinstance(x, torch.Tensor) else x.stop - x.start for x in keys} == {14}
    shape = SinkWindow(2, 12)
    assert [shape.gap(p) for p in (0, 13, 14, 99)] == [0, 0, 1, 86]


def test_the_targets_k_v_is_left_alone() -> None:
    stage = Stage(tiny_decoder(whole()), block_size=4)
    own = torch.cat([torch.as_tensor(range(1024))[c.slots(0, c.committed)] for c in stage.caches])
    kv = stage.pool.tensors
    before = kv.all_k[:, :, own].clone(), kv.all_v[:, :, own].clone()
    stage.drafter.draft(stage.want())
    assert torch.equal(kv.all_k[:, :, own], before[0]) and torch.equal(kv.all_v[:, :, own], before[1])
    stage.drafter.release([0, 1, 99])


@pytest.mark.skipif(kernels.unavailable() is not None, reason=str(kernels.unavailable()))
@pytest.mark.parametrize("block_size", [16, 4], ids=["contiguous", "gathered"])
@pytest.mark.parametrize("proposes", ["point", "coupled"])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_compiled_drafts_are_those_of_the_long_way(
    kind: str, proposes: str, block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same tokens, and to the bit the same K/V: of drafted tokens, and of the sinks that were turned."""
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    shape = whole(head_dim=16, rope=RopeConfig(dim=8))
    decoder = tiny_decoder(shape, dtype=dtype, quant="int8" if kind == "int8" else None, compiled=True)
    stages = [Stage(decoder, block_size=block_size, proposes=proposes) for _ in range(2)]
    if block_size == 4:
        assert all(isinstance(c.slots(0, 2), torch.Tensor) for c in stages[0].caches)
    trees = []
    for stage, compiled in zip(stages, (True, False), strict=True):
        if proposes == "coupled":
            stage.params(temperature=0.9, top_p=0.95)
        if not compiled:
            monkeypatch.setattr("paceline.draft.magicdec.compiles", lambda *_: False)
        with patch("paceline.draft.magicdec.roll", side_effect=roll) as rolled:
            trees.append(stage.drafter.draft(stage.want()))
        assert rolled.called == compiled
    for fast, slow in zip(*trees, strict=True):
        assert fast.tokens == slow.tokens and fast.scores == pytest.approx(slow.scores, abs=1e-4)
    for made, expected in zip(
        (*stages[0].pool.k, *stages[0].pool.v), (*stages[1].pool.k, *stages[1].pool.v), strict=True
    ):
        assert torch.equal(made, expected)
