"""Trained sets of streams: shapes, files, formulas, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.pools import cached_prefix
from kits.tiny import tiny_config, tiny_streams
from safetensors.torch import save_file

from paceline.core.errors import ConfigError
from paceline.kv.pool import KVPool
from paceline.model.adapters import linear_shapes
from paceline.papers.streaming.model import CONFIG_FILE, StreamSet, read_config
from paceline.weights.files import fingerprint

SHAPE = tiny_config()
SHAPES = linear_shapes(SHAPE)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---- adapters


def test_the_delta_is_the_low_rank_product() -> None:
    adapter = tiny_streams().adapters
    assert adapter is not None
    x = torch.randn(5, SHAPES["up"][0], dtype=torch.float64)
    down, up = adapter.pair(2, "up")  # type: ignore[misc]
    wanted = adapter.config.alpha / adapter.config.rank * x @ down.T @ up.T
    plain = adapter.delta(2, "up", x)
    assert plain is not None and torch.allclose(plain, wanted)
    prepared = adapter.prepare().delta(2, "up", x)
    assert prepared is not None and torch.allclose(prepared, wanted)
    assert adapter.delta(0, "up", x) is None and adapter.pair(0, "up") is None


# ---- sets


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


def test_entries_of_variants_that_left(tmp_path: Path) -> None:
    """Sets of 0.2.0 name them: unset they are read as before, else the set is refused."""
    tiny_streams().save(tmp_path)
    file = tmp_path / CONFIG_FILE
    written = json.loads(file.read_text())
    file.write_text(json.dumps(written | {"start_rank": 0, "exits": [], "value_rotation": None}))
    assert read_config(tmp_path) == tiny_streams().config
    file.write_text(json.dumps(written | {"value_rotation": 0.01}))
    with pytest.raises(ConfigError, match="unknown entries: value_rotation"):
        read_config(tmp_path)


# ---- fingerprints


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


def test_every_byte_of_the_weights_is_in_the_fingerprint(tmp_path: Path) -> None:
    """Weights that differ anywhere, be it in most tensors or in one number of a large one, are other weights."""
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    whole = {f"layer {i}": torch.randn(40_000, generator=seeded()) for i in range(20)}
    save_file(whole, folder / "model.safetensors")
    made = fingerprint(folder)
    place = folder / "model.safetensors"
    content, first = place.read_bytes(), place.stat().st_size - 20 * 160_000
    for begin, end in [(first + 160_000 * i + 15_000, first + 160_000 * i + 15_001) for i in range(20)]:
        place.write_bytes(content[:begin] + bytes([content[begin] ^ 1]) + content[end:])
        assert fingerprint(folder) != made, begin
    place.write_bytes(content)
    assert fingerprint(folder) == made
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {}}')  # says which files are read
    assert fingerprint(folder) != made


def test_a_checkpoint_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _checkpoint(tmp_path / "a", torch.zeros(2))

    def lost(file: Path) -> str:
        raise OSError(5, "Input/output error", str(file))

    monkeypatch.setattr("paceline.weights.files.content_hash", lost)
    with pytest.raises(ConfigError, match="config.json cannot be read .Input/output error.. Restore the file"):
        fingerprint(folder)


# ---- the pool's part


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
