"""The recipe ``streams``: trains a set of speculative streams, or adapters alone, over a frozen target.

Source: Speculative Streaming, section 2.4 and appendices I and M.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from ...core.errors import ConfigError
from ...core.options import check, option
from ...model.adapters import LINEARS, AdapterConfig, linear_shapes
from ...train.carriers import CarrierRows, choose_carriers
from ...train.chunked import KnownGradients
from ...train.data import TokenBatch
from ...train.features import EVALUATED_LOGITS, TOP, argmax, likeliest, no_loss
from ...train.losses import SoftTarget, cross_entropy, distilled
from ...train.network import Network
from ...train.recipes.heads import BRANCHES, held_out_figures
from ...weights.files import fingerprint
from ...weights.trained_files import resumed
from .ahead import Aims
from .model import StreamConfig, StreamSet
from .multistream import lossless_streams, main_pass, shared_pass

if TYPE_CHECKING:
    from ...train.registry import BuildContext

# Streams start far from their aims (9.6 nats a token where a trained set has 2), so adapters must move fast:
# with 4 times the rank 120 steps gave 1.2 tokens accepted on held-out SQL where the rank itself gave 0.4.
SCALE = 4.0
TargetOf: TypeAlias = "Callable[[Aims], SoftTarget]"  # the target's distributions in the main rows of some aims
_OF_STREAMS = ("layers", "prune_rank", "alpha_j", "segment", "positions")  # of no meaning to adapters alone


@dataclass(frozen=True, kw_only=True)
class StreamsOptions:
    """Describe what is trained, and on what loss."""

    mode: Literal["lossless", "shared"] = option(
        "lossless",
        help="lossless: the target's answers stay as they are; shared: adapters change them, for an application",
    )
    gamma: int = option(4, help="streams, tokens drafted ahead; 0 in shared mode: adapters alone")
    layers: int = option(4, help="layers at the top of the target that streams go through")
    rank: int = option(8, help="rank of the adapters", minimum=1)
    prune_rank: int = option(8, help="rank of the early exit that prunes trees; 0: none is trained")
    alpha_j: float | None = option(
        None, help="weight of each stream's loss; default: 1 lossless, 0.1 shared", minimum=0, below=math.inf
    )
    distill: float = option(
        0.0, help="share of distillation from the target in the streams' loss, 0 to 1 (lossless)", minimum=0, maximum=1
    )
    segment: int | None = option(
        None, help="carriers (answer tokens) run at a time, to bound memory; default: all", minimum=1
    )
    positions: float = option(
        1.0, help="share of the answer tokens that carry streams in a step (below 1: lossless)", above=0, maximum=1
    )
    application: str = option("", help="name of the application that a shared set is for")

    def __post_init__(self) -> None:
        check(self, "streams with ")
        shared = self.mode == "shared"
        rules = (
            ("positions", self.positions == 1 or not shared, "in shared mode all tokens carry streams"),
            ("distill", not self.distill or not shared, "only a frozen target is distilled from"),
        )
        for name, holds, rule in rules:
            _require(name, getattr(self, name), holds, rule)
        general = shared or not self.application
        _require("application", self.application, general, "a lossless set is for no application", "leave it out")
        if not self.gamma:
            self._require_unset()

    def _require_unset(self) -> None:
        """Refuse options of streams if none are trained; prune_rank=0 is allowed, since it is true."""
        defaults = {f.name: f.default for f in fields(self)}
        for name in _OF_STREAMS:
            value = getattr(self, name)
            unset = value == defaults[name] or (name == "prune_rank" and not value)
            _require(name, value, unset, "there are no streams (gamma=0)", "leave it out, or give gamma=4")

    @property
    def factors(self) -> tuple[float, float]:
        """alpha_0 and alpha_j of eq. 6 (section 2.4, appendix M): a frozen main stream has no loss to lower."""
        main, stream = (1.0, 0.1) if self.mode == "shared" else (0.0, 1.0)
        return main, stream if self.alpha_j is None else self.alpha_j

    def config(self, network: Network, target: str = "", mark: str = "") -> StreamConfig:
        """Return the set's shape over a target.

        Args:
            target: its name.
            mark: its fingerprint.
        """
        c = network.config
        insertion = c.num_layers - self.layers
        adapted = range(0 if self.mode == "shared" else max(0, insertion), c.num_layers)
        return StreamConfig(
            mode=self.mode,
            gamma=self.gamma,
            msa_layers=self.layers if self.gamma else 0,
            num_layers=c.num_layers,
            d_model=c.d_model,
            vocab_size=c.vocab_size,
            prune_rank=self.prune_rank if self.gamma else 0,
            adapter=AdapterConfig(rank=self.rank, alpha=SCALE * self.rank, layers=tuple(adapted), linears=LINEARS),
            target=target,
            fingerprint=mark,
        )


def _require(name: str, value: Any, holds: bool, rule: str, remedy: str = "") -> None:
    if not holds:
        raise ConfigError(f"streams with {name}={value!r}", rule, remedy or f"choose another {name}")


class StreamRecipe:
    """N-gram objective over streams of a frozen target (eq. 6), and next-token loss of the early exit (section 2.3).

    Args:
        network: the target; none of its parameters is trained.
        trained: the set.
        options: mode and losses.
        held_out: batches by domain, for the evaluation.
    """

    name = "streams"

    def __init__(
        self,
        network: Network,
        trained: StreamSet,
        options: StreamsOptions,
        held_out: Mapping[str, Sequence[TokenBatch]] | None = None,
    ) -> None:
        network.requires_grad_(False)
        self.network, self.module, self.options = network, trained, options
        self.held_out = held_out or {}

    @property
    def _parameters(self) -> list[nn.Parameter]:
        return [p for p in self.module.parameters() if p.requires_grad]

    def loss(self, batch: TokenBatch, generator: torch.Generator) -> tuple[Tensor, dict[str, float]]:
        """alpha_0 CE(main) + sum_j alpha_j CE(stream j) + CE(early exit), each a mean over its rows (nats).

        Returns:
            The loss, and the mean loss of each part: ``main``, ``stream_1`` ..., ``exit``.
        """
        if self.options.mode == "shared":
            return self._shared(batch)
        carriers = choose_carriers(batch, self.options.positions, generator)
        return self._lossless(batch, carriers)

    # -- lossless mode

    def _lossless(self, batch: TokenBatch, carriers: CarrierRows) -> tuple[Tensor, dict[str, float]]:
        """Each segment forward and backward on its own; the returned loss passes on the gradients computed so far."""
        main = main_pass(self.network, batch, self.module.config.insertion)
        aims = Aims.of(batch, carriers, self.module.config.gamma)
        target = self._said(main.final, aims)
        total: Tensor | None = None
        figures: Counter[str] = Counter()  # every segment's are shares of the batch's means
        grads: list[Tensor | None] = [None] * len(self._parameters)
        for part in carriers.segments(self.options.segment):
            streams, _ = lossless_streams(self.network, self.module, main, part)
            part_aims = Aims.of(batch, part, streams.shape[1], aims)
            ahead, shares = self._stream_loss(streams, part_aims, target)
            early, exit_figures = self._exit_loss(main.states[0], part, part_aims)
            loss, shares = ahead + early, shares | exit_figures
            total = loss.detach() if total is None else total + loss.detach()
            figures.update(shares)
            if torch.is_grad_enabled():
                gradients = torch.autograd.grad(loss, self._parameters, allow_unused=True)
                for place, new in enumerate(gradients):
                    old = grads[place]
                    grads[place] = new if old is None else old if new is None else old.add_(new)
        if total is None:
            return no_loss(self.module), {}
        if torch.is_grad_enabled():
            total = KnownGradients.apply(total, grads, *self._parameters)
        return total, dict(figures)

    def _said(self, final: Tensor, aims: Aims) -> TargetOf | None:
        """Return the target's output in the main rows ``final`` [B * T, d] that streams stand for; None: not needed."""
        if not self.options.distill:
            return None
        read = torch.zeros(len(final), dtype=torch.bool, device=final.device)
        read[aims.main] = True
        likely, places = likeliest(self.network, final[read], TOP), read.cumsum(0) - 1  # once, for all streams of a row
        return lambda stream_aims: likely.at(places[stream_aims.main.flatten()])

    def _stream_loss(self, streams: Tensor, aims: Aims, target: TargetOf | None) -> tuple[Tensor, dict[str, float]]:
        """Return sum_j alpha_j ((1 - w) CE_j + w KL_j) (eq. 6 of the paper, w = 0).

        Each a mean over the rows that have a token so far ahead; w: ``distill``; p: main row t + j, frozen.
        """
        head, share, alpha_j = self.network.head_weight, self.options.distill, self.options.factors[1]
        rows, gamma = streams.flatten(0, 1), streams.shape[1]
        targets = aims.tokens.flatten()
        scale = (aims.exists.double() / aims.counts.clamp(min=1)).flatten()  # shares of the whole batch's means
        p = None if target is None else target(aims)
        loss, each = distilled(rows, head, p, targets, alpha_j * scale, share=share, denominator=1.0)
        soft, hard = (each * scale).unflatten(1, (-1, gamma)).sum(1)  # [gamma] each
        means = torch.where(aims.exists.any(0), hard, torch.nan).tolist()  # of streams that some row has
        figures = {f"stream_{j}": value for j, value in enumerate(means, 1) if value == value and share < 1}
        return loss, figures if p is None else figures | {"kl": float(soft.sum()) / gamma}

    def _exit_loss(
        self,
        before: Tensor,  # [B * T, d] main rows where streams begin
        part: CarrierRows,
        aims: Aims,
    ) -> tuple[Tensor, dict[str, float]]:
        """Return CE of head(norm(M + up down M)) with the next token; M is detached, so that it trains nothing else."""
        if self.module.prune_map is None:
            return before.new_zeros(()), {}
        hidden = self.network.final(self.module.prune_map(before.detach()[part.index]))
        loss = cross_entropy(hidden, self.network.head_weight, aims.following, denominator=aims.rows)
        return loss, {"exit": float(loss.detach())}

    # -- shared mode

    def _shared(self, batch: TokenBatch) -> tuple[Tensor, dict[str, float]]:
        gamma = self.module.config.gamma
        carriers = choose_carriers(batch)
        run = shared_pass(self.network, self.module, batch, carriers, self.options.segment)
        main = self._main_loss(run.final, batch)
        figures = {"main": float(main.detach())}
        loss = self.options.factors[0] * main
        if gamma and len(carriers):
            aims = Aims.of(batch, carriers, gamma)
            ahead, more = self._stream_loss(run.streams, aims, None)
            early, exit_figures = self._exit_loss(run.states[0], carriers, aims)
            loss, figures = loss + ahead + early, figures | more | exit_figures
        return loss, figures

    def _main_loss(self, final: Tensor, batch: TokenBatch) -> Tensor:
        weights = batch.weights.flatten()
        return cross_entropy(final, self.network.head_weight, batch.targets.flatten(), weights)

    # -- held-out figures

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Figures on held-out answers, by domain, as of `HeadRecipe.evaluate`: a stream is a step.

        The target's token at t + 1 + j is the likeliest of main row t + j along the data. In shared mode also
        ``loss/../main``.
        """
        figures: dict[str, float] = {}
        for domain, batches in self.held_out.items():
            judged, loss, weight = list[tuple[Tensor, Tensor]](), 0.0, 0.0
            for held in batches:
                batch = held.to(self.network.head_weight.device)
                carriers = choose_carriers(batch)
                final, streams = self._outputs(batch, carriers)
                if self.options.mode == "shared":
                    share = float(batch.weights.sum())
                    loss, weight = loss + float(self._main_loss(final, batch)) * share, weight + share
                if self.module.config.gamma and len(carriers):
                    judged.append(self._judged(final, streams, Aims.of(batch, carriers, self.module.config.gamma)))
            if judged:
                rates = held_out_figures(*(torch.cat(columns, 1) for columns in zip(*judged, strict=True)))
                figures |= {name.format(domain): value for name, value in rates.items()}
            if weight:
                figures[f"loss/{domain}/main"] = loss / weight
        return figures

    def _outputs(self, batch: TokenBatch, carriers: CarrierRows) -> tuple[Tensor, Tensor]:
        """Return main rows [B * T, d] and streams [R, gamma, d] after the final norm."""
        if self.options.mode == "shared":
            run = shared_pass(self.network, self.module, batch, carriers, self.options.segment)
            return run.final, run.streams
        main = main_pass(self.network, batch, self.module.config.insertion)
        parts = carriers.segments(self.options.segment or 512)
        streams = [lossless_streams(self.network, self.module, main, part)[0] for part in parts]
        return main.final, torch.cat(streams) if streams else main.final.new_zeros(0, 0, 0)

    def _judged(self, final: Tensor, streams: Tensor, aims: Aims) -> tuple[Tensor, Tensor]:
        """Return what `held_out_figures` counts of a batch, some carriers at a time."""
        says = argmax(final, self.network.head_weight)[aims.main]  # [R, gamma] the target's own next tokens
        step = max(1, EVALUATED_LOGITS // (self.network.head_weight.shape[0] * streams.shape[1]))
        hits = []
        for part in torch.arange(len(streams), device=streams.device).split(step):
            logits = self.network.logits(streams[part].to(self.network.head_weight.dtype))  # [n, gamma, V]
            best = logits.topk(min(BRANCHES, logits.shape[-1]), dim=-1).indices
            hits.append((best == says[part, :, None]) & aims.exists[part, :, None])
        return torch.cat(hits).transpose(0, 1), aims.exists.t()

    # -- result

    def export(self, folder: Path) -> dict[str, Any]:
        """Save the set, in bf16 as all weights are; return the number of parameters of each part."""
        self.module.save(folder, torch.bfloat16)
        return {"parameters": self.module.parameters_by_part(), "application": self.options.application}


def build(options: StreamsOptions, context: BuildContext) -> StreamRecipe:
    """Return a fresh set over the context's target, or the one in ``context.init``.

    Raises:
        ConfigError: options that do not fit it, a set of another shape, or prompt tokens that weigh
            something and have no loss.
    """
    target, folder = context.subject()
    if context.prompt_weight and not options.factors[0]:
        raise ConfigError(
            f"streams with prompt_weight={context.prompt_weight}",
            "prompt tokens carry no streams, and main rows have no loss",
            "leave prompt_weight out, or train in shared mode",
        )
    config = options.config(target, folder.name, fingerprint(folder))
    if context.init is None:
        generator = torch.Generator().manual_seed(context.seed)
        trained = StreamSet.fresh(config, linear_shapes(target.config), generator)
    else:
        trained = resumed(StreamSet.load(context.init, dtype=torch.float32), config, context.init)
    return StreamRecipe(target, trained.to(context.device), options, context.held_out)
