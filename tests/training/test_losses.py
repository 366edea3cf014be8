"""Losses: the chunked versions against the eager ones, their derivatives, and what each formula promises."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.eager_losses import TargetLogits, eager_cross_entropy, eager_distilled, eager_mixed
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.train.losses import TargetHidden, TargetTop, cross_entropy, distilled, mixed

LOSSES: dict[str, tuple[Callable[..., Any], Callable[..., Tensor]]] = {  # what training calls, and its reference
    "cross_entropy": (cross_entropy, eager_cross_entropy),
    "mixed": (mixed, eager_mixed),
    "mixed_top": (mixed, eager_mixed),
    "distilled": (distilled, eager_distilled),
    "distilled_top": (distilled, eager_distilled),
    "distilled_text": (distilled, eager_distilled),
}


IGNORED = -100  # the target of a row that has none, as in torch.nn.functional.cross_entropy
ROWS, D, VOCAB = 23, 5, 11
CHUNKS = [1, 4, 7, 23, 100]


def top(logits: Tensor, count: int) -> TargetTop:
    """The likeliest tokens of a distribution, and what all others have together."""
    p, ids = logits.double().softmax(-1).topk(count)
    return TargetTop(ids, torch.cat((p, 1 - p.sum(-1, keepdim=True)), -1).log())


class Case:
    """Inputs of every loss, and the arguments that each takes."""

    def __init__(self, dtype: torch.dtype = torch.float64, rows: int = ROWS, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        normal = lambda *shape: torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype)  # noqa: E731
        self.hidden, self.head = normal(rows, D).requires_grad_(), normal(VOCAB, D).requires_grad_()
        self.tokens = torch.randint(VOCAB, (rows,), generator=draw)
        self.weights = torch.rand(rows, generator=draw, dtype=torch.float64).to(dtype)
        self.weights[::3] = 0
        self.soft = TargetHidden(normal(rows, D + 2), normal(VOCAB, D + 2))
        self.logits = TargetLogits(self.soft.hidden @ self.soft.head.t())
        self.top = top(self.logits.logits, 3)

    def args(self, name: str) -> tuple[Any, ...]:
        if name == "cross_entropy":
            return self.hidden, self.head, self.tokens
        said = None if name.endswith("_text") else self.top if name.endswith("_top") else self.soft
        return (self.hidden, self.head, said, *([self.tokens] if name.startswith("distilled") else []))

    def leaves(self, name: str) -> list[Tensor]:
        return [self.hidden, self.head]


OPTIONS = {
    "mixed": [{}, {"omega": 0.0}, {"omega": 0.3}, {"omega": 1.0}],
    "mixed_top": [{}, {"omega": 1.0}],
    "distilled": [{}, {"share": 0.8}, {"share": 1.0}],
    "distilled_top": [{}, {"share": 0.8}, {"share": 0.0}, {"share": 1.0}],
    "distilled_text": [{"share": 0.0}],
}
EACH = [(name, options) for name in LOSSES for options in OPTIONS.get(name, [{}])]


def value(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def compare(
    case: Case, name: str, options: dict[str, Any], weights: Tensor | None, chunk: int, tolerance: float
) -> None:
    loss = value(LOSSES[name][0](*case.args(name), weights, chunk_rows=chunk, **options))
    wanted = LOSSES[name][1](*case.args(name), weights, **options)
    torch.testing.assert_close(loss, wanted, rtol=tolerance, atol=tolerance)
    scale = 1.7  # a gradient other than 1 comes in from above
    found = torch.autograd.grad(scale * loss, case.leaves(name))
    for mine, theirs in zip(found, torch.autograd.grad(scale * wanted, case.leaves(name)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name, options", EACH)
def test_equals_eager_in_float64(name: str, options: dict[str, Any], weighted: bool, chunk: int) -> None:
    case = Case()
    compare(case, name, options, case.weights if weighted else None, chunk, 1e-12)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(LOSSES)), st.integers(1, 30), st.integers(1, 31), st.integers(0, 10**6))
def test_equals_eager_for_any_shape(name: str, rows: int, chunk: int, seed: int) -> None:
    case = Case(rows=rows, seed=seed)
    compare(case, name, {}, case.weights, chunk, 1e-10)


@pytest.mark.parametrize("name", LOSSES)
def test_rows_of_weight_zero_change_nothing(name: str) -> None:
    """Neither value nor gradient, though they hold NaN and targets out of range."""
    case = Case()
    function, off = LOSSES[name][0], case.weights == 0
    wanted = value(function(*case.args(name), case.weights))
    gradients = torch.autograd.grad(wanted, case.leaves(name))
    with torch.no_grad():
        for tensor in (case.hidden, case.soft.hidden, case.top.log_probs):
            tensor[off] = math.nan
    case.tokens[off] = IGNORED
    spoilt = value(function(*case.args(name), case.weights))
    assert spoilt == wanted
    for mine, before in zip(torch.autograd.grad(spoilt, case.leaves(name)), gradients, strict=True):
        assert torch.equal(mine, before)


class LogitsWatch(TorchDispatchMode):
    """Most bytes of [rows, V] tensors alive at once, and how many products were made."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.vocab, self.live, self.peak, self.matmuls = vocab, 0, 0, 0
        self._seen: dict[int, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.matmuls += "mm" in str(function) and "addmm_" not in str(function)
        if isinstance(result, Tensor) and result.ndim == 2 and result.shape[1] == self.vocab:
            self._track(result.untyped_storage())
        return result

    def _track(self, storage: Any) -> None:
        key = storage._cdata
        if key in self._seen:
            return
        self._seen[key] = storage.nbytes()
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._release, key)

    def _release(self, key: int) -> None:
        self.live -= self._seen.pop(key, 0)


