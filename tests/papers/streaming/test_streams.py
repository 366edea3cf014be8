"""Trained sets of streams: shapes, files, formulas, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kits.pools import cached_prefix
from kits.tiny import tiny_streams
from safetensors.torch import save_file

from paceline.core.errors import ConfigError
from paceline.kv.pool import KVPool
from paceline.papers.streaming.model import StreamSet, read_config
from paceline.weights.files import fingerprint


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_streams_begin_as_equation_4_says() -> None:
    made = tiny_streams()
    x = torch.randn(5, 32, dtype=torch.float64)
    assert made.embeddings is not None
    assert torch.equal(made.begin(x), x[:, None] + made.embeddings[None])


@pytest.mark.parametrize("options", [{}, {"adapter": None, "prune_rank": 0}])
def test_what_was_saved_comes_back(tmp_path: Path, options: dict[str, Any]) -> None:
    made = tiny_streams(**options)
    made.save(tmp_path / "set")
    back = StreamSet.load(tmp_path / "set")
    assert back.config == made.config == read_config(tmp_path / "set")
    assert made.tensors().keys() == back.tensors().keys()
    assert all(torch.equal(a, back.tensors()[name]) for name, a in made.tensors().items())
    half = StreamSet.load(tmp_path / "set", dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} <= {torch.bfloat16}


def _checkpoint(folder: Path, weight: torch.Tensor) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    save_file({"w": weight}, folder / "model.safetensors")
    return folder


def test_a_fingerprint_tells_weights_and_configs_apart(tmp_path: Path) -> None:
    weight = torch.randn(300_000, generator=seeded())
    made = fingerprint(_checkpoint(tmp_path / "a", weight))
    assert made == fingerprint(_checkpoint(tmp_path / "b", weight))
    assert made != fingerprint(_checkpoint(tmp_path / "c", weight + 1e-6))
    (tmp_path / "b" / "config.json").write_text('{"model_type": "qwen2"}')
    assert made != fingerprint(tmp_path / "b")
    with pytest.raises(ConfigError, match="lacks config.json"):
        fingerprint(tmp_path)


def test_blocks_are_found_under_their_identity_alone() -> None:
    pool = KVPool(1, 1, 4, 64, torch.float32, torch.device("cpu"), block_size=4)
    tokens = [*range(17)]
    for identity in (None, "sql"):
        sequence = pool.open(tokens, identity=identity)
        assert sequence.committed == 0
        sequence.reserve(16)
        pool.commit([(sequence, range(16))])
        sequence.publish(tokens)
        assert cached_prefix(pool, tokens, identity) == 16
    assert cached_prefix(pool, tokens, "prose") == 0
    assert pool.cost(tokens, 99, identity="prose")[0] == 17 and pool.cost(tokens, 99, identity="sql")[0] == 1
    pool.check_integrity()


def test_only_shareable_tokens_are_published_and_found() -> None:
    pool = KVPool(1, 1, 4, 64, torch.float32, torch.device("cpu"), block_size=4)
    tokens = [*range(17)]
    first = pool.open(tokens, shareable=10)
    first.reserve(16)
    pool.commit([(first, range(16))])
    first.publish(tokens)
    assert cached_prefix(pool, tokens) == 8
    whole = pool.open(tokens)
    whole.reserve(8)
    pool.commit([(whole, range(8))])
    whole.publish(tokens)
    assert cached_prefix(pool, tokens) == 16
    assert cached_prefix(pool, tokens, shareable=15) == 12
    assert pool.open(tokens, shareable=15).reused == 12
    pool.check_integrity()
