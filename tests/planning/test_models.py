"""Names and config files: published sizes, and what a config must say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import ConfigError
from paceline.plan import models
from paceline.weights import zoo

BILLIONS = {  # parameters that the publishers state: all, embeddings included
    "llama-2-7b": 6.74,
    "llama-2-13b": 13.0,
    "llama-2-70b": 69.0,
    "llama-3-8b": 8.03,
    "llama-3-70b": 70.6,
    "llama-3-405b": 406,
    "llama-3.2-1b": 1.5,  # 1.24 with the embedding shared
    "qwen3-0.6b": 0.75,  # 0.6 with the embedding shared
    "qwen3-1.7b": 2.03,  # 1.7 so
    "qwen3-4b": 4.41,  # 4.0 so
    "qwen3-8b": 8.2,
    "qwen3-14b": 14.8,
    "qwen3-32b": 32.8,
    "mistral-7b": 7.24,
    "opt-6.7b": 6.86,  # 6.7 with the embedding shared
    "opt-13b": 13.1,
    "opt-66b": 66.2,
}


@pytest.mark.parametrize("name", models.names())
def test_named_models_have_the_published_sizes(name: str) -> None:
    shape = models.named(name)
    assert shape is not None
    if name in BILLIONS:
        total = shape.body_parameters + 2 * shape.head_parameters
        assert total / 1e9 == pytest.approx(BILLIONS[name], rel=0.012)
    else:
        assert name == "spire-8-layer"


def test_embedded_models_are_read_from_their_configs() -> None:
    for entry in zoo.available():
        if entry.role in ("target", "draft") and entry.path is not None and not entry.published:
            shape = models.read_shape(entry.path)
            matrices = shape.body_parameters + shape.head_parameters  # the embedding is the head
            assert matrices / entry.parameters == pytest.approx(1, rel=0.005)
            assert shape.name == entry.name and shape.max_position == 2048


SMALL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}


def write(folder: Path, **changes: Any) -> Path:
    values = {name: value for name, value in {**SMALL, **changes}.items() if value is not None}
    file = folder / "config.json"
    file.write_text(json.dumps(values))
    return file


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"hidden_size": -64}, "hidden_size = -64"),
        ({"num_attention_heads": None}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3"),
        ({"model_type": "deepseek_v3"}, "not a supported architecture"),
    ],
)
def test_configs_that_the_engine_does_not_read(tmp_path: Path, changes: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        models.read_shape(write(tmp_path, **changes))
