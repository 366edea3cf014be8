"""Training losses: each as a formula, as an eager reference, and as the chunked version that training uses.

Notation: ``hidden`` [rows, d] after the final norm, ``head`` [V, d], logits l = head hidden, q = softmax(l / T) is
the model in training (the draft), p = softmax(L / T) the target. Every loss is a weighted mean over rows,
``sum_i w_i loss_i / sum_i w_i``; rows of weight 0 (padding, prompts) are left out before the head is applied, so
they cost nothing, and what their inputs and targets hold does not matter.

The ``eager_*`` functions are the formulas, dense and differentiated by autograd. The others walk over the rows in
chunks, so that no more than one chunk's [chunk, V] logits exist at a time. Gradients with respect to ``hidden`` and
``head`` are known in closed form, so they are made in the same walk and only scaled in the backward pass: the head
is applied once, not once more to recompute. Logits, probabilities and sums are float32 (float64 for float64 inputs),
under autocast too; the products take 16-bit factors there: a GPU keeps their float32 sums, a CPU, which has no such
product, rounds each logit to 16 bit once. To measure rather than train, call them outside of autocast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..core.errors import ConfigError

IGNORED = -100  # the target of a row that has none, as in torch.nn.functional.cross_entropy
_CHUNK_LOGITS = {"cpu": 2**21, "cuda": 2**26}  # elements of a chunk's logits: 8 MiB and 256 MiB in float32
Rows: TypeAlias = "slice | Tensor"  # of a chunk: all in order, or the indices of those that have a weight


# -- what the target says


@dataclass(frozen=True, slots=True)
class TargetLogits:
    """A soft target given as logits."""

    logits: Tensor  # [rows, V]

    def reader(self, dtype: torch.dtype) -> Callable[[Rows], Tensor]:
        """A function from rows to the target's logits [chunk, V] in ``dtype``."""
        logits = self.logits.detach()
        return lambda rows: logits[rows].to(dtype)

    def check(self, rows: int, vocab: int) -> None:
        """Refuse a shape that does not fit the logits in training."""
        _same("target logits", tuple(self.logits.shape), (rows, vocab))


@dataclass(frozen=True, slots=True)
class TargetHidden:
    """A soft target given as hidden states after the target's final norm, and the target's head: d times smaller."""

    hidden: Tensor  # [rows, d_target]
    head: Tensor  # [V, d_target]

    def reader(self, dtype: torch.dtype) -> Callable[[Rows], Tensor]:
        """A function from rows to the target's logits [chunk, V] in ``dtype``."""
        hidden, head = self.hidden.detach(), self.head.detach()
        factor = _factor_dtype(hidden, head, dtype)
        transposed = head.to(factor).t()
        return lambda rows: _matmul(hidden[rows].to(factor), transposed, dtype)

    def check(self, rows: int, vocab: int) -> None:
        """Refuse a shape that does not fit the logits in training."""
        _same("target hidden states", tuple(self.hidden.shape), (rows, self.head.shape[1]))
        _same("target head", tuple(self.head.shape), (vocab, self.hidden.shape[1]))


SoftTarget: TypeAlias = "TargetLogits | TargetHidden"


# -- eager references: the formulas


