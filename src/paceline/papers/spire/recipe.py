"""The recipe ``spire``: a draft of the target's last layers, with feedback memory, over a frozen target (SPIRe, 3)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ...core.errors import ConfigError
from ...core.options import check, option
from ...draft.fit import check_rotary
from ...model.families import decoder_config
from ...model.hot import hot_share, masked
from ...train.data import TokenBatch
from ...train.features import EVALUATED_LOGITS, no_loss
from ...train.losses import TargetHidden, mixed
from ...train.network import Network, config_of_layers, take_layers
from ...train.scoring import CompiledScorer, compiled_scorer
from ...weights.files import fingerprint
from ...weights.loader import load_weights
from ...weights.names import weight_map
from ...weights.trained_files import continued
from .model import SpireShape, read_memory, read_shape, save_shape
from .prefixes import Blocks, run_blocks

if TYPE_CHECKING:
    from ...train.registry import BuildContext


OMEGA = 0.5  # weight of distillation in the mixed loss


@dataclass(frozen=True, kw_only=True)
class SpireOptions:
    """Describe what is trained."""

    hot_head: float = hot_share()
    layers: int = option(0, help="layers of the draft, the target's last ones; 0: a quarter of the target's", minimum=0)
    window: int = option(64, help="last tokens that a row sees; as many as the context: K/V is not sparse", minimum=1)
    depth: int = option(4, help="k: passes, and tokens that will be drafted", minimum=1, maximum=16)

    def __post_init__(self) -> None:
        check(self)


class SpireModule(nn.Module):
    """The draft in training: its layers and memory, over the target's ends."""

    def __init__(self, network: Network, shape: SpireShape) -> None:
        super().__init__()
        self.network = network
        for piece in weight_map(network.config):
            if not piece.of_layer:
                network.decoder.get_parameter(piece.into).requires_grad_(False)
        self.memory = nn.Parameter(shape.fresh_memory().to(network.head_weight.device))


# What the target makes of a batch: of each layer [B, T, d] the memory of verified tokens, and [B, T, d] its last states
# after the final norm.
TargetStates = tuple[list[Tensor], Tensor]


class PassRows(NamedTuple):
    """The rows of a pass that have something to learn."""

    hidden: Tensor  # [R, d] the draft's last states
    places: Tensor  # [R] in the flat batch
    targets: Tensor  # [R] int64 next tokens of the text
    weights: Tensor  # [R]
    mask: Tensor  # [B, P] bool which of the blocks' rows they are


