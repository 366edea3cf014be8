"""From a recipe to a run: data, tokenizer, target, trainer, result."""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from ..core.errors import ConfigError
from ..model.hot import most_frequent, save_hot
from ..weights.files import fill, fingerprint
from ..weights.source import load_tokenizer
from .cache import TopCache
from .data import Encoder, Example, Mixture, SourceSpec, TokenBatch, load_source, mark
from .features import TOP
from .files import writing
from .network import Network
from .recipe import RecipeFile
from .registry import BuildContext, RecipeKind, kind
from .scoring import make_scorer
from .trainer import Trainer, Watch, plan, precision_of, products, training_device

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")
RESULT = "result"


@dataclass(kw_only=True)
class TrainingJob(RecipeFile):
    """One run, before anything is loaded."""

    target: Path | None = None  # folder of the target
    init: Path | None = None  # folder of a checkpoint to start from
    out: Path
    cache: Path | None = None  # folder for the target's likeliest tokens; None: the target is run on each batch
    tokens: dict[str, int] = field(default_factory=dict)  # by source file, once loaded
    hot: Tensor | None = None  # [H] int64, in the same way: the only tokens that are to be drafted; None: all

    @property
    def tokenizer_folder(self) -> Path:
        """Return the folder whose tokenizer reads the data: the target's, or where there is none that of ``init``."""
        folder = self.target or self.init
        assert folder is not None, "a job without a target has a checkpoint to start from"
        return folder


def prepare(
    job: TrainingJob,
    watch: Watch = lambda step, figures: None,
    say: Callable[[str], None] = lambda text: None,
) -> Trainer:
    """Load everything and check that it fits. Only a requested cache is written.
    ``say`` gets a line before each slow part and at each evaluation.

    Raises:
        ConfigError: data, options or a checkpoint in ``out`` that do not fit.
    """
    entry = kind(job.kind)
    options = fill(entry.Options, job.options, f"recipe {job.where}")
    if not job.sources:
        raise ConfigError(f"recipe {job.kind!r}", "there is no data", "add a [[data.source]]")
    if job.cache and not entry.cached:
        wrong = "it learns from no likeliest tokens, which are what a cache holds"
        raise ConfigError(f"recipe {job.kind!r}", wrong, "leave --cache out")
    device = training_device()
    tokenizer = load_tokenizer(job.tokenizer_folder)
    longest = max(phase.length for phase in job.phases)
    encoder = Encoder(tokenizer, longest)
    examples = [load_source(spec, encoder) for spec in job.sources]
    held = [load_source(spec, encoder) for spec in job.held_out]
    job.tokens = {spec.file: sum(len(e.tokens) for e in each) for spec, each in zip(job.sources, examples, strict=True)}
    context = BuildContext(
        target=None if job.target is None else Network.load(job.target, device, frozen=True),
        target_folder=job.target,
        tokenizer=tokenizer,
        held_out={s.name: held_out(s.learned(each), longest) for s, each in zip(job.held_out, held, strict=True)},
        device=device,
        seed=job.config.seed,
        prompt_weight=job.prompt_weight,
        init=job.init,
        batches=lambda: _mixture(job, examples).batches(job.phases[0].rows, job.phases[0].length),
    )
    if share := getattr(options, "hot_head", 0.0):
        shares = occurrences(job.sources, examples, len(tokenizer))
        job.hot = context.hot = most_frequent(shares, max(1, round(share * len(tokenizer))))
    data = [{**asdict(s), "file": Path(s.file).name, "sha256": mark(s.file)} for s in job.sources]
    facts: dict[str, Any] = {"options": asdict(options), "data": data, "prompt_weight": job.prompt_weight}
    facts["target"] = None if job.target is None else fingerprint(job.target)
    if job.cache is not None:
        context.features = cache = _cache(job, entry, facts["target"], context, examples, say)
        examples = cache.examples
    mixture = _mixture(job, examples)
    return Trainer(entry.build(options, context), mixture, job.phases, job.config, job.out, facts, watch, say)


