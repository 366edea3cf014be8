"""A state head that starts from its target: the last layer's weights, and a fusing map by least squares.

A head predicts normed states, H = w h / R(h) with the final norm's gains w and R the root mean square, so its residual
stream is kept in that scale: x' = w x / R(h). The map from (the next token's embedding, H) to the last layer's input x'
at the next place is fitted; the layer's own weights are the target's, with gains and outputs scaled so that it computes
in x' what the target's computes in x. R varies from row to row and is taken at its median: a start, not an identity.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ...core.errors import CapabilityError
from ...draft.states.head import LAYER, StateHead
from ..data import TokenBatch
from ..network import Network

ROWS = 24_000  # that the map is fitted on
RIDGE = 1e-4  # of the inputs' mean squares
LEAST_GAIN = 0.05  # of the mean: smaller ones are not divided by


@torch.no_grad()
def start_from_target(head: StateHead, target: Network, batches: Iterable[TokenBatch]) -> None:
    """Fill ``head``.

    Args:
        batches: text that the map is fitted on, as much as `ROWS` rows of it.

    Raises:
        CapabilityError: a target whose last layer is not one like a head's: norms elsewhere, biases.
    """
    c, ours = target.config, head.tensors()
    prefix = f"model.{LAYER[:-2]}{c.num_layers - 1}."
    theirs = {n.removeprefix(prefix): v for n, v in target.state().items() if n.startswith(prefix)}
    expected = {name.removeprefix(LAYER) for name in ours if name.startswith(LAYER)} | {"input_layernorm.weight"}
    if theirs.keys() != expected or target.decoder.norm is None:
        wrong = f"its last layer has {', '.join(sorted(theirs.keys() ^ expected)) or 'no norm after it'}"
        raise CapabilityError("start=target", f"{wrong}: a head's layer is Llama's", "leave start at random")
    inputs, aims, ratio, size = _rows(target, batches)
    gain = target.decoder.norm.weight.float()
    divisor = gain.clone()
    small = LEAST_GAIN * gain.abs().mean()
    divisor[divisor.abs() < small] = small
    ours["fc.weight"].copy_(_least_squares(inputs, aims))
    for name, value in ours.items():
        layer_name = name.removeprefix(LAYER)
        if name.startswith(LAYER) and layer_name in theirs:
            value.copy_(theirs[layer_name])
    before, within = theirs["input_layernorm.weight"], theirs["post_attention_layernorm.weight"]
    own_size = aims.square().mean(-1).sqrt().median()
    if LAYER + "input_layernorm.weight" in ours:
        ours[LAYER + "input_layernorm.weight"].copy_(before / divisor * own_size / ratio)
    else:  # EAGLE's layer has none in front of its attention
        for part in "qkv":
            ours[f"{LAYER}self_attn.{part}_proj.weight"].mul_(before / divisor / ratio)
    ours[LAYER + "post_attention_layernorm.weight"].copy_(within / divisor * own_size / ratio)
    for part in ("self_attn.o_proj", "mlp.down_proj"):
        ours[f"{LAYER}{part}.weight"].mul_((gain / size)[:, None])
    if head.blank is not None:
        head.blank.copy_(inputs[:, : c.d_model].mean(0))


def _rows(target: Network, batches: Iterable[TokenBatch]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return [n, 2d] embedding of the next token and state, [n, d] x' there; median ratio of the last layer's input
    to its output in size, and median size of its output."""
    gain = target.decoder.norm.weight.float()  # type: ignore[union-attr]
    inputs, aims, ratios, sizes, count = [], [], [], [], 0
    for batch in batches:
        embedded = target.embed(batch.tokens)
        before, _ = target.run(embedded, 0, target.config.num_layers - 1, batch)
        after, _ = target.run(before, target.config.num_layers - 1, target.config.num_layers, batch)
        same = (batch.documents[:, 1:] == batch.documents[:, :-1]) & (batch.documents[:, 1:] >= 0)
        size = after.float().square().mean(-1).sqrt()[..., None]
        both = torch.cat((embedded[:, 1:], target.final(after)[:, :-1]), -1)
        inputs.append(both[same].float())
        aims.append((before.float() * gain / size)[:, 1:][same])
        ratios.append((before.float().square().mean(-1).sqrt()[..., None] / size)[:, 1:][same])
        sizes.append(size[:, 1:][same])
        count += len(inputs[-1])
        if count >= ROWS:
            break
    return torch.cat(inputs), torch.cat(aims), torch.cat(ratios).median(), torch.cat(sizes).median()


def _least_squares(x: Tensor, y: Tensor) -> Tensor:
    """Return [out, in] W that makes W x near y, with a small ridge."""
    gram = x.T @ x + torch.diag(RIDGE * len(x) * x.square().mean(0) + torch.finfo(x.dtype).eps)
    solved: Tensor = torch.linalg.solve(gram, x.T @ y).T
    return solved
