"""What the tests of training share: tiny data, a tokenizer and a target on disk, recipes in memory."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kits.tiny import VOCAB, tiny_config
from train_target import TargetRecipe, train_tokenizer

from paceline.draft.medusa.heads import Heads, HeadsConfig
from paceline.train.data import Example, Mixture, SourceSpec, TokenBatch, collate
from paceline.train.job import TrainingJob
from paceline.train.network import Network
from paceline.train.recipes.distillation import ModelShape
from paceline.train.trainer import Phase, TrainConfig, Trainer

VOCAB_SIZE = 300  # of the tokenizer and the target on disk
CONTEXT = 128
COLOURS = ("red", "green", "blue", "grey")
SHAPE = ModelShape(layers=2, d_model=32, d_ff=48, heads=4, kv_heads=2)


def write_data(folder: Path) -> Path:
    """A file of dialogues and one of texts. Returns the former."""
    records = [{"prompt": f"What colour is box {i}?", "completion": f"Box {i} is {COLOURS[i % 4]}."} for i in range(24)]
    dialogues = folder / "boxes.jsonl"
    dialogues.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    texts = [f"The {c} box stands beside the other boxes. " * 4 for c in COLOURS]
    (folder / "story.txt").write_text("\n<|endoftext|>\n".join(texts) + "\n", encoding="utf-8")
    return dialogues


def write_target(folder: Path, data: Path, seed: int = 0) -> Path:
    """A random Llama checkpoint with a tokenizer learned from ``data``."""
    from paceline.model.families import decoder_config

    train_tokenizer([SourceSpec(file=str(data))], VOCAB_SIZE, folder, CONTEXT)
    config = SHAPE.config(VOCAB_SIZE, CONTEXT, 0, 1, 2, tied=False)
    network = Network(decoder_config(config))
    network.init_weights(seed)
    louder(network).save(folder, config, torch.float32)
    return folder


def louder(network: Network) -> Network:
    """With larger weights: else a random model says one token for ever."""
    for name, parameter in network.named_parameters():
        if "norm" not in name:
            parameter.data.mul_(8.0)
    return network


def job(kind: str, data: Path, target: Path | None, out: Path, config: Any = (), **changes: Any) -> TrainingJob:
    """A run of two steps over both files, or as ``config`` and ``changes`` say."""
    settings = {"steps": 2, "warmup": 1, "precision": "fp32", "evaluate_every": 0} | dict(config)
    sources = [SourceSpec(file=str(data)), SourceSpec(file=str(data.parent / "story.txt"), weight=0.5)]
    values: dict[str, Any] = {"config": TrainConfig(**settings), "sources": sources, "target": target, "out": out}
    if settings["evaluate_every"]:
        values["held_out"] = [SourceSpec(file=str(data), domain="boxes")]
    return TrainingJob(**{"kind": kind, **values, **changes})


def network(seed: int = 1, frozen: bool = False, **changes: Any) -> Network:
    """A tiny random network in float32."""
    made = Network(tiny_config(**changes), frozen=frozen)
    made.init_weights(seed)
    return made


def examples(count: int, seed: int = 0, longest: int = 40) -> list[Example]:
    """Random documents, some with a prompt."""
    draw = np.random.default_rng(seed)
    lengths = draw.integers(5, longest, count)
    return [Example(draw.integers(8, VOCAB, n).astype(np.int32), int(draw.integers(0, 4))) for n in lengths]


def packed(prompt_weight: float = 0.0) -> TokenBatch:
    """Two rows of packed documents, some of them of one to three tokens, and padding."""
    short = [Example(torch.randint(8, VOCAB, (n,)).numpy().astype("int32")) for n in (1, 2, 3)]
    return collate([[*examples(3, 5), *short], examples(2, 6)], 110, prompt_weight)


def dialogues(prompt_weight: float = 0.0) -> TokenBatch:
    """Dialogues and a text, two documents in a row, padding; a prompt that fills its document but for one token."""

    def example(length: int, prompt: int, seed: int) -> Example:
        return Example(np.random.default_rng(seed).integers(8, VOCAB, length).astype(np.int32), prompt)

    rows = [[example(17, 6, 0), example(11, 0, 1)], [example(24, 9, 2), example(5, 4, 3)]]
    return collate(rows, 32, prompt_weight)


def heads(seed: int = 1) -> Heads:
    """Medusa's, with random parameters, so that no head is the identity."""
    draw = torch.Generator().manual_seed(seed)
    made = Heads.fresh(HeadsConfig(heads=3, d_model=32, vocab_size=VOCAB), draw)
    for parameter in made.parameters():
        parameter.data.add_(0.2 * torch.randn(parameter.shape, generator=draw))
    return made


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def trainer(out: Path, recipe: Any = None, phases: list[Phase] | None = None, seed: int = 3, **config: Any) -> Trainer:
    """A run of a tiny target, or of ``recipe``, over random documents."""
    settings = TrainConfig(
        **{"steps": 6, "learning_rate": 1e-2, "warmup": 2, "precision": "fp32", "evaluate_every": 0} | config
    )
    mixture = Mixture([(1.0, examples(12)), (2.0, examples(20, seed=1))], seed, 0.1)
    rows = phases or [Phase(until=0.5, rows=4, length=48), Phase(rows=2, length=96)]
    return Trainer(recipe or TargetRecipe(network(), {}), mixture, rows, settings, out)


def run_until(run: Trainer, last: int) -> None:
    """Train until the end of step ``last``."""
    run.watch = lambda step, figures: step == last
    run.run()
    run.watch = lambda step, figures: None


def losses(out: Path) -> list[float]:
    """The losses in a run's log."""
    return [json.loads(line)["loss"] for line in (out / "log.jsonl").read_text("utf-8").splitlines()]


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Writing more than ``size`` bytes into a file fails, as it does on a full disk."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
