"""Losses: the chunked versions against the eager ones, their derivatives, and what each formula promises."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kits.eager_losses import (
    TargetLogits,
    eager_cross_entropy,
    eager_distilled,
    eager_kl,
    eager_mixed,
    eager_mse_cross_entropy,
    eager_soft,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.training import losses
from paceline.training.losses import TargetHidden, TargetTop, cross_entropy, distilled, mixed, mse_cross_entropy

LOSSES: dict[str, tuple[Callable[..., Any], Callable[..., Tensor]]] = {  # what training calls, and its reference
    "cross_entropy": (cross_entropy, eager_cross_entropy),
    "mixed": (mixed, eager_mixed),
    "mixed_top": (mixed, eager_mixed),
    "mse_cross_entropy": (mse_cross_entropy, eager_mse_cross_entropy),
    "distilled": (distilled, eager_distilled),
    "distilled_top": (distilled, eager_distilled),
    "distilled_text": (distilled, eager_distilled),
}


def kl(hidden: Tensor, head: Tensor, target: Any) -> Tensor:
    """The whole KL, of which `distilled` is a share."""
    return distilled(hidden, head, target, torch.zeros(len(hidden), dtype=torch.int64), share=1.0)[0]


def eager_acceptance(hidden: Tensor, head: Tensor, target: TargetLogits | TargetHidden) -> Tensor:
    """alpha = sum_x min(p, q): the other end of MixedLoss."""
    return -eager_mixed(hidden, head, target, omega=0.0)


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
        self.state, self.target_state = normal(rows, D).requires_grad_(), normal(rows, D)
        self.tokens = torch.randint(VOCAB, (rows,), generator=draw)
        self.weights = torch.rand(rows, generator=draw, dtype=torch.float64).to(dtype)
        self.weights[::3] = 0
        self.soft = TargetHidden(normal(rows, D + 2), normal(VOCAB, D + 2))
        self.logits = TargetLogits(self.soft.hidden @ self.soft.head.t())
        self.top = top(self.logits.logits, 3)

    def args(self, name: str) -> tuple[Any, ...]:
        if name == "cross_entropy":
            return self.hidden, self.head, self.tokens
        if name == "mse_cross_entropy":
            return self.state, self.target_state, self.hidden, self.head, self.soft
        said = None if name.endswith("_text") else self.top if name.endswith("_top") else self.soft
        return (self.hidden, self.head, said, *([self.tokens] if name.startswith("distilled") else []))

    def leaves(self, name: str) -> list[Tensor]:
        return [self.hidden, self.head] + ([self.state] if name == "mse_cross_entropy" else [])


OPTIONS = {
    "mixed": [{}, {"omega": 0.0}, {"omega": 0.3}, {"omega": 1.0}],
    "mixed_top": [{}, {"omega": 1.0}],
    "distilled": [{}, {"share": 0.8}, {"share": 1.0}],
    "distilled_top": [{}, {"share": 0.8}, {"share": 0.0}, {"share": 1.0}],
    "distilled_text": [{"share": 0.0}],
    "mse_cross_entropy": [{}, {"alpha": 0.3, "beta": 2.0}],
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


# -- chunked equals eager


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name, options", EACH)
def test_equals_eager_in_float64(name: str, options: dict[str, Any], weighted: bool, chunk: int) -> None:
    case = Case()
    compare(case, name, options, case.weights if weighted else None, chunk, 1e-12)


@pytest.mark.parametrize("name, options", EACH)
def test_equals_eager_in_float32(name: str, options: dict[str, Any]) -> None:
    case = Case(torch.float32)
    compare(case, name, options, case.weights, 4, 2e-6)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(LOSSES)), st.integers(1, 30), st.integers(1, 31), st.integers(0, 10**6))
def test_equals_eager_for_any_shape(name: str, rows: int, chunk: int, seed: int) -> None:
    case = Case(rows=rows, seed=seed)
    compare(case, name, {}, case.weights, chunk, 1e-10)


@pytest.mark.parametrize("name", LOSSES)
def test_gradcheck(name: str) -> None:
    case = Case(rows=4)
    rest = case.args(name)

    def call(*leaves: Tensor) -> Tensor:
        place = {id(old): new for old, new in zip(case.leaves(name), leaves, strict=True)}
        args = [place.get(id(arg), arg) for arg in rest]
        return value(LOSSES[name][0](*args, case.weights, chunk_rows=3))

    assert torch.autograd.gradcheck(call, case.leaves(name))


@pytest.mark.parametrize("name", ["mixed", "distilled"])
def test_logits_and_hidden_targets_are_the_same(name: str) -> None:
    case, loss = Case(), LOSSES[name][0]
    one, other = Case(), Case()
    other.soft = case.logits  # type: ignore[assignment]
    one, other = (value(loss(*made.args(name), chunk_rows=4)) for made in (one, other))
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_no_gradient_flows_into_the_target() -> None:
    case = Case()
    soft = TargetHidden(case.soft.hidden.requires_grad_(), case.soft.head.requires_grad_())
    kl(case.hidden, case.head, soft).backward()
    assert soft.hidden.grad is None and soft.head.grad is None


def test_only_the_gradients_that_are_wanted_are_made() -> None:
    case = Case()
    cross_entropy(case.hidden, case.head.detach(), case.tokens).backward()
    wanted = torch.autograd.grad(eager_cross_entropy(case.hidden, case.head, case.tokens), case.hidden)[0]
    torch.testing.assert_close(case.hidden.grad, wanted)
    with torch.no_grad():
        assert not cross_entropy(case.hidden, case.head, case.tokens).requires_grad


# -- weights


@pytest.mark.parametrize("name", LOSSES)
def test_rows_of_weight_zero_change_nothing(name: str) -> None:
    """Neither value nor gradient, though they hold NaN and targets out of range."""
    case = Case()
    function, off = LOSSES[name][0], case.weights == 0
    wanted = value(function(*case.args(name), case.weights))
    gradients = torch.autograd.grad(wanted, case.leaves(name))
    with torch.no_grad():
        for tensor in (case.hidden, case.state, case.target_state, case.soft.hidden, case.top.log_probs):
            tensor[off] = math.nan
    case.tokens[off] = IGNORED
    spoilt = value(function(*case.args(name), case.weights))
    assert spoilt == wanted
    for mine, before in zip(torch.autograd.grad(spoilt, case.leaves(name)), gradients, strict=True):
        assert torch.equal(mine, before)


@pytest.mark.parametrize("name", LOSSES)
def test_only_rows_left_count(name: str) -> None:
    """A mask gives what the rows it keeps give by themselves."""
    case = Case()
    mask = torch.arange(ROWS) % 3 != 0
    kept = Case()
    for field in ("hidden", "state", "target_state", "tokens"):
        setattr(kept, field, getattr(kept, field)[mask])
    kept.soft = TargetHidden(kept.soft.hidden[mask], kept.soft.head)
    kept.top = TargetTop(kept.top.ids[mask], kept.top.log_probs[mask])
    masked = value(LOSSES[name][0](*case.args(name), mask))
    torch.testing.assert_close(masked, value(LOSSES[name][0](*kept.args(name))), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_no_row_gives_zero_and_no_gradient(name: str) -> None:
    case = Case()
    loss = value(LOSSES[name][0](*case.args(name), torch.zeros(ROWS)))
    assert loss == 0
    assert all(not gradient.any() for gradient in torch.autograd.grad(loss, case.leaves(name)))


@pytest.mark.parametrize("name", LOSSES)
def test_micro_batches_with_one_denominator_add_up(name: str) -> None:
    case = Case()
    loss, total = partial(LOSSES[name][0], *case.args(name)), case.weights.sum()
    first, second = torch.arange(ROWS) < 9, torch.arange(ROWS) >= 9
    parts = [value(loss(case.weights * part, denominator=total)) for part in (first, second)]
    whole = value(loss(case.weights))
    torch.testing.assert_close(parts[0] + parts[1], whole, rtol=1e-12, atol=1e-12)


# -- memory and precision


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


def test_the_head_is_not_applied_again_in_the_backward_pass() -> None:
    case = Case()
    loss = cross_entropy(case.hidden, case.head, case.tokens, chunk_rows=5)
    with LogitsWatch(VOCAB) as watch:
        loss.backward()
    assert watch.matmuls == 0


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


@pytest.mark.parametrize("name", LOSSES)
def test_bfloat16_inputs_give_float32_losses(name: str) -> None:
    """Only the inputs are rounded: the loss is that of the rounded inputs in float32, gradients are bfloat16."""
    case, wide = Case(torch.bfloat16), Case(torch.bfloat16)
    for field in ("hidden", "head", "state", "target_state"):
        setattr(wide, field, getattr(wide, field).detach().float().requires_grad_())
    wide.soft = TargetHidden(wide.soft.hidden.float(), wide.soft.head.float())
    loss = value(LOSSES[name][0](*case.args(name), chunk_rows=4))
    wanted = value(LOSSES[name][0](*wide.args(name), chunk_rows=4))
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=1e-6)
    gradient = torch.autograd.grad(loss, case.hidden)[0]
    assert gradient.dtype == torch.bfloat16
    torch.testing.assert_close(gradient.float(), torch.autograd.grad(wanted, wide.hidden)[0], rtol=1e-2, atol=1e-4)


# -- what the formulas promise


def test_cross_entropy_is_torchs() -> None:
    case = Case()
    wanted = torch.nn.functional.cross_entropy(case.hidden @ case.head.t(), case.tokens)
    torch.testing.assert_close(cross_entropy(case.hidden, case.head, case.tokens), wanted)


def test_kl_is_zero_only_where_the_distributions_are_equal() -> None:
    case = Case()
    logits = (case.hidden @ case.head.t()).detach()
    shifted = TargetLogits(logits + torch.arange(ROWS)[:, None])  # a constant per row does not change p
    assert abs(kl(case.hidden, case.head, shifted).item()) < 1e-12
    gradients = torch.autograd.grad(kl(case.hidden, case.head, shifted), [case.hidden, case.head])
    assert max(g.abs().max().item() for g in gradients) < 1e-12
    logits[3, 2] += 0.01
    assert kl(case.hidden, case.head, TargetLogits(logits)) > 1e-9


def test_of_the_likeliest_tokens_kl_is_a_bound_that_grows_with_them() -> None:
    """Outcomes taken together hide differences, never add any (data-processing inequality)."""
    case = Case()
    found = []
    for count in range(1, VOCAB):
        _, parts = distilled(case.hidden, case.head, top(case.logits.logits, count), case.tokens)
        found.append(parts[0].mean().item())
    assert found == sorted(found)
    assert found[0] < 0.9 * found[-1]
    assert found[-1] == pytest.approx(kl(case.hidden, case.head, case.logits).item(), rel=1e-9)


def test_of_the_likeliest_tokens_kl_pulls_at_no_single_other_token() -> None:
    """Where the k tokens and the rest have the target's shares, there is no slope, however the rest is shared out."""
    logits = torch.randn(ROWS, VOCAB, dtype=torch.float64).requires_grad_()
    said = top(logits.detach(), 3)
    others = torch.ones(ROWS, VOCAB, dtype=torch.bool).scatter_(1, said.ids, False)
    mass = logits.detach().masked_fill(~others, -math.inf).logsumexp(-1, keepdim=True)
    moved = torch.where(others, mass - math.log(VOCAB - 3), logits.detach()).requires_grad_()
    eye = torch.eye(VOCAB, dtype=torch.float64)
    loss, _ = distilled(moved, eye, said, said.ids[:, 0], share=1.0)  # a text without one of the others
    assert float(loss.detach()) == pytest.approx(0, abs=1e-12)
    assert float(torch.autograd.grad(loss, moved)[0].abs().max()) < 1e-12


