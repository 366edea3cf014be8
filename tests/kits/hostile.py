"""A tiny checkpoint folder to do harm to, values that belong nowhere, and a limit on what harm may cost."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import paceline.api.assembly.memory
from paceline import LLM, ConfigError
from paceline.model.families import decoder_config
from paceline.weights import loader
from paceline.weights.names import weight_map

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "dtype": "float32",
    "eos_token_id": 3,
}
OPTIONS: dict[str, Any] = {"max_sequences": 2, "max_batch_rows": 32, "kernels": "torch", "offline": True}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
FREE = 256 * 2**20  # bytes of memory that a guarded example believes to be free, and may take

NASTY: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 3, 7, 64, 1.5, -0.5, 0.0, 1e-320, 1e300, float("inf"), float("nan")),
    *(10**9, 2**31 - 1, 2**31, 2**63, 2**64, 10**30, 10**400, -(10**400)),
    *("", " ", "x", "2", "no", "auto", "1e400GiB", "9" * 5000, "a\0b", "\ud800", "../..", "~nobody-of-that-name"),
    *([], [0], [[]], ["x"], [1, 2], [10**400], {}, {"x": 1}, {"a": {"b": {}}}, [[[[[[[[1]]]]]]]]),
]


def deep(levels: int = 200) -> list[Any]:
    """A list in a list in a list."""
    made: list[Any] = []
    for _ in range(levels):
        made = [made]
    return made


def write_config(folder: Path, values: Any, name: str = "config.json") -> None:
    (folder / name).write_text(json.dumps(values), "utf-8")


def write_checkpoint(folder: Path, **changes: Any) -> Path:
    """`CONFIG` with changes, and random weights that fit it."""
    folder.mkdir(parents=True, exist_ok=True)
    values = CONFIG | changes
    write_config(folder, values)
    generator = torch.Generator().manual_seed(3)
    pieces = weight_map(decoder_config(values))
    tensors = {f"model.{p.source}": 0.1 * torch.randn(p.shape, generator=generator) for p in pieces}
    save_file(tensors, folder / "model.safetensors")
    return folder


@contextmanager
def bounded(monkeypatch: pytest.MonkeyPatch, seconds: float = 20.0) -> Iterator[None]:
    """Nothing in here may take long, nor allocate more than `FREE`, be the failure reported or not."""

    def none_failed(error: BaseException) -> bool:
        raise AssertionError("memory was asked for that there is not") from error

    before = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    began = time.monotonic()
    with monkeypatch.context() as patched:
        patched.setattr(loader, "is_out_of_memory", none_failed)
        patched.setattr(loader, "free_bytes", lambda device: FREE // 2)
        patched.setattr(paceline.api.assembly.memory, "free_bytes", lambda device: FREE // 4)
        resource.setrlimit(resource.RLIMIT_AS, (size + 4 * FREE, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)
    assert time.monotonic() - began < seconds


def start(model: Any, **options: Any) -> ConfigError | None:
    """Make an `LLM`: None, or the one kind of error that may come; it must have something to show."""
    try:
        LLM(model, **OPTIONS | options)
    except ConfigError as error:
        assert error.subject and error.wrong and error.remedy and len(str(error)) < 3000
        return error
    return None