class SpireRecipe:
    """Trains a draft by k passes over every k-th prefix.

    Blocks begin at a place of the batch that is drawn again in each step, so that every token is a root now and then.

    Args:
        module: the draft.
        target: the frozen target.
        shape: what the draft is.
        config: the draft's config.json.
        held_out: batches by domain.
        hot: [H] int64, ascending: the only tokens that are drafted. Distillation is from the target over these alone,
            so that both heads are applied to no others; None: all.
        serving: the target by the layers that serve it, for activations where products are made in bfloat16; None: it
            is run by ``target``.
    """

    name = "spire"

    def __init__(
        self,
        module: SpireModule,
        target: Network,
        shape: SpireShape,
        config: Mapping[str, Any],
        held_out: Mapping[str, Sequence[TokenBatch]],
        hot: Tensor | None = None,
        serving: CompiledScorer | None = None,
    ) -> None:
        self.module, self.target, self.shape = module, target, shape
        self.config, self.held_out, self.serving = config, held_out, serving
        self.hot = None if hot is None else hot.to(target.head_weight.device)

    def loss(self, batch: TokenBatch, generator: torch.Generator) -> tuple[Tensor, dict[str, float]]:
        """Return the weighted mean over the rows of all passes, and that of each pass."""
        offset = int(torch.randint(self.shape.depth, (1,), generator=generator))
        past, final = self.know(batch)
        rows = list(self._rows(batch, offset, past))
        total = sum((part.weights.sum() for part in rows), start=batch.weights.new_zeros(()))
        if not total > 0:
            return no_loss(self.module), {}
        loss, figures = batch.weights.new_zeros(()), {}
        for step, part in enumerate(rows, 1):
            share, mean = part.weights.sum() / total, self._mean(part, final)
            loss = loss + share * mean
            figures[f"loss_{step}"] = float(mean.detach())
        return loss, figures

    def _mean(self, part: PassRows, final: Tensor) -> Tensor:
        """Return the loss of the rows of a pass."""
        head, taught = self.module.network.head_weight, self.target.head_weight
        if self.hot is not None:
            head, taught = head[self.hot], taught[self.hot]
        says = TargetHidden(final.flatten(0, 1)[part.places], taught)
        return mixed(part.hidden, head, says, part.weights, frozen=head.shape[1], omega=OMEGA)

    @torch.no_grad()
    def know(self, batch: TokenBatch) -> TargetStates:
        """Return what the target makes of the tokens."""
        target, n = self.target, self.shape.layers
        if self.serving is not None and torch.is_autocast_enabled("cpu"):
            end = target.config.num_layers - 1
            *served, last = self.serving.activations(batch, (*self.shape.taps(end + 1), end))
            return served, target.final(last)
        last, inputs = target.run(target.embed(batch.tokens), 0, target.config.num_layers, batch)
        # y^{N-n-1+i} for draft layer i: what the target's own layer N - n + i reads (section 3.3)
        return inputs[-n:], target.final(last)

    def _rows(self, batch: TokenBatch, offset: int, past: list[Tensor]) -> Iterator[PassRows]:
        """Yield the rows of each pass that have something to learn."""
        blocks = Blocks.of(batch, self.shape.depth, offset)
        passes = run_blocks(self.module.network, self.module.memory, self.shape, batch, blocks, past)
        first = torch.arange(len(batch.tokens), device=batch.tokens.device)[:, None] * batch.tokens.shape[1]
        # A document's first token has no earlier one, and no draft begins there.
        useful = blocks.there & (batch.positions[:, blocks.places[:, 0], None] > 0)
        targets, weights = batch.targets.flatten(), batch.weights.flatten()
        for step, hidden in enumerate(passes):
            places = first + blocks.places[:, step]  # [B, P]
            row_weights = torch.where(useful[:, :, step], weights[places], 0.0)
            used = row_weights > 0
            yield PassRows(hidden[used], places[used], targets[places[used]], row_weights[used], used)

    # -- held-out figures

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """By domain, teacher-forced, over blocks of k rows.

        ``tau/DOMAIN``: tokens a round, of drafts of k sampled tokens verified by rejection: 1 + the mean sum of the
        products of min(1, q/p) at the text's tokens, which is unbiased on text that the target drew.
        ``alpha/DOMAIN/J``: the mean of sum_x min(p, q) at a block's row J, its expected acceptance.
        """
        figures: dict[str, float] = {}
        device = self.module.network.head_weight.device
        for domain, batches in self.held_out.items():
            judged = [self.judge(batch.to(device)) for batch in batches]
            chances, alphas = torch.cat([c for c, _ in judged]), torch.cat([a for _, a in judged])
            whole = ~chances.isnan().any(1)
            if bool(whole.any()):
                figures[f"tau/{domain}"] = 1 + float(chances[whole].cumprod(1).sum(1).mean())
                for place, alpha in enumerate(alphas[whole].mean(0).tolist(), 1):
                    figures[f"alpha/{domain}/{place}"] = alpha
        return figures

    @torch.no_grad()
    def judge(self, batch: TokenBatch, offset: int = 0, states: TargetStates | None = None) -> tuple[Tensor, Tensor]:
        """Return [B * P, k] each: min(1, q/p) at the text's token, and sum min(p, q); NaN where a row is not there.

        Args:
            batch: the text.
            offset: where its first block begins.
            states: what `know` made of it, for several offsets.
        """
        past, final = states or self.know(batch)
        chances, alphas = [], []
        for part in self._rows(batch, offset, past):
            of_rows = torch.full((2, *part.mask.shape), torch.nan, device=part.hidden.device)
            of_rows[:, part.mask] = self._compare(part, final.flatten(0, 1)[part.places])
            chances.append(of_rows[0].flatten())
            alphas.append(of_rows[1].flatten())
        return torch.stack(chances, 1), torch.stack(alphas, 1)

    def _compare(self, part: PassRows, final: Tensor) -> Tensor:
        """Return [2, R] of the rows of a pass."""
        weight, columns = self.module.network.head_weight, [part.hidden.new_empty(2, 0)]
        for some in torch.arange(len(final), device=final.device).split(max(1, EVALUATED_LOGITS // len(weight))):
            logits = self.module.network.logits(part.hidden[some].to(weight.dtype)).float()
            q = (logits if self.hot is None else masked(logits, self.hot)).softmax(-1)
            p = self.target.logits(final[some]).float().softmax(-1)
            at = part.targets[some, None]
            ratio = (q.gather(1, at) / p.gather(1, at)).clamp_max(1.0)[:, 0]
            columns.append(torch.stack((ratio, torch.minimum(p, q).sum(-1))))
        return torch.cat(columns, 1)

    def export(self, folder: Path) -> dict[str, Any]:
        """Write what users load."""
        self.module.network.save(folder, dict(self.config), torch.bfloat16, layers_only=True)
        save_shape(self.shape, self.module.memory, folder)
        return {}


def build(options: SpireOptions, context: BuildContext) -> SpireRecipe:
    """Return a draft cut out of the target, or one that continues from ``context.init``.

    Raises:
        ConfigError: as many layers as it has or more, or a draft of another shape to continue from.
        CapabilityError: a target whose layers have sliding windows or rotations of their own.
    """
    target, folder = context.subject()
    whole = target.config
    check_rotary("training spire", whole, folder.name, "train a draft_model for this target")
    layers = options.layers or max(1, round(whole.num_layers / 4))
    if layers >= whole.num_layers:
        subject = f"layers={options.layers}" if options.layers else "a quarter of its layers"
        raise ConfigError(subject, f"the target has {whole.num_layers} in all", f"give 1 to {whole.num_layers - 1}")
    shape = SpireShape(
        layers=layers,
        window=options.window,
        depth=options.depth,
        target=folder.name,
        fingerprint=fingerprint(folder),
    )
    config = config_of_layers(folder, range(whole.num_layers)[-layers:])
    module = SpireModule(Network(decoder_config(config), context.device), shape)
    take_layers(module.network, target, range(whole.num_layers)[-layers:])  # the pruned start (section 3.2)
    if context.init is not None:
        continued(read_shape(context.init), shape, context.init, ("window", "sinks", "depth"))  # of no parameter
        load_draft(module, shape, context.init)
    serving = compiled_scorer(folder, target)
    return SpireRecipe(module, target, shape, config, context.held_out, context.hot, serving)


@torch.no_grad()
def load_draft(module: SpireModule, shape: SpireShape, folder: Path) -> None:
    """Fill the layers and the memory of a draft with what a folder holds.

    Raises:
        ConfigError: a folder that holds no such draft.
    """
    load_weights(module.network.decoder, folder, layers_only=True)
    module.memory.copy_(read_memory(shape, folder))
