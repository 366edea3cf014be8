"""A family with scaled embeddings, two rotations and norms behind: a head learns what it will read at work."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "parity"))
from checkpoints import build

from paceline import LLM
from paceline.train.network import Network


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_drafters_are_trained_on_the_embeddings_that_they_read(kernels: str, tmp_path: Path) -> None:
    build("gemma3", tmp_path)
    network = Network.load(tmp_path, frozen=True)
    decoder = LLM(str(tmp_path), kernels=kernels, dtype="float32", threads=1).decoder
    tokens = torch.tensor([3, 9, 27])
    read = decoder.info("gemma", None).handle.embed(tokens)
    torch.testing.assert_close(network.embed(tokens), read.float(), rtol=1e-4, atol=1e-5)
    assert float(read.float().std()) > 2 * float(network.decoder.embedding[tokens].std())  # they are scaled