@pytest.mark.parametrize("name", LOSSES)
def test_logits_of_all_rows_never_exist_at_once(name: str) -> None:
    case, chunk = Case(rows=640), 10
    with LogitsWatch(VOCAB) as watch:
        value(LOSSES[name][0](*case.args(name), chunk_rows=chunk)).backward()
    assert 0 < watch.peak <= 12 * chunk * VOCAB * 8  # a dozen float64 tensors of a chunk; all rows are 64 chunks


@pytest.mark.parametrize("name", LOSSES)
def test_autocast_rounds_products_alone(name: str) -> None:
    """Under bf16 autocast on a CPU: the loss of logits rounded to bf16 once, in float32 from there on."""
    case, rounded = Case(torch.float32), Case(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = value(LOSSES[name][0](*case.args(name), case.weights, chunk_rows=4))
    rounded.hidden, rounded.head = as_logits(case.hidden, case.head)
    rounded.soft = TargetHidden(*as_logits(case.soft.hidden, case.soft.head))
    wanted = LOSSES[name][1](*rounded.args(name), case.weights)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, wanted, rtol=0, atol=1e-4)  # bf16 from there on would be off by 1e-2
    gradients = torch.autograd.grad(loss, case.leaves(name))
    assert all(gradient.dtype == torch.float32 for gradient in gradients)
    exact = torch.autograd.grad(value(LOSSES[name][0](*case.args(name), case.weights)), case.leaves(name))
    for mine, other in zip(gradients, exact, strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-2, atol=2e-3)


def as_logits(hidden: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    """Logits rounded to bf16, as hidden states of a head that passes them on."""
    factors = hidden.detach().bfloat16().float(), head.detach().bfloat16().float()
    return (factors[0] @ factors[1].t()).bfloat16().float(), torch.eye(len(head))


def test_frozen_columns_of_a_head_get_no_gradient_and_others_theirs() -> None:
    draw = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(n, 7, generator=draw, dtype=torch.float64) for n in (12, 20))
    target = TargetLogits(torch.randn(12, 20, generator=draw, dtype=torch.float64))
    grads = []
    for frozen in (0, 4):
        inputs = hidden.clone().requires_grad_(), head.clone().requires_grad_()
        mixed(*inputs, target, omega=1.0, frozen=frozen, chunk_rows=5).backward()
        grads.append([x.grad for x in inputs])
    assert torch.equal(grads[0][0], grads[1][0])
    assert torch.equal(grads[0][1][:, 4:], grads[1][1][:, 4:])
    assert not grads[1][1][:, :4].any() and grads[0][1][:, :4].any()
