"""Small sets of streams and adapters for an embedded model, made up and not trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from paceline.model.adapters import LINEARS, AdapterConfig, linear_shapes
from paceline.papers.streaming.model import StreamConfig, StreamSet
from paceline.weights.files import fingerprint
from paceline.weights.source import read_config, resolve_folder

MODEL = "paceline-small-draft"  # the smaller of the embedded two


def save_set(
    folder: Path,
    *,
    mode: str = "lossless",
    gamma: int = 2,
    layers: int = 1,
    linears: tuple[str, ...] = LINEARS,
    **options: Any,
) -> str:
    """A set for `MODEL` that changes little: adapters of a shared one by a hair."""
    shape = read_config(place := Path(resolve_folder(MODEL)))
    total = max(shape.num_layers, layers + 1)  # with more than the target has it can be read, not run
    low = total - layers if mode == "lossless" else 0
    config = StreamConfig(
        **{"prune_rank": 4 if gamma else 0} | options,
        mode=mode,  # type: ignore[arg-type]
        gamma=gamma,
        msa_layers=layers if gamma else 0,
        num_layers=total,
        d_model=shape.d_model,
        vocab_size=shape.vocab_size,
        adapter=AdapterConfig(rank=2, layers=tuple(range(low, total)), linears=linears),
        target=MODEL,
        fingerprint=fingerprint(place),
    )
    generator = torch.Generator().manual_seed(3)
    trained = StreamSet.fresh(config, linear_shapes(shape), generator)
    assert trained.adapters is not None
    for up in trained.adapters.up.values():
        up.data.copy_(0.1 * torch.randn(up.shape, generator=generator))
    trained.save(folder)
    return str(folder)


def save_all(root: Path) -> dict[str, str]:
    """Folders of one of each kind, by name."""
    return {
        "lossless": save_set(root / "lossless"),
        "deeper": save_set(root / "deeper", layers=2),
        "shared": save_set(root / "shared", mode="shared"),
        "adapter": save_set(root / "adapter", mode="shared", gamma=0),
        "unpruned": save_set(root / "unpruned", prune_rank=0),
    }