def test_parts_of_a_distilled_loss_are_its_own() -> None:
    case = Case()
    for target in (case.soft, case.top):
        loss, parts = distilled(case.hidden, case.head, target, case.tokens, case.weights, share=0.8, chunk_rows=7)
        wanted = eager_soft(eager_kl, case.hidden, case.head, target, case.weights)
        if target is case.top:
            case.tokens = torch.where(case.weights > 0, case.top.ids[:, 1], case.tokens)  # none of the others
            loss, parts = distilled(case.hidden, case.head, target, case.tokens, case.weights, share=0.8, chunk_rows=7)
        means = (parts * case.weights).sum(1) / case.weights.sum()
        torch.testing.assert_close(means[0], wanted.detach(), rtol=1e-12, atol=0)
        torch.testing.assert_close(0.8 * means[0] + 0.2 * means[1], loss.detach(), rtol=1e-12, atol=0)
        assert torch.equal(parts[0] == 0, case.weights == 0)


def test_losses_by_hand() -> None:
    """p = (1/2, 1/2), q = (1/4, 3/4)."""
    hidden, head = torch.tensor([[1.0]], dtype=torch.float64), torch.tensor([[0.0], [math.log(3)]], dtype=torch.float64)
    even = TargetLogits(torch.zeros(1, 2))
    assert kl(hidden, head, even).item() == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))
    assert mixed(hidden, head, even, omega=0).item() == pytest.approx(-0.75)
    soft = -0.5 * math.log(0.25) - 0.5 * math.log(0.75)
    assert mixed(hidden, head, even, omega=0.4).item() == pytest.approx(0.4 * soft - 0.6 * 0.75)


