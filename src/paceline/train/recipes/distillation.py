"""The recipe ``draft_model``: a small model of the same tokenizer, distilled from the target."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ...core.errors import ConfigError
from ...core.options import check, option
from ...model.families import decoder_config
from ..data import TokenBatch
from ..features import Features, OnlineFeatures, argmax
from ..losses import cross_entropy, distilled
from ..network import Network

if TYPE_CHECKING:
    from ..registry import BuildContext

DEPTH = 4  # of the chain whose accepted length is simulated


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A Llama-family network."""

    layers: int = 12
    d_model: int = 384  # width of the residual stream
    d_ff: int = 1024  # width of the gated MLP
    heads: int = 6  # of queries
    kv_heads: int = 6  # of keys and values

    def config(
        self, vocab: int, context: int, bos: int, eos: int, pad: int | None = None, tied: bool = True
    ) -> dict[str, Any]:
        """Return its config.json, as transformers writes one."""
        if self.d_model % self.heads or self.heads % self.kv_heads:
            raise ConfigError(
                f"d_model={self.d_model}, heads={self.heads}, kv_heads={self.kv_heads}",
                "heads must divide d_model, and kv_heads heads",
                "change one of them",
            )
        return {
            "architectures": ["LlamaForCausalLM"],
            "bos_token_id": bos,
            "eos_token_id": eos,
            "pad_token_id": pad,
            "head_dim": self.d_model // self.heads,
            "hidden_act": "silu",
            "hidden_size": self.d_model,
            "intermediate_size": self.d_ff,
            "max_position_embeddings": context,
            "model_type": "llama",
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
            "tie_word_embeddings": tied,
            "vocab_size": vocab,
        }


@dataclass(frozen=True, kw_only=True)
class DistilledOptions(ModelShape):
    """A small network, and how it learns from the target."""

    distill: float = option(
        0.8, help="weight of the distance from the target, 0 to 1; the rest is cross-entropy", minimum=0, maximum=1
    )

    network: ClassVar[Callable[..., Any]] = Network

    def __post_init__(self) -> None:
        check(self)


class DraftModelRecipe:
    """distill * KL(p || q) + (1 - distill) * CE, with p of the frozen target (Hinton et al. 2015; Zhou et al. 2023).

    Args:
        network: the draft.
        target: the frozen target; both read the same tokens.
        options: the loss.
        config: the draft's config.json.
        held_out: batches by domain.
        features: where it is known what the target emits; None: the target is run on each batch.
    """

    name = "draft_model"

    def __init__(
        self,
        network: Any,
        target: Network,
        options: DistilledOptions,
        config: Mapping[str, Any],
        held_out: Mapping[str, Sequence[TokenBatch]],
        features: Features | None = None,
    ) -> None:
        self.module, self.target, self.options, self.config, self.held_out = network, target, options, config, held_out
        self.features = features or OnlineFeatures(target)
        self._says: dict[str, list[Tensor]] = {}  # what the target emits on held-out data, by domain

    def loss(self, batch: TokenBatch, generator: torch.Generator) -> tuple[Tensor, dict[str, float]]:
        """Return the mean over the rows that carry weight, and its two parts."""
        rows, o = batch.weights > 0, self.options
        weights, tokens = batch.weights[rows], batch.targets[rows]
        target = self.features.targets(batch) if o.distill else None  # where nothing is learned of it, it is not run
        hidden, head = self.module(batch)[rows], self.module.head_weight
        loss, parts = distilled(hidden, head, target, tokens, weights, share=o.distill)
        distance, entropy = ((parts * weights).sum(1) / weights.sum().clamp_min(torch.finfo().tiny)).tolist()
        return loss, {"kl": distance, "ce": entropy} if o.distill else {"ce": entropy}

    def evaluate(self) -> dict[str, float]:
        """By domain: loss over all tokens, and the simulated accepted length of a chain of `DEPTH`."""
        figures = {}
        device = self.module.head_weight.device
        self._says = self._says or {d: [self._say(b.to(device)) for b in part] for d, part in self.held_out.items()}
        for domain, batches in self.held_out.items():
            pairs = zip(batches, self._says[domain], strict=True)
            sums = [self._held_out(batch.to(device), says) for batch, says in pairs]
            figures[f"loss/{domain}"] = sum(a for a, _ in sums) / len(sums)
            figures[f"accepted/{domain}"] = sum(b for _, b in sums) / len(sums)
        return figures

    def _say(self, batch: TokenBatch) -> Tensor:
        """Return [rows] the target's likeliest tokens: it is frozen, so that one pass serves all evaluations."""
        return argmax(self.target(batch)[batch.weights > 0], self.target.head_weight)

    def _held_out(self, batch: TokenBatch, says: Tensor) -> tuple[float, float]:
        rows = batch.weights > 0
        ours, head = self.module(batch)[rows], self.module.head_weight
        loss = cross_entropy(ours, head, batch.targets[rows], batch.weights[rows])
        agree = torch.zeros_like(rows)
        agree[rows] = argmax(ours, head) == says
        return float(loss), simulated_length(agree, rows, DEPTH)

    def export(self, folder: Path) -> dict[str, Any]:
        """Return a Hugging Face folder in bf16 (without the tokenizer's files)."""
        self.module.save(folder, dict(self.config), torch.bfloat16)
        return {}


def simulated_length(agree: Tensor, rows: Tensor, depth: int) -> float:
    """Mean number of drafts in a row that a chain of ``depth`` would have accepted, teacher-forced.

    Args:
        agree: [B, T] bool, the draft's likeliest token is the target's.
        rows: [B, T] bool, where a draft could start.
        depth: length of the chain.
    """
    run = agree.clone()
    total = run.sum()
    for step in range(1, depth):
        later = torch.zeros_like(agree)
        later[:, :-step] = agree[:, step:]
        run = run & later
        total = total + run.sum()
    return float(total) / max(1, int(rows.sum()))


def build(options: DistilledOptions, context: BuildContext) -> DraftModelRecipe:
    """Return a fresh draft, or one that continues from ``context.init``.

    Raises:
        ConfigError: another vocabulary.
    """
    target, _ = context.subject()
    tokenizer = context.tokenizer
    sizes = target.config.vocab_size, target.config.max_position
    ends = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    config = options.config(*sizes, *ends)
    network = type(options).network(decoder_config(config), context.device)
    if context.init is not None:
        network.load_weights(context.init)
    else:
        network.init_weights(context.seed)
    return DraftModelRecipe(network, target, options, config, context.held_out, context.features)
