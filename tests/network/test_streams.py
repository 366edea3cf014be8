"""Trained sets of streams: shapes, files, formulas, refusals; what layers do otherwise for stream rows."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.pools import cached_prefix
from kits.tiny import tiny_config, tiny_streams
from safetensors.torch import load_file, save_file

from paceline.core.errors import ConfigError
from paceline.kv.pool import KVPool
from paceline.network.adapters import LINEARS, AdapterConfig, LowRank, linear_shapes
from paceline.network.files import fingerprint
from paceline.network.stream_rows import StreamLimit, StreamRows
from paceline.network.streams import CONFIG_FILE, WEIGHTS_FILE, StreamConfig, StreamSet, read_config

SHAPE = tiny_config()
SHAPES = linear_shapes(SHAPE)
OWN_MLP = AdapterConfig(rank=4, layers=(2,), linears=("qkv", "mlp"))
BASE: dict[str, Any] = {"gamma": 3, "msa_layers": 2, "num_layers": 4, "d_model": 32, "vocab_size": 96}


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


def test_linears_may_be_left_out_and_gradients_flow() -> None:
    adapter = LowRank(AdapterConfig(layers=(1,), linears=("qkv",)), SHAPES).start(seeded())
    assert [pair[:2] for pair in adapter.pairs()] == [(1, "qkv")]
    delta = adapter.delta(1, "qkv", torch.randn(2, 7, SHAPES["qkv"][0]))
    assert delta is not None and not delta.any()  # up starts as 0
    delta.sum().backward()
    assert all(p.grad is not None for p in adapter.parameters())


def test_preparing_what_was_not_loaded_is_refused() -> None:
    with pytest.raises(ConfigError, match="holds NaN"):
        LowRank(AdapterConfig(layers=(1,)), SHAPES).prepare()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank must be 1"),
        ({"alpha": 0.0}, "alpha must be above 0"),
        ({"layers": (2, 1)}, "ascending"),
        ({"layers": (-1, 1)}, "ascending"),
        ({"linears": ("qkv", "head")}, "some of qkv"),
        ({"linears": ()}, "some of qkv"),
        ({"linears": ("mlp", "down")}, "up or down beside mlp"),
    ],
)
def test_adapters_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AdapterConfig(**{"layers": (1, 2)} | options)


def test_linear_shapes_are_those_of_the_decoder() -> None:
    from kits.tiny import tiny_decoder

    layer = tiny_decoder().in_order()[0]
    weights: list[Any] = [getattr(layer, name).weight for name in LINEARS]
    assert [tuple(weight.shape[::-1]) for weight in weights] == [SHAPES[name] for name in LINEARS]


# ---- sets


@pytest.mark.parametrize(("d", "extra"), [(4096, 81_920), (3072, 61_440)])
def test_parameters_follow_the_paper(d: int, extra: int) -> None:
    """gamma * d + 2 * r * d beside the adapters (Speculative Streaming, table 3: 8.2E4 and 6.1E4)."""
    config = StreamConfig(gamma=4, msa_layers=2, num_layers=4, d_model=d, vocab_size=96, prune_rank=8)
    made = StreamSet(config, {})
    parts = made.parameters_by_part()
    assert parts == {"embeddings": 4 * d, "start": 0, "prune": 16 * d, "exits": 0, "adapters": 0}
    assert sum(parts.values()) == sum(p.numel() for p in made.parameters()) == extra


def test_an_adapter_in_place_of_the_mlp_goes_from_its_input_to_its_output() -> None:
    adapters = tiny_streams(adapter=OWN_MLP).adapters
    assert adapters is not None
    assert {name: tuple(t.shape) for name, t in adapters.tensors().items() if "mlp" in name} == {
        "2.mlp.down": (4, 32),
        "2.mlp.up": (32, 4),
    }
    assert adapters.replaces_mlp(2) and not adapters.replaces_mlp(1)


def test_adapters_and_start_map_are_counted_apart() -> None:
    parts = tiny_streams(start_rank=3).parameters_by_part()
    assert parts["start"] == 2 * 3 * 32
    assert parts["adapters"] == sum(4 * (inputs + outputs) for inputs, outputs in SHAPES.values())


def test_exits_lie_where_they_are_wanted() -> None:
    made = tiny_streams(exits=(1,))
    assert made.parameters_by_part()["exits"] == made.parameters_by_part()["prune"] == 2 * 8 * 32
    maps = made.exit_maps()
    assert {*maps} == {1, 2} and maps[2] is made.prune_map
    x = torch.randn(3, 32, dtype=torch.float64)
    assert not torch.equal(maps[1](x), maps[2](x)) and torch.equal(made.first(1).exit_maps()[1](x), maps[1](x))
    fresh = StreamSet.fresh(StreamConfig(**BASE, exits=(1, 3)), SHAPES, seeded())
    assert all(torch.equal(part(x.float()), x.float()) for part in fresh.exit_maps().values())
    assert not tiny_streams(prune_rank=0).exit_maps()


def test_a_fresh_set_changes_nothing_yet() -> None:
    config = StreamConfig(**BASE, start_rank=2, adapter=AdapterConfig(layers=(2, 3)))
    made = StreamSet.fresh(config, SHAPES, seeded())
    assert made.embeddings is not None and made.start_map is not None and made.prune_map is not None
    assert made.adapters is not None and made.embeddings.dtype == torch.float32
    x = torch.randn(3, 32)
    assert torch.equal(made.start_map(x), x) and torch.equal(made.prune_map(x), x)
    assert torch.equal(made.begin(x), x[:, None] + made.embeddings)
    assert 0.015 < float(made.embeddings.detach().std()) < 0.025
    delta = made.adapters.delta(2, "qkv", x)
    assert delta is not None and not delta.any()
    again = StreamSet.fresh(config, SHAPES, seeded())
    assert all(torch.equal(a, b) for a, b in zip(made.parameters(), again.parameters(), strict=True))


def test_streams_begin_as_equation_4_says() -> None:
    made = tiny_streams(start_rank=2)
    x = torch.randn(5, 32, dtype=torch.float64)
    assert made.start_map is not None and made.embeddings is not None
    mapped = x + x @ made.start_map.down.T @ made.start_map.up.T
    assert torch.allclose(made.begin(x), mapped[:, None] + made.embeddings[None])
    turned = tiny_streams(value_rotation=0.01)
    assert turned.embeddings is None
    assert torch.equal(turned.begin(x), x[:, None].expand(5, 3, 32))


def test_the_first_streams_of_a_set() -> None:
    made = tiny_streams()
    two = made.first(2)
    x = torch.randn(4, 32, dtype=torch.float64)
    assert two.config.gamma == 2
    assert torch.equal(two.begin(x), made.begin(x)[:, :2])
    assert two.adapters is made.adapters


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


def test_nothing_unloaded_is_saved(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="embeddings holds NaN"):
        StreamSet(StreamConfig(**BASE), SHAPES).save(tmp_path)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "both"}, "lossless or shared"),
        ({"gamma": 0}, "gamma must be 1 or more"),
        ({"msa_layers": 4}, "msa_layers must be 1 to 3"),
        ({"msa_layers": 0}, "msa_layers must be 1 to 3"),
        ({"start_rank": -1}, "start_rank must be 0"),
        ({"prune_rank": 33}, "prune_rank must be 0 to d_model"),
        ({"exits": (0,)}, "exits must lie in layers 1 to 3"),
        ({"exits": (1, 4)}, "exits must lie in layers 1 to 3"),
        ({"exits": (2,)}, "not where streams begin"),
        ({"exits": (3, 1)}, "exits must ascend"),
        ({"exits": (1, 1)}, "exits must ascend"),
        ({"exits": (1,), "prune_rank": 0}, "exits need streams and a prune_rank"),
        ({"value_rotation": 0.0}, "above 0"),
        ({"value_rotation": float("nan")}, "above 0"),
        ({"adapter": AdapterConfig(layers=(1, 2))}, "must lie in layers 2 to 3"),
        ({"mode": "shared", "adapter": AdapterConfig(layers=(1, 4))}, "must lie in layers 0 to 3"),
        ({"mode": "shared", "gamma": 0, "msa_layers": 0}, "adapter is missing"),
        ({"adapter": AdapterConfig(layers=(3,), linears=("mlp",))}, "mlp in lossless mode alone, .* in every layer"),
        ({"mode": "shared", "adapter": AdapterConfig(layers=(2, 3), linears=("mlp",))}, "mlp in lossless mode alone"),
    ],
)
def test_sets_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StreamConfig(**BASE | options)


def test_plain_adapters_are_a_shared_set_without_streams() -> None:
    config = StreamConfig(
        **BASE | {"mode": "shared", "gamma": 0, "msa_layers": 0, "adapter": AdapterConfig(layers=(0,))}
    )
    made = StreamSet(config, SHAPES)
    assert made.embeddings is None and made.prune_map is None and config.insertion == 4


# ---- broken files


def _config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        values = json.loads((folder / CONFIG_FILE).read_text()) | changes
        (folder / CONFIG_FILE).write_text(json.dumps({k: v for k, v in values.items() if v != "absent"}))

    return change


def _tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        values = load_file(folder / WEIGHTS_FILE)
        change(values)
        save_file(values, folder / WEIGHTS_FILE)

    return rewrite


def _nan(values: dict[str, torch.Tensor]) -> None:
    values["prune.up"][0, 0] = math.nan


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / CONFIG_FILE).unlink(), "holds no streams.json"),
        (lambda f: (f / WEIGHTS_FILE).unlink(), "holds no streams.safetensors"),
        (lambda f: (f / CONFIG_FILE).write_text("{"), "not JSON"),
        (lambda f: (f / CONFIG_FILE).write_text("[]"), "not a JSON object"),
        (lambda f: (f / WEIGHTS_FILE).write_bytes(b"nothing"), "truncated or not safetensors"),
        (_config(format=9), "not written in format 1"),
        (_config(colour="red"), "unknown entries: colour"),
        (_config(gamma="absent"), "not the configuration of a stream set"),
        (_config(gamma=9), "embeddings is .3, 32., wanted .9, 32."),
        (_config(start_rank=2), "start.down is missing"),
        (_config(prune_rank=0), "prune.down has no place"),
        (_config(exits=[1]), "exits.1.down is missing"),
        (_config(exits="12"), "exits must be a list of layers"),
        (_config(adapter=3), "not the configuration of a stream set"),
        (_tensors(lambda v: v.pop("adapters.2.qkv.up")), "adapters.2.qkv.up is missing|no shape is given"),
        (_tensors(_nan), "prune.up holds NaN"),
    ],
)
def test_broken_sets_are_refused(tmp_path: Path, damage: Callable[[Path], Any], message: str) -> None:
    tiny_streams().save(tmp_path)
    damage(tmp_path)
    with pytest.raises(ConfigError, match=message):
        StreamSet.load(tmp_path)


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such folder"):
        StreamSet.load(tmp_path / "none")


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

    monkeypatch.setattr("paceline.network.files.content_hash", lost)
    with pytest.raises(ConfigError, match="config.json cannot be read .Input/output error.. Restore the file"):
        fingerprint(folder)


def test_a_small_file_has_a_fingerprint(tmp_path: Path) -> None:
    assert len(fingerprint(_checkpoint(tmp_path / "a", torch.zeros(2)))) == 64


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


def test_scratch_slots_lie_behind_all_others() -> None:
    from paceline.core.errors import PoolFullError

    pool = KVPool(1, 1, 4, 64, torch.float32, torch.device("cpu"), scratch_slots=6)
    assert pool.scratch(6).stop == pool.k[0].shape[1] and pool.scratch(2).start >= pool.num_tokens
    with pytest.raises(PoolFullError, match="7 scratch slots wanted"):
        pool.scratch(7)