def test_tokens_that_the_target_rules_out_are_fine() -> None:
    """A logit of -inf is a probability of 0: it adds nothing to KL and mixed, and gradients stay finite."""
    case = Case()
    logits = case.logits.logits.clone()
    logits[:, 4] = -math.inf
    for loss in (kl, mixed):
        made = loss(case.hidden, case.head, TargetLogits(logits))
        assert made.isfinite()
        assert all(g.isfinite().all() for g in torch.autograd.grad(made, [case.hidden, case.head]))


@given(st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_acceptance_is_between_zero_and_one(seed: int) -> None:
    case = Case(seed=seed)
    alpha = eager_acceptance(case.hidden, case.head, case.soft)
    assert 0 < alpha < 1
    assert mixed(case.hidden, case.head, case.soft, omega=0).item() == pytest.approx(-alpha.item())
    # Pinsker: 1 - alpha is the total variation, at most sqrt(KL / 2) for each row, and the mean is concave.
    assert 1 - alpha <= math.sqrt(kl(case.hidden, case.head, case.soft).item() / 2) + 1e-12


def test_acceptance_is_one_where_the_distributions_are_equal() -> None:
    case = Case()
    same = TargetLogits((case.hidden @ case.head.t()).detach())
    assert eager_acceptance(case.hidden, case.head, same).item() == pytest.approx(1)


def test_where_the_distributions_meet_half_a_slope_counts() -> None:
    """min(p, q) has a corner at p = q: like torch, take the middle of both sides."""
    logits = torch.tensor([[0.0, 0.0, math.log(2.0)]], dtype=torch.float64, requires_grad=True)  # 1/4, 1/4, 1/2
    target = TargetLogits(torch.tensor([[0.0, math.log(2.0), 0.0]], dtype=torch.float64))  # 1/4, 1/2, 1/4
    eye = torch.eye(3, dtype=torch.float64)
    slope = torch.autograd.grad(mixed(logits, eye, target, omega=0.0), logits)[0]
    # m = (1/2, 1, 0), sum q m = 3/8; the loss is -alpha.
    wanted = -torch.tensor([[0.25 * (0.5 - 0.375), 0.25 * (1 - 0.375), 0.5 * (0 - 0.375)]], dtype=torch.float64)
    torch.testing.assert_close(slope, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(slope, torch.autograd.grad(eager_mixed(logits, eye, target, omega=0.0), logits)[0])


@pytest.mark.parametrize("omega", [0.0, 0.5, 1.0])
def test_descending_mixed_raises_acceptance(omega: float) -> None:
    case = Case()
    logits = torch.zeros(ROWS, VOCAB, dtype=torch.float64, requires_grad=True)
    eye = torch.eye(VOCAB, dtype=torch.float64)
    before = eager_acceptance(logits, eye, case.logits).item()
    for _ in range(50):
        logits.data -= 2 * ROWS * 0.1 * torch.autograd.grad(mixed(logits, eye, case.logits, omega=omega), logits)[0]
    assert eager_acceptance(logits, eye, case.logits).item() > before + 0.1


def test_mixed_of_one_is_kl_plus_a_constant() -> None:
    case = Case()
    leaves = [case.hidden, case.head]
    one = torch.autograd.grad(mixed(case.hidden, case.head, case.soft, omega=1), leaves)
    for mine, other in zip(one, torch.autograd.grad(kl(case.hidden, case.head, case.soft), leaves), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


def test_every_loss_of_the_module_is_compared_with_its_reference() -> None:
    compared = {name.removesuffix("_top").removesuffix("_text") for name in LOSSES}
    assert {name for name in losses.__all__ if "Target" not in name} == compared
    assert all("``" in (loss.__doc__ or "") for loss, _ in LOSSES.values())  # each says its formula


def test_text_of_the_targets_own_teaches_the_whole_distribution() -> None:
    """The mean over y ~ p of the slope by its likeliest tokens and the text is the slope of the whole KL."""
    case = Case(rows=4)
    whole = torch.autograd.grad(kl(case.hidden, case.head, case.logits), case.hidden)[0]
    p = case.logits.logits.softmax(-1)  # [4, V]
    found = torch.zeros_like(whole)
    for token in range(VOCAB):
        for row in range(4):  # of the row alone, weighted by the token's probability
            said = torch.full((4,), token)
            weights = torch.zeros(4, dtype=torch.float64)
            weights[row] = p[row, token]
            loss, _ = distilled(case.hidden, case.head, case.top, said, weights, share=1.0, denominator=4.0)
            found += torch.autograd.grad(loss, case.hidden)[0]
    torch.testing.assert_close(found, whole, rtol=1e-10, atol=1e-12)


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