def _mixture(job: TrainingJob, examples: Sequence[Sequence[Example]]) -> Mixture:
    weighted = [(spec.weight, spec.learned(each)) for spec, each in zip(job.sources, examples, strict=True)]
    return Mixture(weighted, job.config.seed, job.prompt_weight)


def _cache(
    job: TrainingJob,
    recipe: RecipeKind,
    target: str | None,
    context: BuildContext,
    examples: Sequence[Sequence[Example]],
    say: Callable[[str], None],
) -> TopCache:
    """Return what the target emits of every batch of the run, from ``job.cache`` or scored now."""
    assert job.cache is not None and job.target is not None and context.target is not None
    longest = max(phase.length for phase in job.phases)  # texts are cut into pieces of it
    exact = job.config.precision == "fp32"  # else as it serves, whatever this processor multiplies in training
    key = {"target": target, "precision": "fp32" if exact else "bf16", "length": longest}
    shape = context.target.config
    cache = TopCache(
        job.cache,
        [*zip(job.sources, examples, strict=True)],
        key,
        TOP,
        shape.vocab_size,
        shape.d_model if recipe.states else 0,
    )
    batches = (batch for _, batch in plan(_mixture(job, cache.examples), job.phases, job.config.steps))
    inside = partial(products, precision_of(job.config.precision, context.device), context.device)
    cache.complete(partial(make_scorer, job.target, context.target, not exact, inside), batches, say)
    return cache


def occurrences(sources: Sequence[SourceSpec], examples: Sequence[Sequence[Example]], vocab: int) -> Tensor:
    """Return [vocab] float64 how much of the run's data each token is: a mean over the sources by their weights."""
    total = torch.zeros(vocab, dtype=torch.float64)
    for spec, each in zip(sources, examples, strict=True):
        tokens = torch.from_numpy(np.concatenate([e.tokens for e in spec.learned(each)])).long()
        total += spec.weight * torch.bincount(tokens, minlength=vocab)[:vocab] / len(tokens)
    return total / total.sum()


def held_out(examples: Sequence[Example], length: int, rows: int = 4) -> list[TokenBatch]:
    """Return batches that hold each of ``examples`` about once."""
    batches = Mixture([(1.0, examples)], 0).batches(rows, length)
    count = max(1, sum(len(e.tokens) for e in examples) // (rows * length))
    return [next(batches) for _ in range(count)]


def finish(job: TrainingJob, trainer: Trainer) -> Path:
    """Write the result: the files that users load, the tokenizer next to a model, and ``training.json``.

    Raises:
        ConfigError: it cannot be written. The checkpoint is there: the same run, resumed, comes here at once.
    """
    result = job.out / RESULT
    remedy = "free space there; the same command writes it from the checkpoint"
    with writing(f"result {result}", remedy, SafetensorError):
        result.mkdir(parents=True, exist_ok=True)
        exported = trainer.recipe.export(result)
        if job.hot is not None:
            save_hot(job.hot, result)
        source = job.tokenizer_folder
        for name in (*TOKENIZER_FILES, "generation_config.json") if (result / "config.json").is_file() else ():
            if (source / name).is_file() and not (result / name).is_file():
                shutil.copyfile(source / name, result / name)
        facts = {
            **trainer.facts,
            "tokens_seen": trainer.tokens,
            "steps": trainer.step,
            "tokens_by_file": {Path(f).name: n for f, n in job.tokens.items()},
            "seconds_of_last_part": round(trainer.seconds, 1),
            "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}",
        }
        text = json.dumps({**exported, **facts}, indent=1, default=str)
        (result / "training.json").write_text(text + "\n", encoding="utf-8")
    return result


def run(
    job: TrainingJob,
    watch: Watch = lambda step, figures: None,
    say: Callable[[str], None] = lambda text: None,
) -> Trainer:
    """Prepare, resume if there is something to resume, train. The result is written by `finish`."""
    began = perf_counter()
    trainer = prepare(job, watch, say)
    if trainer.resume():
        say(f"going on from step {trainer.step}, from the checkpoint in {trainer.out}")
    counted = sum(p.numel() for p in trainer.trained.values())
    say(f"{counted:,} parameters to train, products in {trainer.precision}; loaded in {perf_counter() - began:.0f} s")
    trainer.run()
    return trainer
