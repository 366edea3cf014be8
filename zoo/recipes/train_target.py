"""The embedded target's training: a tokenizer from data, and a Llama-family model, from random weights or grown.

    python zoo/recipes/train_target.py zoo/recipes/paceline-small.toml --data FOLDER --init FOLDER --out FOLDER

A run that was stopped goes on with the same command. Without --init the tokenizer is learned from the recipe's data.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.core.errors import ConfigError
from paceline.core.options import option
from paceline.model.families import decoder_config
from paceline.train.data import SourceSpec, TokenBatch, read_documents
from paceline.train.job import TrainingJob, finish, run
from paceline.train.losses import cross_entropy
from paceline.train.network import Network
from paceline.train.recipe import locate, read_recipe
from paceline.train.recipes.distillation import ModelShape
from paceline.train.registry import KINDS, BuildContext, RecipeKind
from paceline.weights.files import fill
from paceline.weights.loader import load_weights

CHUNK = 1024  # rows of logits held at a time
SPECIAL = ("<|bos|>", "<|eos|>", "<|pad|>", "<|user|>", "<|assistant|>", "<|system|>")
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] | trim }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class TargetOptions(ModelShape):
    """A model to train from random weights, or to grow from a trained one."""

    vocab_size: int = 8192
    context: int = 2048
    grow: tuple[int, ...] = option((), help="for each layer the layer of --init it starts from; see `grow`")


class TargetRecipe:
    """Next-token prediction by a network, whose config.json is ``config``; evaluated on held-out batches by domain."""

    name = "target"

    def __init__(
        self,
        network: Network,
        config: Mapping[str, Any],
        held_out: Mapping[str, Sequence[TokenBatch]] | None = None,
    ) -> None:
        self.module, self.config, self.held_out = network, dict(config), held_out or {}

    def loss(self, batch: TokenBatch, generator: torch.Generator) -> tuple[Tensor, dict[str, float]]:
        """Mean cross-entropy of the next token (nats), over the rows that carry weight."""
        return self._mean(batch), {}

    def _mean(self, batch: TokenBatch) -> Tensor:
        hidden = self.module(batch)  # [B, T, d_model]
        rows = batch.weights > 0
        weights = batch.weights[rows]
        return cross_entropy(hidden[rows], self.module.head_weight, batch.targets[rows], weights, chunk_rows=CHUNK)

    def evaluate(self) -> dict[str, float]:
        """Loss by domain, in nats a token."""
        device = self.module.head_weight.device
        figures = {}
        for domain, batches in self.held_out.items():
            losses = [float(self._mean(batch.to(device))) for batch in batches]
            figures[f"loss/{domain}"] = sum(losses) / len(losses)
        return figures

    def export(self, folder: Path) -> dict[str, Any]:
        """A Hugging Face folder in bf16 (without the tokenizer's files)."""
        self.module.save(folder, self.config, torch.bfloat16)
        return {}


def grow(network: Network, source: Path, keep: Sequence[int]) -> None:
    """Fill ``network`` from a shallower checkpoint of the same width; its function stays what it was.

    For each layer of the network ``keep`` names the checkpoint's layer it comes from; the first of several that name
    one layer is that layer, the others are copies whose ``out`` and ``down`` are zero, so that they add nothing to the
    residual stream until they are trained (Gong et al. 2019 stack trained layers; the zero projections are those of
    function-preserving growth, Evci et al. 2022).

    Raises:
        ConfigError: shapes that do not fit.
    """
    values = json.loads((source / "config.json").read_text("utf-8"))
    old = Network(decoder_config(values), frozen=True)
    load_weights(old.decoder, source)
    depth = len(old.layers)
    if len(keep) != len(network.layers) or set(keep) != set(range(depth)) or list(keep) != sorted(keep):
        raise ConfigError(
            f"grow={list(keep)}", f"it must name each of the {depth} layers, in order", "give one source a layer"
        )
    with torch.no_grad():
        for index, origin in enumerate(keep):
            own, other = (dict(n.layers[i].named_parameters()) for n, i in ((network, index), (old, origin)))
            again = index > 0 and keep[index - 1] == origin
            for name, parameter in own.items():
                if parameter.shape != other[name].shape:
                    raise ConfigError(f"growing {source}", f"{name} has another shape", "grow in depth only")
                parameter.copy_(other[name])
                if again and name.startswith(("out.", "down.")):
                    parameter.zero_()
        inner = dict(old.decoder.named_parameters())
        for name, parameter in network.decoder.named_parameters():
            if not name.startswith("layers."):
                parameter.copy_(inner[name])


def build(options: TargetOptions, context: BuildContext) -> TargetRecipe:
    """A network from random weights, from the checkpoint ``context.init``, or grown from it.

    Raises:
        ConfigError: a tokenizer or a checkpoint that does not fit.
    """
    tokenizer = context.tokenizer
    if len(tokenizer) > options.vocab_size:
        raise ConfigError(
            f"vocab_size={options.vocab_size}", f"the tokenizer has {len(tokenizer)} tokens", "raise vocab_size"
        )
    ends = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    config = options.config(options.vocab_size, options.context, *ends)
    network = Network(decoder_config(config), context.device)
    if options.grow:
        if context.init is None or not any(context.init.glob("*.safetensors")):
            raise ConfigError("grow", "there is no checkpoint to grow from", "give --init FOLDER")
        grow(network, context.init, options.grow)
    elif context.init is not None and any(context.init.glob("*.safetensors")):
        load_weights(network.decoder, context.init)
    else:
        network.init_weights(context.seed)
    return TargetRecipe(network, config, context.held_out)


# -- the tokenizer


def train_tokenizer(
    sources: Sequence[SourceSpec], vocab_size: int, folder: Path, context: int, characters: int = 20_000_000
) -> None:
    """Learn a vocabulary of ``vocab_size`` tokens, `SPECIAL` included, and write the tokenizer's files (by the
    `tokenizers` library) for a model of ``context`` positions. Each source gives its first ``characters /
    len(sources)`` characters.

    Raises:
        ConfigError: a vocabulary too small for the bytes and the special tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    if vocab_size < 256 + len(SPECIAL):
        raise ConfigError(f"vocab_size={vocab_size}", "no room for the bytes", f"give {256 + len(SPECIAL)} or more")
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(_texts(sources, characters), trainer)
    bos = SPECIAL[0]
    made.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, made.token_to_id(bos))]
    )
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    facts = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[1],
        "pad_token": SPECIAL[2],
        "extra_special_tokens": list(SPECIAL[3:]),
        "model_max_length": context,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")


def _texts(sources: Sequence[SourceSpec], characters: int) -> Iterator[str]:
    for spec in sources:
        left = characters // len(sources)
        for record in read_documents(Path(spec.file)):
            text = record.get("text") or f"{record['prompt']}\n{record['completion']}"
            yield text[:left]
            left -= len(text)
            if left <= 0:
                break


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path, help="recipe file")
    parser.add_argument("--data", type=Path, required=True, help="folder of the files that the recipe's manifest names")
    parser.add_argument("--init", type=Path, help="checkpoint to start from, or to grow")
    parser.add_argument("--out", type=Path, required=True, help="checkpoint, log and result")
    parser.add_argument("--stop-after", type=int, help="stop after this step, with a checkpoint")
    given = parser.parse_args(arguments)
    KINDS["target"] = RecipeKind(f"{__name__}:TargetOptions")
    recipe = locate(read_recipe(given.recipe), given.data)
    if given.init is None and not (given.out / "tokenizer" / "tokenizer.json").is_file():
        shape = fill(TargetOptions, recipe.options, f"recipe {given.recipe}")
        train_tokenizer(recipe.sources, shape.vocab_size, given.out / "tokenizer", shape.context)
    job = TrainingJob(**vars(recipe), init=given.init or given.out / "tokenizer", out=given.out)
    trainer = run(job, lambda step, figures: step == given.stop_after, print)
    print(finish(job, trainer) if trainer.finished else f"stopped after step {trainer.step}")


if __name__ == "__main__":
    main()
