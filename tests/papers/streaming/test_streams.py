"""Trained sets of streams: shapes, files, formulas, refusals; what layers do otherwise for stream rows."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.pools import cached_prefix
from kits.tiny import tiny_config, tiny_streams
from safetensors.torch import save_file

from paceline.core.errors import ConfigError
from paceline.kv.pool import KVPool
from paceline.model.adapters import AdapterConfig, linear_shapes
from paceline.papers.streaming.layer_rows import StreamLimit, StreamRows
from paceline.papers.streaming.model import StreamSet, read_config
from paceline.weights.files import fingerprint

SHAPE = tiny_config()
SHAPES = linear_shapes(SHAPE)
OWN_MLP = AdapterConfig(rank=4, layers=(2,), linears=("qkv", "mlp"))


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


def test_an_adapter_in_place_of_the_mlp_goes_from_its_input_to_its_output() -> None:
    adapters = tiny_streams(adapter=OWN_MLP).adapters
    assert adapters is not None
    assert {name: tuple(t.shape) for name, t in adapters.tensors().items() if "mlp" in name} == {
        "2.mlp.down": (4, 32),
        "2.mlp.up": (32, 4),
    }
    assert adapters.replaces_mlp(2) and not adapters.replaces_mlp(1)


def test_streams_begin_as_equation_4_says() -> None:
    made = tiny_streams(start_rank=2)
    x = torch.randn(5, 32, dtype=torch.float64)
    assert made.start_map is not None and made.embeddings is not None
    mapped = x + x @ made.start_map.down.T @ made.start_map.up.T
    assert torch.allclose(made.begin(x), mapped[:, None] + made.embeddings[None])
    turned = tiny_streams(value_rotation=0.01)
    assert turned.embeddings is None
    assert torch.equal(turned.begin(x), x[:, None].expand(5, 3, 32))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"value_rotation": 0.02},
        {"start_rank": 2},
        {"adapter": None, "prune_rank": 0},
        {"adapter": OWN_MLP},
        {"exits": (1,)},
    ],
)
def test_what_was_saved_comes_back(tmp_path: Path, options: dict[str, Any]) -> None:
    made = tiny_streams(**options)
    made.save(tmp_path / "set")
    back = StreamSet.load(tmp_path / "set")
    assert back.config == made.config == read_config(tmp_path / "set")
    assert made.tensors().keys() == back.tensors().keys()
    assert all(torch.equal(a, back.tensors()[name]) for name, a in made.tensors().items())
    half = StreamSet.load(tmp_path / "set", dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} <= {torch.bfloat16}


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


# ---- what layers do otherwise


def test_values_are_rotated_by_j_epsilon_in_pairs() -> None:
    values = torch.randn(5, 2, 8, dtype=torch.float64)
    angles = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)[:, None, None]
    rotated = StreamRows(2, (angles.cos(), angles.sin())).rotated(values)
    assert torch.equal(rotated[:2], values[:2])
    pairs = torch.complex(values[2:, :, :4], values[2:, :, 4:]) * torch.exp(1j * angles)
    assert torch.allclose(rotated[2:], torch.cat((pairs.real, pairs.imag), -1))


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("most", [1, 3, 40])
def test_limited_attention_by_hand(most: int, shared: bool, window: int | None) -> None:
    """Row by row, as appendix H.1 says it."""
    generator = seeded(most)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    keys, gamma, heads, kv_heads, dim, scale = 7, 2, 4, 2, 8, 0.4
    mains = [5, 6]  # main rows at positions 5 and 6 of seven keys in slots 0 .. 6; streams in slots 8 .. 11
    query, k, v = draw(6, heads, dim), draw(kv_heads, 12, dim), draw(kv_heads, 12, dim)
    visible = torch.ones(2, keys, dtype=torch.bool).tril(keys - 2)
    visible[1, 3] = False
    limit = StreamLimit(
        most=most,
        rows=torch.tensor([0, 1]),
        streams=slice(2, 6),
        keys=torch.arange(keys),
        key_positions=torch.arange(keys),
        visible=visible,
        own=torch.tensor(mains),
        positions=torch.tensor(mains),
        scratch=torch.arange(8, 12),
        shared=shared,
    )
    found = limit.attend(query, k, v, scale, window).view(4, heads, dim)
    for g, place in enumerate(mains):
        own = [8 + g * gamma + j for j in range(gamma)]
        seen = [s for s in range(keys) if visible[g, s] and (window is None or s > place - window)]
        pool = seen + (own if shared else [])
        weights = torch.stack(
            [(k[h // 2, pool] @ query[g, h] * scale).softmax(0)[: len(seen)] for h in range(heads)]
        ).mean(0)
        weights[seen.index(place)] = math.inf
        best = [seen[i] for i in weights.argsort(descending=True)[:most].tolist()]
        for j in range(gamma):
            near = [s for s in best if window is None or s > place + j + 1 - window] + own[: j + 1]
            for h in range(heads):
                row = 2 + g * gamma + j
                mixed = (k[h // 2, near] @ query[row, h] * scale).softmax(0) @ v[h // 2, near]
                assert torch.allclose(found[row - 2, h], mixed)


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
