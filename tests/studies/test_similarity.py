"""Figure 5 on a target where every state is known: a row is its token's own direction, and each layer of streams turns
it into the next token's.

The text counts 0, 1, 2, 3, 0, 1, ..; a row of it stays e_t, since attention and the layers' own MLPs add nothing. What
adapters add to the MLP of a row e_v is e_(v + 1) - e_v. So a stream that begins as e_t is e_(t + l) after l layers, and
its cosine with main row t + j is 1 where both are the same token, and 0 elsewhere.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from kits.tiny import tiny_config
from streaming.states import similarity
from torch import Tensor

from paceline.attention.rope import RopeTable
from paceline.network.adapters import AdapterConfig, linear_shapes
from paceline.network.streams import StreamConfig, StreamSet
from paceline.training.data import Example, collate
from paceline.training.network import Network

CYCLE = 4  # tokens
GAMMA, LAYERS = 4, 3
CONFIG = tiny_config(num_layers=4, windows=(None,) * 4)
INSIDE = 3.0  # of the MLP's gate and up projections: the identity, times this
TEXT = [Example(np.arange(19, dtype=np.int32) % CYCLE, 5), Example(np.arange(7, dtype=np.int32) % CYCLE, 0)]


def counting_target() -> Network:
    """Row t of a text is the direction of its token before and after every layer."""
    network = Network(CONFIG, frozen=True)
    network.init_weights(0)
    for name, parameter in network.named_parameters():
        if name.endswith(("out.weight", "down.weight")):
            parameter.data.zero_()
        elif name.endswith("up.weight"):  # gate and up, one behind the other
            square = torch.zeros(CONFIG.d_ff, CONFIG.d_model)
            square[: CONFIG.d_model] = INSIDE * torch.eye(CONFIG.d_model)
            parameter.data.copy_(torch.cat((square, square)))
    network.decoder.embedding.data.zero_()[: CONFIG.d_model] = torch.eye(CONFIG.d_model)
    assert CONFIG.rope is not None
    network._rope = RopeTable(CONFIG.rope, 512, torch.float64, torch.device("cpu"))
    return network.double()


def turn() -> Tensor:
    """[d, d]: what is to be added to e_v to make it e_(v + 1), of the tokens that count."""
    made = torch.zeros(CONFIG.d_model, CONFIG.d_model, dtype=torch.float64)
    for token in range(CYCLE):
        made[(token + 1) % CYCLE, token] += 1.0
        made[token, token] -= 1.0
    return made


def turning_set(mode: Any, ahead: bool) -> StreamSet:
    """Each layer of streams goes one token on; ``ahead``: streams begin one token on already."""
    d = CONFIG.d_model
    layers = tuple(range(CONFIG.num_layers - LAYERS, CONFIG.num_layers))
    config = StreamConfig(
        mode=mode,
        gamma=GAMMA,
        msa_layers=LAYERS,
        num_layers=CONFIG.num_layers,
        d_model=d,
        vocab_size=CONFIG.vocab_size,
        start_rank=d if ahead else 0,
        adapter=AdapterConfig(rank=d, alpha=d, layers=layers, linears=("down",)),
    )
    made = StreamSet.fresh(config, linear_shapes(CONFIG)).double()
    assert made.embeddings is not None and made.adapters is not None
    made.embeddings.data.zero_()
    if made.start_map is not None:
        made.start_map.down.data.copy_(torch.eye(d))
        made.start_map.up.data.copy_(turn())
    x = (
        INSIDE * math.sqrt(d) / math.sqrt(1 + CONFIG.norm_eps * d)
    )  # of a direction: after the norm, times the projection
    for layer in layers:
        pair = made.adapters.pair(layer, "down")
        assert pair is not None
        down, up = pair
        down.data.zero_()[:, :d] = torch.eye(d) / (x / (1 + math.exp(-x)) * x)  # silu(gate) times up
        up.data.copy_(turn())
    return made


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("mode", ["lossless", "shared"])
def test_similarity_is_known_at_every_layer(mode: Any, ahead: bool) -> None:
    """Adapters of a shared set turn the main rows as well, so that streams stay as far from them as they began."""
    batch = collate([[TEXT[0]], [TEXT[1]]], 20)
    streams, main = similarity(counting_target(), turning_set(mode, ahead), batch)
    gone = [layer if mode == "lossless" else 0 for layer in range(1 + LAYERS)]  # further than main rows
    wanted = [[float((steps + ahead - j) % CYCLE == 0) for j in range(1, GAMMA + 1)] for steps in gone]
    torch.testing.assert_close(streams, torch.tensor(wanted), rtol=0, atol=1e-5, check_dtype=False)
    still = torch.tensor([[float(j % CYCLE == 0) for j in range(1, GAMMA + 1)]] * (1 + LAYERS))
    torch.testing.assert_close(main, still, rtol=0, atol=1e-5, check_dtype=False)
