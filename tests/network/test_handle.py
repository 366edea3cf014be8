"""What the target lends: embedding, final norm and head, to drafters and to layers of their own over them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kits.native import needs_kernels
from kits.tiny import full_logits, tiny_config, tiny_decoder, tiny_weights

from paceline.core.errors import CapabilityError
from paceline.kernels.linear import top
from paceline.model.attention import make_backend
from paceline.model.decoder import Decoder

KINDS: dict[str, dict[str, Any]] = {
    "float64": {"dtype": torch.float64},
    "float32 exact": {"dtype": torch.float32, "exact": True},
    "bf16": {"dtype": torch.bfloat16},
    "bf16 exact": {"dtype": torch.bfloat16, "exact": True},
    "int8": {"dtype": torch.bfloat16, "quant": "int8"},
    "compiled float32": {"dtype": torch.float32, "compiled": True},
    "compiled bf16": {"dtype": torch.bfloat16, "compiled": True},
    "compiled int8": {"dtype": torch.bfloat16, "quant": "int8", "compiled": True},
}
COMPILED = [kind for kind in KINDS if kind.startswith("compiled")]
ALL = [pytest.param(kind, marks=needs_kernels if kind in COMPILED else ()) for kind in KINDS]
TOKENS = [*range(20, 33)]


def states_of(decoder: Decoder, rows: int = 5) -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    return (3 * torch.randn(rows, decoder.config.d_model, generator=draw)).to(decoder.dtype)


def borrowing(lender: Decoder, normed: bool = False, **changes: Any) -> Decoder:
    """The lender's layers once more, over its embedding, norm and head."""
    kind = lender.dtype
    shape = tiny_config(**changes)
    backend = make_backend(kind, exact=lender.exact)
    given: dict[str, Any] = {"dtype": kind, "native": lender.stack is not None, "quant": lender.quant}
    given["exact"] = lender.exact
    made = Decoder(shape, backend, ends_of=lender.handle(), normed=normed, **given)
    own = tiny_weights(Decoder(shape, backend, **given))
    for name, parameter in made.named_parameters():
        parameter.data.copy_(own[name].data)
    return made.finish()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ALL)
def test_logits_of_raw_and_of_normed_states_are_the_targets_without_its_rounding(kind: str, tied: bool):
    decoder = tiny_decoder(tiny_config(tied=tied), **KINDS[kind])
    handle, states = decoder.handle(), states_of(decoder)
    logits, own = handle.logits(states), decoder.read(states)
    assert logits.dtype == own.dtype and handle.dtype == decoder.dtype
    rounded = kind not in COMPILED and decoder.dtype == torch.bfloat16  # by torch's kernels
    close = 0.01 if rounded else 1e-6
    assert torch.allclose(logits, own, rtol=close, atol=close)
    assert torch.equal(own, own.to(torch.bfloat16)) == rounded
    assert (logits.to(torch.bfloat16) != logits).any()
    again = handle.logits(handle.final(states), normed=True)
    assert torch.equal(again, logits) and not torch.equal(handle.logits(states, normed=True), logits)
    tokens, log_q = top(logits, 3)
    best = logits.log_softmax(1).topk(3)
    assert tokens == best.indices.tolist()
    assert torch.allclose(torch.tensor(log_q, dtype=logits.dtype), best.values, atol=1e-4)


@pytest.mark.parametrize("kind", ALL)
def test_layers_over_a_lent_head_compute_what_a_whole_network_does(kind: str):
    decoder = tiny_decoder(**KINDS[kind])
    body = borrowing(decoder)
    found, whole = full_logits(body, TOKENS), full_logits(decoder, TOKENS)
    if kind in COMPILED or kind == "float64":
        assert torch.equal(found, whole)
    else:
        assert torch.allclose(found, whole, rtol=0.01, atol=0.02)
    states = states_of(decoder)
    assert torch.equal(borrowing(decoder, normed=True).read(states), decoder.handle().logits(states, normed=True))


def test_layers_of_another_shape_are_refused():
    decoder = tiny_decoder(dtype=torch.float32)
    with pytest.raises(CapabilityError, match="trained for this target"):
        borrowing(decoder, d_model=48)
    with pytest.raises(CapabilityError, match="trained for this target"):
        borrowing(decoder, vocab_size=95)
    backend = make_backend(torch.float32)
    with pytest.raises(CapabilityError, match="native=False"):
        Decoder(tiny_config(), backend, dtype=torch.float32, native=True, ends_of=decoder.handle())