def eager_cross_entropy(hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    """``-log q(y)``. Reference of `cross_entropy`."""
    log_q = F.log_softmax(_dense(hidden, head), dim=-1)  # [rows, V]
    valid = targets.clamp(0, log_q.shape[1] - 1)  # a row of weight 0 may hold anything
    return _mean(-log_q.gather(1, valid[:, None])[:, 0], weights)


def eager_kl(
    hidden: Tensor, head: Tensor, target: SoftTarget, weights: Tensor | None = None, temperature: float = 1.0
) -> Tensor:
    """``T^2 sum_x p (log p - log q)``. Reference of `kl`."""
    log_p, log_q = _dense_pair(hidden, head, target, temperature)
    return temperature**2 * _mean(F.kl_div(log_q, log_p.exp(), reduction="none").sum(-1), weights)


def eager_reverse_kl(
    hidden: Tensor, head: Tensor, target: SoftTarget, weights: Tensor | None = None, temperature: float = 1.0
) -> Tensor:
    """``T^2 sum_x q (log q - log p)``. Reference of `reverse_kl`."""
    log_p, log_q = _dense_pair(hidden, head, target, temperature)
    return temperature**2 * _mean((log_q.exp() * (log_q - log_p)).sum(-1), weights)


def eager_acceptance(
    hidden: Tensor, head: Tensor, target: SoftTarget, weights: Tensor | None = None, temperature: float = 1.0
) -> Tensor:
    """``alpha = sum_x min(p, q)``: the expected acceptance probability (Leviathan et al. 2023)."""
    log_p, log_q = _dense_pair(hidden, head, target, temperature)
    return _mean(torch.minimum(log_p.exp(), log_q.exp()).sum(-1), weights)


def eager_mixed(
    hidden: Tensor,
    head: Tensor,
    target: SoftTarget,
    weights: Tensor | None = None,
    omega: float = 0.5,
    temperature: float = 1.0,
) -> Tensor:
    """``omega T^2 (-sum_x p log q) + (1 - omega) (-alpha)``. Reference of `mixed`."""
    log_p, log_q = _dense_pair(hidden, head, target, temperature)
    soft = temperature**2 * _mean(-(log_p.exp() * log_q).sum(-1), weights)
    alpha = eager_acceptance(hidden, head, target, weights, temperature)
    return omega * soft - (1 - omega) * alpha


def eager_mse_cross_entropy(
    state: Tensor,
    target_state: Tensor,
    hidden: Tensor,
    head: Tensor,
    target: SoftTarget,
    weights: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    temperature: float = 1.0,
) -> Tensor:
    """``alpha mean_d (h - H)^2 + beta T^2 (-sum_x p log q)``. Reference of `mse_cross_entropy`."""
    squared = _mean(((state - target_state) ** 2).mean(-1), weights)
    return alpha * squared + beta * eager_mixed(hidden, head, target, weights, 1.0, temperature)


def eager_ngram(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    stream: Tensor,
    alphas: Tensor,
    weights: Tensor | None = None,
) -> Tensor:
    """``sum_j alpha_j mean_t (-log q_j(y_{t+1+j}))``, j = 0 the main stream. Reference of `ngram`."""
    weights = torch.ones_like(targets, dtype=hidden.dtype) if weights is None else weights
    total = hidden.new_zeros(())
    for j, alpha in enumerate(alphas):
        total = total + alpha * eager_cross_entropy(hidden, head, targets, weights * (stream == j))
    return total


def _dense(hidden: Tensor, head: Tensor) -> Tensor:
    """[rows, V] logits of all rows at once."""
    dtype = _wide(hidden, head)
    return hidden.to(dtype) @ head.to(dtype).t()


def _dense_pair(hidden: Tensor, head: Tensor, target: SoftTarget, temperature: float) -> tuple[Tensor, Tensor]:
    """log p and log q, [rows, V] each."""
    logits = _dense(hidden, head)
    wanted = target.logits if isinstance(target, TargetLogits) else _dense(target.hidden, target.head)
    wanted = wanted.detach().to(logits.dtype)
    return F.log_softmax(wanted / temperature, dim=-1), F.log_softmax(logits / temperature, dim=-1)


def _mean(losses: Tensor, weights: Tensor | None) -> Tensor:
    """Weighted mean over rows; 0 where no row has a weight."""
    if weights is None:
        return losses.sum() / max(len(losses), 1)
    weights = weights.to(losses.dtype)
    total = weights.sum()
    summed = torch.where(weights > 0, losses * weights, 0.0).sum()
    return summed / torch.where(total > 0, total, 1.0)


# -- rows: loss and its derivative by the logits, in closed form


class RowLoss(Protocol):
    """The loss of some rows from their logits."""

    def __call__(self, logits: Tensor, rows: Rows, derive: bool) -> tuple[Tensor, Tensor | None]:
        """Loss [chunk], and d loss / d logits [chunk, V] if asked for; ``logits`` may be overwritten."""
        ...


def _token_rows(targets: Tensor) -> RowLoss:
    """-log q(y); derivative q - [x = y]."""

    def rows_loss(logits: Tensor, rows: Rows, derive: bool) -> tuple[Tensor, Tensor | None]:
        wanted = targets[rows][:, None]
        log_sum = logits.logsumexp(-1, keepdim=True)  # [chunk, 1]
        loss = (log_sum - logits.gather(1, wanted))[:, 0]
        if not derive:
            return loss, None
        q = logits.sub_(log_sum).exp_()
        return loss, q.scatter_add_(1, wanted, torch.full_like(log_sum, -1.0))

    return rows_loss


def _soft_rows(read: Callable[[Rows], Tensor], temperature: float, formula: Any) -> RowLoss:
    """A loss between two distributions; ``formula`` maps (log p, log q, derive) to the loss and d loss / d (l / T)."""

    def rows_loss(logits: Tensor, rows: Rows, derive: bool) -> tuple[Tensor, Tensor | None]:
        log_q = F.log_softmax(logits.div_(temperature), dim=-1)
        log_p = F.log_softmax(read(rows) / temperature, dim=-1)
        loss, slope = formula(log_p, log_q, derive)
        return loss, None if slope is None else slope.div_(temperature)

    return rows_loss


def _kl_formula(scale: float) -> Any:
    """scale KL(p || q); slope scale (q - p)."""

    def formula(log_p: Tensor, log_q: Tensor, derive: bool) -> tuple[Tensor, Tensor | None]:
        p = log_p.exp()
        loss = scale * _expected(p, log_p - log_q)
        return loss, log_q.exp_().sub_(p).mul_(scale) if derive else None

    return formula


def _reverse_kl_formula(scale: float) -> Any:
    """scale KL(q || p); slope scale q (log q - log p - KL)."""

    def formula(log_p: Tensor, log_q: Tensor, derive: bool) -> tuple[Tensor, Tensor | None]:
        q, ratio = log_q.exp(), log_q.sub_(log_p)
        loss = _expected(q, ratio)
        slope = _product(q, ratio.sub_(loss[:, None])).mul_(scale) if derive else None
        return scale * loss, slope

    return formula


def _mixed_formula(omega: float, scale: float) -> Any:
    """omega scale (-sum p log q) - (1 - omega) alpha; slope omega scale (q - p) - (1 - omega) d alpha."""

    def formula(log_p: Tensor, log_q: Tensor, derive: bool) -> tuple[Tensor, Tensor | None]:
        p, q = log_p.exp(), log_q.exp()
        loss = -omega * scale * _expected(p, log_q) - (1 - omega) * torch.minimum(p, q).sum(-1)
        return loss, (q - p).mul_(omega * scale).sub_((1 - omega) * _acceptance_slope(p, q)) if derive else None

    return formula


def _acceptance_slope(p: Tensor, q: Tensor) -> Tensor:
    """d sum_x min(p, q) / d (l / T) = q (m - sum_x q m), m = [q < p], a half where they are equal."""
    below = (q < p).to(q.dtype) + 0.5 * (q == p)
    return q * (below - (q * below).sum(-1, keepdim=True))


def _expected(probability: Tensor, value: Tensor) -> Tensor:
    """[rows] sum over x of probability times value."""
    return _product(probability, value).sum(-1)


def _product(probability: Tensor, value: Tensor) -> Tensor:
    """Probability times value, 0 where the probability is 0, whatever the value (0 log 0 = 0)."""
    return (probability * value).masked_fill_(probability == 0, 0.0)


# -- the walk over chunks


@dataclass(frozen=True, slots=True)
class _Walk:
    """Which rows a loss visits, and in what portions."""

    rows: Tensor | None  # [kept] indices of the rows that have a weight; None: all
    weights: Tensor | None  # [kept]; None: 1
    scale: Tensor  # scalar, 1 / denominator
    chunk: int  # rows

    def chunks(self, count: int) -> Iterator[tuple[Rows, slice]]:
        """Rows of each chunk, and their places among the rows kept."""
        kept = count if self.rows is None else len(self.rows)
        for start in range(0, kept, self.chunk):
            places = slice(start, min(start + self.chunk, kept))
            yield places if self.rows is None else self.rows[places], places


class _ChunkedLoss(torch.autograd.Function):
    """(hidden, head) -> (loss, losses of the rows kept); gradients are made in the forward walk."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, loss: RowLoss, walk: _Walk, derive: bool
    ) -> tuple[Tensor, Tensor]:
        needs = (derive and ctx.needs_input_grad[0], derive and ctx.needs_input_grad[1])
        dtype = _wide(hidden, head)
        factor = _factor_dtype(hidden, head, dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            losses, grads = _visit(hidden, head.to(factor), loss, walk, dtype, needs)
        ctx.dtypes, ctx.scale = (hidden.dtype, head.dtype), walk.scale
        ctx.save_for_backward(*grads)
        weighted = losses if walk.weights is None else losses * walk.weights
        ctx.mark_non_differentiable(losses)
        return weighted.sum() * walk.scale, losses

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        factor = grad * ctx.scale
        by_hidden, by_head = (
            None if made is None else (made * factor).to(dtype)
            for made, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return by_hidden, by_head, None, None, None


def _visit(
    hidden: Tensor, head: Tensor, row_loss: RowLoss, walk: _Walk, dtype: torch.dtype, needs: tuple[bool, bool]
) -> tuple[Tensor, tuple[Tensor | None, Tensor | None]]:
    """Losses [kept], and the gradients of their weighted sum by hidden [rows, d] and head [V, d], where needed."""
    by_hidden = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device) if needs[0] else None
    by_head = torch.zeros(head.shape, dtype=dtype, device=head.device) if needs[1] else None
    losses = [hidden.new_zeros(0, dtype=dtype)]
    for rows, places in walk.chunks(len(hidden)):
        inputs = hidden[rows].to(head.dtype)  # [chunk, d]
        loss, slope = row_loss(_matmul(inputs, head.t(), dtype), rows, any(needs))
        losses.append(loss)
        if slope is None:
            continue
        slope = (slope if walk.weights is None else slope.mul_(walk.weights[places, None])).to(head.dtype)
        if by_hidden is not None:
            by_hidden[rows] = _matmul(slope, head, dtype)
        if by_head is not None:
            _add_product(by_head, slope.t(), inputs)
    return torch.cat(losses), (by_hidden, by_head)


def _wide(*tensors: Tensor) -> torch.dtype:
    """The dtype of logits and sums: float64 where an input is, else float32."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def _factor_dtype(hidden: Tensor, head: Tensor, dtype: torch.dtype) -> torch.dtype:
    """What the factors of a product are cast to: under autocast what it says, else 16 bit only on a GPU."""
    kind = hidden.device.type
    if torch.version.hip is not None or dtype != torch.float32:
        return dtype
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return hidden.dtype if kind == "cuda" and hidden.dtype == head.dtype else dtype


def _matmul(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """The product in ``dtype``, also of 16-bit factors; a GPU then keeps its float32 sums, a CPU rounds them once."""
    if left.dtype == dtype:
        return left @ right
    return torch.mm(left, right, out_dtype=dtype) if left.is_cuda else (left @ right).to(dtype)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left right, in place."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total.add_(_matmul(left, right, total.dtype))


# -- what training calls


def cross_entropy(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    weights: Tensor | None = None,
    *,
    denominator: Tensor | float | None = None,
    chunk_rows: int | None = None,
    check: bool = True,
) -> Tensor:
    """Cross-entropy with the tokens that follow: ``-log q(y)``, weighted mean over rows.

    Args:
        hidden: [rows, d] after the final norm.
        head: [V, d].
        targets: [rows] int64 tokens; rows of weight 0 may hold anything, `IGNORED` for one.
        weights: [rows] at least 0, or a mask; None: 1 each.
        denominator: what the weighted sum is divided by; None: the sum of the weights. With gradient accumulation
            give the sum over all micro-batches, so that their losses add up to that of the whole batch.
        chunk_rows: rows whose logits exist at once; None: about 8 MiB of logits on a CPU, 256 MiB on a GPU.
        check: refuse NaN, targets out of range and negative weights; on a GPU this waits for the device.

    Returns:
        A scalar, float32 or wider; 0 where no row has a weight.

    Raises:
        ConfigError: shapes that do not fit; with ``check`` also values that cannot be right.
    """
    walk = _plan(hidden, head, weights, denominator, chunk_rows, check)
    loss, _ = _run(hidden, head, targets, walk, check)
    return loss


def row_cross_entropy(
    hidden: Tensor, head: Tensor, targets: Tensor, *, chunk_rows: int | None = None, check: bool = True
) -> Tensor:
    """[rows] ``-log q(y)`` of each row, without gradients: for measuring.

    Args and errors: as `cross_entropy`.
    """
    with torch.no_grad():
        walk = _plan(hidden, head, None, None, chunk_rows, check)
        return _run(hidden, head, targets, walk, check)[1]


def kl(
    hidden: Tensor,
    head: Tensor,
    target: SoftTarget,
    weights: Tensor | None = None,
    *,
    temperature: float = 1.0,
    denominator: Tensor | float | None = None,
    chunk_rows: int | None = None,
    check: bool = True,
) -> Tensor:
    """Forward KL, distillation: ``T^2 KL(p || q) = T^2 sum_x p (log p - log q)``, weighted mean over rows.

    The factor T^2 keeps the size of the gradients as T changes (Hinton et al. 2015, section 2).

    Args:
        target: `TargetLogits`, or `TargetHidden` (no logits of all rows, then); no gradient flows into it.
        temperature: T above 0, of both distributions.
        hidden, head, weights, denominator, chunk_rows, check: as `cross_entropy`.

    Raises:
        ConfigError: as `cross_entropy`, and a temperature that is not above 0.
    """
    formula = _kl_formula(temperature**2)
    return _soft(hidden, head, target, formula, temperature, weights, denominator, chunk_rows, check)


def reverse_kl(
    hidden: Tensor,
    head: Tensor,
    target: SoftTarget,
    weights: Tensor | None = None,
    *,
    temperature: float = 1.0,
    denominator: Tensor | float | None = None,
    chunk_rows: int | None = None,
    check: bool = True,
) -> Tensor:
    """Reverse KL: ``T^2 KL(q || p) = T^2 sum_x q (log q - log p)``, weighted mean over rows.

    It prefers a mode of p to its mean, which suits drafts far smaller than the target (Gu et al. 2024, MiniLLM, eq. 1).

    Args and errors: as `kl`.
    """
    formula = _reverse_kl_formula(temperature**2)
    return _soft(hidden, head, target, formula, temperature, weights, denominator, chunk_rows, check)


def mixed(
    hidden: Tensor,
    head: Tensor,
    target: SoftTarget,
    weights: Tensor | None = None,
    *,
    omega: float = 0.5,
    temperature: float = 1.0,
    denominator: Tensor | float | None = None,
    chunk_rows: int | None = None,
    check: bool = True,
) -> Tensor:
    """MixedLoss: ``omega T^2 (-sum_x p log q) + (1 - omega) (-alpha)``, alpha = sum_x min(p, q).

    The first term distils, the second is the expected acceptance probability itself. At T = 1 this is MixedLoss of
    SPIRe, section 3.4; temperatures are ours. ``omega=0`` is the total-variation loss less 1.

    Args:
        omega: weight of distillation, 0 to 1.
        hidden, head, target, weights, temperature, denominator, chunk_rows, check: as `kl`.

    Raises:
        ConfigError: as `kl`, and omega out of range.
    """
    if not 0 <= omega <= 1:
        raise ConfigError(f"omega={omega}", "it must be between 0 and 1", "use 0.5, or 1 for distillation alone")
    formula = _mixed_formula(omega, temperature**2)
    return _soft(hidden, head, target, formula, temperature, weights, denominator, chunk_rows, check)


def mse_cross_entropy(
    state: Tensor,
    target_state: Tensor,
    hidden: Tensor,
    head: Tensor,
    target: SoftTarget,
    weights: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    temperature: float = 1.0,
    denominator: Tensor | float | None = None,
    chunk_rows: int | None = None,
    check: bool = True,
) -> Tensor:
    """State regression and distillation: ``alpha MSE(h, H) + beta CE(softmax(l'), softmax(L))``.

    Source: Lyanna, section 4.1. MSE is the mean over the d entries of a state; CE is T^2 (-sum_x p log q). Where
    l' adds a term U e(t) for the token to head h, give hidden = [h, e(t)] and head = [head, U].

    Args:
        state, target_state: [rows, d] last-layer states of the model in training and of the target.
        alpha, beta: at least 0.
        hidden, head, target, weights, temperature, denominator, chunk_rows, check: as `kl`.

    Raises:
        ConfigError: as `kl`, and a factor below 0.
    """
    _same("target states", tuple(target_state.shape), tuple(state.shape))
    _same("states", (len(state),), (len(hidden),))
    if min(alpha, beta) < 0:
        raise ConfigError(f"alpha={alpha}, beta={beta}", "a loss would be pushed up", "use factors of 0 or more")
    soft = mixed(
        hidden,
        head,
        target,
        weights,
        omega=1.0,
        temperature=temperature,
        denominator=denominator,
        chunk_rows=chunk_rows,
        check=check,
    )
    squared = _squared_error(state, target_state, weights, denominator)
    if check and bool(squared.isnan()):
        raise _nan({"states": state, "target states": target_state})
    return alpha * squared + beta * soft


def ngram(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    stream: Tensor,
    alphas: Tensor | tuple[float, ...],
    weights: Tensor | None = None,
    *,
    denominators: Tensor | None = None,
    chunk_rows: int | None = None,
    check: bool = True,
) -> tuple[Tensor, Tensor]:
    """The loss of the main stream and of the streams ahead of it: ``sum_j alpha_j mean(-log q_j(y_{t+1+j}))``.

    Source: Speculative Streaming, eq. 6, where the sums are over the rows that have a token that far ahead; here each
    stream's is a mean over them, so that alpha_j does not depend on the length. The paper's factors are 0 for the
    main stream and 1 for the others in lossless mode, 1 and 0.1 in shared mode (its appendix M).

    Args:
        hidden: [rows, d] of main and stream rows in any order, after the final norm.
        head: [V, d], shared by all streams.
        targets: [rows] tokens, see `stream_targets`; rows of weight 0 may hold anything.
        stream: [rows] int64, 0 main, j at least 1 for stream j.
        alphas: [1 + gamma] factors, at least 0; rows of a stream with factor 0 cost nothing.
        weights: [rows] at least 0, or a mask; None: 1 each.
        denominators: [1 + gamma] what each stream's sum is divided by; None: the sum of its weights.
        chunk_rows, check: as `cross_entropy`.

    Returns:
        The loss; and [1 + gamma] mean loss of each stream without gradient, NaN where no row was counted.

    Raises:
        ConfigError: as `cross_entropy`, and streams without a factor.
    """
    factors = torch.as_tensor(alphas, dtype=_wide(hidden, head), device=hidden.device)
    _same("streams", tuple(stream.shape), (len(hidden),))
    if check:
        _check_streams(stream, factors)
    weights = torch.ones_like(stream, dtype=factors.dtype) if weights is None else weights.to(factors.dtype)
    totals = torch.zeros_like(factors).index_add_(0, stream, weights)  # [1 + gamma]
    divided = totals if denominators is None else denominators.to(factors)
    share = torch.where(divided > 0, factors / divided, 0.0)
    walk = _plan(hidden, head, weights * share[stream], 1.0, chunk_rows, check)
    loss, losses = _run(hidden, head, targets, walk, check)
    return loss, _stream_means(losses, walk, stream, weights, len(factors))


def stream_targets(tokens: Tensor, sequence: Tensor, row: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
    """The token that each row is to predict: that of row t and stream j is 1 + j places on, in the same sequence.

    Args:
        tokens: [T] packed sequences.
        sequence: [T] which sequence each token belongs to.
        row: [rows] index t of the row's token in ``tokens``.
        stream: [rows] 0 main, j at least 1 for stream j.

    Returns:
        [rows] targets, `IGNORED` where the sequence ends before; and [rows] bool, whether there is one.
    """
    wanted = row + 1 + stream
    inside = wanted.clamp(max=len(tokens) - 1)
    exists = (wanted < len(tokens)) & (sequence[inside] == sequence[row])
    return torch.where(exists, tokens[inside], IGNORED), exists


def _soft(
    hidden: Tensor,
    head: Tensor,
    target: SoftTarget,
    formula: Any,
    temperature: float,
    weights: Tensor | None,
    denominator: Tensor | float | None,
    chunk_rows: int | None,
    check: bool,
) -> Tensor:
    """Any loss between p and q."""
    if not temperature > 0:
        raise ConfigError(f"temperature={temperature}", "it must be above 0", "use 1 for the distributions as they are")
    target.check(len(hidden), head.shape[0])
    walk = _plan(hidden, head, weights, denominator, chunk_rows, check)
    rows = _soft_rows(target.reader(_wide(hidden, head)), temperature, formula)
    loss, _ = _apply(hidden, head, rows, walk)
    if check and bool(loss.isnan()):
        said = {"target logits": target.logits} if isinstance(target, TargetLogits) else _named(target)
        raise _nan({"hidden states": hidden, "head": head} | said)
    return loss


def _named(target: TargetHidden) -> dict[str, Tensor]:
    return {"target hidden states": target.hidden, "target head": target.head}


def _run(hidden: Tensor, head: Tensor, targets: Tensor, walk: _Walk, check: bool) -> tuple[Tensor, Tensor]:
    """Cross-entropy with tokens over a walk."""
    _same("targets", tuple(targets.shape), (len(hidden),))
    if check:
        _check_targets(targets if walk.rows is None else targets[walk.rows], head.shape[0])
    loss, losses = _apply(hidden, head, _token_rows(targets), walk)
    if check and bool(loss.isnan()):
        raise _nan({"hidden states": hidden, "head": head})
    return loss, losses


def _apply(hidden: Tensor, head: Tensor, loss: RowLoss, walk: _Walk) -> tuple[Tensor, Tensor]:
    """The loss, differentiable, and the losses of the rows kept."""
    result: tuple[Tensor, Tensor] = _ChunkedLoss.apply(hidden, head, loss, walk, torch.is_grad_enabled())
    return result


def _plan(
    hidden: Tensor,
    head: Tensor,
    weights: Tensor | None,
    denominator: Tensor | float | None,
    chunk_rows: int | None,
    check: bool,
) -> _Walk:
    """Which rows to visit, in what portions."""
    if hidden.ndim != 2 or head.ndim != 2 or hidden.shape[1] != head.shape[1]:
        raise ConfigError(
            f"hidden states {tuple(hidden.shape)} and head {tuple(head.shape)}",
            "they must be [rows, d] and [V, d] with one d",
            "flatten batch and length, and pass the head that reads these states",
        )
    if chunk_rows is not None and chunk_rows < 1:
        raise ConfigError(f"chunk_rows={chunk_rows}", "it must be 1 or more", "leave it out for the default")
    device, dtype = hidden.device, _wide(hidden, head)
    chunk = chunk_rows or max(1, _CHUNK_LOGITS.get(device.type, _CHUNK_LOGITS["cuda"]) // head.shape[0])
    if weights is None:
        return _Walk(None, None, _inverse(len(hidden) if denominator is None else denominator, dtype, device), chunk)
    _same("weights", tuple(weights.shape), (len(hidden),))
    weights = weights.detach().to(dtype)
    if check and not bool((weights >= 0).all()):  # NaN fails too
        raise ConfigError("weights of rows", "some are negative or NaN", "use 0 for a row that does not count")
    rows = weights.nonzero()[:, 0]
    scale = _inverse(weights.sum() if denominator is None else denominator, dtype, device)
    return _Walk(rows, weights[rows], scale, chunk)


def _inverse(denominator: Tensor | float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """1 / denominator; 0 for 0, where there is nothing to average."""
    value = torch.as_tensor(denominator, dtype=dtype, device=device)
    return torch.where(value > 0, 1 / value, 0.0)


def _squared_error(state: Tensor, target: Tensor, weights: Tensor | None, denominator: Tensor | float | None) -> Tensor:
    """Weighted mean over rows of the mean squared difference of a row's entries."""
    dtype = _wide(state, target)
    weights = torch.ones(len(state), device=state.device) if weights is None else weights
    rows = weights.nonzero()[:, 0]  # a state that does not count may hold anything
    kept = weights[rows].to(dtype)
    errors = (state[rows].to(dtype) - target.detach()[rows].to(dtype)).square().mean(-1)  # [kept]
    return (errors * kept).sum() * _inverse(kept.sum() if denominator is None else denominator, dtype, state.device)


def _stream_means(losses: Tensor, walk: _Walk, stream: Tensor, weights: Tensor, count: int) -> Tensor:
    """[count] mean loss of each stream over its rows; NaN for a stream without any."""
    rows = walk.rows if walk.rows is not None else torch.arange(len(stream), device=stream.device)
    sums = torch.zeros(2, count, dtype=losses.dtype, device=losses.device)
    sums[0].index_add_(0, stream[rows], losses.detach() * weights[rows])
    sums[1].index_add_(0, stream[rows], weights[rows])
    return sums[0] / sums[1]


# -- bad input


def _same(what: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if found != wanted:
        raise ConfigError(f"{what} of shape {found}", f"the shape must be {wanted}", "pass one entry a row")


def _check_targets(targets: Tensor, vocab: int) -> None:
    """``targets``: those of the rows that count."""
    if targets.is_floating_point():
        raise ConfigError(f"targets of {targets.dtype}", "they must be token ids", "pass int64")
    if bool(((targets < 0) | (targets >= vocab)).any()):
        raise ConfigError(
            f"targets from {int(targets.min())} to {int(targets.max())}",
            f"the head has tokens 0 to {vocab - 1}",
            "use the tokenizer of this model, and weight 0 for rows without a target",
        )


def _check_streams(stream: Tensor, factors: Tensor) -> None:
    if bool(((stream < 0) | (stream >= len(factors))).any()):
        raise ConfigError(
            f"streams from {int(stream.min())} to {int(stream.max())}",
            f"there are factors for streams 0 to {len(factors) - 1}",
            "give one factor for the main stream and one for each of the others",
        )
    if not bool((factors >= 0).all()):
        raise ConfigError(f"alphas={factors.tolist()}", "some are negative or NaN", "use factors of 0 or more")


def _nan(inputs: dict[str, Tensor]) -> ConfigError:
    """Which input made the loss NaN."""
    bad = [name for name, tensor in inputs.items() if not bool(tensor.isfinite().all())]
    return ConfigError(
        "a training loss",
        f"it is NaN: NaN or infinity in {', '.join(bad) or 'the logits'}",
        "load the parameters before training; if they were loaded, lower the learning rate",
    )


# -- by name


Need: TypeAlias = Literal["tokens", "target_logits", "target_hidden"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A loss that recipes know by name."""

    description: str
    formula: str
    citation: str
    needs: tuple[Need, ...]  # "target_logits": logits, or final hidden states with the head; "target_hidden": states
    function: Callable[..., Any]
    eager: Callable[..., Tensor]  # the reference that `function` equals


LOSSES: dict[str, Loss] = {
    "cross_entropy": Loss(
        description="cross-entropy with the tokens that follow",
        formula="-log q(y)",
        citation="the usual objective of language models",
        needs=("tokens",),
        function=cross_entropy,
        eager=eager_cross_entropy,
    ),
    "kl": Loss(
        description="forward KL from target to draft: distillation",
        formula="T^2 sum_x p (log p - log q)",
        citation="Hinton et al. 2015, section 2",
        needs=("target_logits",),
        function=kl,
        eager=eager_kl,
    ),
    "reverse_kl": Loss(
        description="reverse KL: prefers a mode of the target to its mean",
        formula="T^2 sum_x q (log q - log p)",
        citation="Gu et al. 2024 (MiniLLM), eq. 1",
        needs=("target_logits",),
        function=reverse_kl,
        eager=eager_reverse_kl,
    ),
    "mixed": Loss(
        description="MixedLoss: distillation and the expected acceptance probability",
        formula="omega T^2 (-sum_x p log q) + (1 - omega) (-sum_x min(p, q))",
        citation="SPIRe, section 3.4",
        needs=("target_logits",),
        function=mixed,
        eager=eager_mixed,
    ),
    "mse_cross_entropy": Loss(
        description="state regression and distillation",
        formula="alpha mean_d (h - H)^2 + beta T^2 (-sum_x p log q)",
        citation="Lyanna, section 4.1",
        needs=("target_hidden", "target_logits"),
        function=mse_cross_entropy,
        eager=eager_mse_cross_entropy,
    ),
    "ngram": Loss(
        description="the next token and those ahead of it, one stream each",
        formula="sum_j alpha_j mean_t (-log q_j(y_{t+1+j}))",
        citation="Speculative Streaming, eq. 6",
        needs=("tokens",),
        function=ngram,
        eager=eager_ngram,
    ),
}
