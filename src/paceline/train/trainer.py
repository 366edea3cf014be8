"""The loop that every recipe shares: steps, learning rate, checkpoints, logs.

A run is a function of its configuration and its data: the order of the rows, the draws of a recipe and the
learning rate depend on the step alone, so a run that was stopped and resumed is the run that was not.
It runs in one process, on a GPU where there is one.
"""

from __future__ import annotations

import json
import math
import platform
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from ..core.errors import ConfigError
from ..core.options import check, option
from ..model.linear import can_pack
from .data import Mixture, TokenBatch
from .files import replacing, require_same, writing

CHECKPOINT, LOG = "checkpoint.pt", "log.jsonl"
BETA2 = 0.95  # AdamW's second-moment decay
CLIP = 1.0  # largest norm of a gradient
LOG_EVERY, SAVE_EVERY = 10, 50  # steps between two lines of the log, and between two checkpoints
REMEDY = "free space there; the same command continues from the last checkpoint"


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Part of a run, with rows of one length."""

    until: float = 1.0  # fraction of the steps at which it ends
    rows: int = option(8, help="rows of a step", minimum=1)
    length: int = option(512, help="tokens of a row", minimum=2)

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Describe how a recipe is trained."""

    steps: int = option(1000, help="optimizer steps", minimum=1)
    learning_rate: float = option(5e-4, help="the highest learning rate, above 0 and below 1", above=0, below=1)
    warmup: int = option(50, help="steps until the highest learning rate", minimum=0)
    schedule: Literal["cosine", "linear", "constant"] = "cosine"  # how the learning rate falls
    final_ratio: float = 0.1  # last learning rate, over the highest
    weight_decay: float = 0.1  # AdamW's, of matrices alone
    precision: Literal["auto", "bf16", "fp32"] = "auto"  # of products; auto: bf16 where the processor multiplies it
    seed: int = 0  # of data order, start values and draws
    evaluate_every: int = option(200, help="steps between two evaluations on held-out data; 0: none", minimum=0)

    def __post_init__(self) -> None:
        check(self)

    def rate(self, step: int) -> float:
        """Return the learning rate of ``step`` (0-based)."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        if self.schedule == "constant":
            return self.learning_rate
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        rest = 1 - done if self.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
        return self.learning_rate * (self.final_ratio + (1 - self.final_ratio) * rest)


class Recipe(Protocol):
    """Describe what is trained, and on what loss."""

    name: str
    module: nn.Module  # its trainable parameters are the run's

    def loss(self, batch: TokenBatch, generator: torch.Generator) -> tuple[Tensor, dict[str, float]]:
        """Return the loss of a batch (a mean), and its parts for the log.

        ``generator``, seeded by run seed and step, is for the recipe's own draws.
        """
        ...

    def evaluate(self) -> dict[str, float]:
        """Figures on held-out data, for the log. Must leave the run as it is."""
        ...

    def export(self, folder: Path) -> dict[str, Any]:
        """Write what users load; returns what ``training.json`` is to state besides."""
        ...


# Gets each step and its figures; True ends the run there, with a checkpoint.
Watch = Callable[[int, Mapping[str, float]], object]


class Trainer:
    """Runs a recipe on a mixture; ``out`` is the folder of checkpoint, log and result.

    Args:
        phases: row lengths over the run, ending at 1.
        facts: what the checkpoint must agree with when it is resumed: recipe, target, data.
        say: called with the figures of each evaluation, in words.
    """

    def __init__(
        self,
        recipe: Recipe,
        mixture: Mixture,
        phases: Sequence[Phase],
        config: TrainConfig,
        out: Path,
        facts: Mapping[str, Any] | None = None,
        watch: Watch = lambda step, figures: None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.recipe, self.mixture, self.phases, self.config, self.out = recipe, mixture, list(phases), config, out
        self.watch, self.say = watch, say
        self.device = training_device()
        self.precision = precision_of(config.precision, self.device)
        ends = [phase.until for phase in self.phases]
        if not ends or ends != sorted(ends) or ends[-1] != 1.0 or min(ends) <= 0:
            remedy = "give each phase a later end, the last 1.0"
            raise ConfigError(f"phases that end at {ends}", "they must rise to 1.0", remedy)
        settings = {**asdict(config), "precision": self.precision, "phases": [asdict(phase) for phase in self.phases]}
        self.facts = {"recipe": recipe.name, **settings, **(facts or {})}
        self.trained = {n: p for n, p in recipe.module.named_parameters() if p.requires_grad}
        if not self.trained:
            raise ConfigError(f"recipe {recipe.name!r}", "nothing in it is trainable", "check its settings")
        matrices, vectors = ([p for p in self.trained.values() if (p.ndim > 1) == wide] for wide in (True, False))
        groups = {"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}
        self.optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, BETA2))
        self.step, self.tokens = 0, 0  # done, and trained on, over all parts of the run
        self.seconds = 0.0  # of this part
        self.interrupted = False  # by a signal

    # -- the run

    def run(self) -> None:
        """Train to the end, until ``watch`` ends it, or until SIGINT; a checkpoint is left in any case.

        Raises:
            ConfigError: ``out`` cannot be written, or has no room for a checkpoint; the loss is not finite.
        """
        began = time.perf_counter()
        if not (self.out / CHECKPOINT).is_file():
            self.save()  # a folder that cannot be written to is an error now, and not after the first steps
        batches = (batch for step, batch in plan(self.mixture, self.phases, self.config.steps) if step >= self.step)
        with self._interruptible():
            done = self.finished
            while not done:
                figures = self._one(next(batches))
                done = self.watch(self.step, figures) is True or self.interrupted or self.finished
                self._report(figures)
                if self.step % SAVE_EVERY == 0 and not done:
                    self.save()
        self.save()
        self.seconds = time.perf_counter() - began

    def _one(self, batch: TokenBatch) -> dict[str, float]:
        """Make one optimizer step on a batch."""
        began = time.perf_counter()
        rate = self.config.rate(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        generator = torch.Generator().manual_seed((self.config.seed * 1_000_003 + self.step) * 64 * 64)
        with products(self.precision, self.device):
            loss, figures = self.recipe.loss(batch.to(self.device), generator)
        loss.backward()
        if not math.isfinite(value := float(loss.detach())):
            subject, wrong = f"training at step {self.step}", f"the loss is {value}"
            raise ConfigError(subject, wrong, "lower the learning rate")
        norm = nn.utils.clip_grad_norm_(self.trained.values(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.tokens += batch.num_tokens
        speed = batch.num_tokens / (time.perf_counter() - began)
        done = {"norm": float(norm), "rate": rate, "tokens": float(self.tokens), "tokens_per_s": speed}
        return {"loss": value, **figures, **done}

    # -- reports

    def _report(self, figures: dict[str, float]) -> None:
        every, last = self.config.evaluate_every, self.step == self.config.steps
        evaluates = every and (self.step % every == 0 or last)
        if evaluates or last or self.step % LOG_EVERY == 0 or self.step == 1:
            self._log({"step": self.step, **figures})
        if evaluates:
            self.evaluate()

    def evaluate(self) -> dict[str, float]:
        """Return held-out figures, logged in ``out``."""
        self.out.mkdir(parents=True, exist_ok=True)
        with torch.no_grad(), products(self.precision, self.device):
            figures = self.recipe.evaluate()
        if figures:
            self._log({"step": self.step, **figures})
            self.say(f"step {self.step}: " + ", ".join(f"{name} {value:.3f}" for name, value in figures.items()))
        return figures

    def _log(self, line: Mapping[str, float]) -> None:
        path = self.out / LOG
        with writing(f"log {path}", REMEDY), path.open("a", encoding="utf-8") as log:
            log.write(json.dumps({**line, "precision": self.precision}) + "\n")

    # -- checkpoints

    def save(self) -> None:
        """Write the checkpoint: a new file in place of the old one, whole or not at all.

        Raises:
            ConfigError: it cannot be written; the one before it is as it was.
        """
        state = {
            "facts": json.dumps(self.facts, sort_keys=True),
            "step": self.step,
            "tokens": self.tokens,
            "parameters": {n: p.detach().cpu() for n, p in self.trained.items()},
            "optimizer": self.optimizer.state_dict(),
        }
        with writing(f"checkpoint in {self.out}", REMEDY, RuntimeError):  # torch's word for a full disk
            self.out.mkdir(parents=True, exist_ok=True)
            with replacing(self.out / CHECKPOINT) as fresh:
                torch.save(state, fresh)

    def resume(self) -> bool:
        """Continue from the checkpoint in ``out``, in this run's precision: weights and moments are float32 in each.

        Returns:
            Whether there was one.

        Raises:
            ConfigError: it belongs to another recipe, configuration, target or data, or cannot be read.
        """
        path = self.out / CHECKPOINT
        if not path.is_file():
            return False
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
            facts = json.loads(state["facts"])
        except Exception as error:  # torch raises many kinds for a broken file
            raise ConfigError(f"checkpoint {path}", f"it cannot be read ({error})", "name another --out") from error
        left_out = {"evaluate_every", "precision"}  # these change no weight
        old, new = ({k: v for k, v in f.items() if k not in left_out} for f in (facts, self.facts))
        require_same(f"checkpoint {path}", old, new, "name another --out, or repeat the settings of the first run")
        for name, parameter in self.trained.items():
            parameter.data.copy_(state["parameters"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.tokens = state["step"], state["tokens"]
        log = self.out / LOG
        if log.is_file():  # lines after the checkpoint leave it: their steps are repeated
            lines = []
            for line in log.read_text("utf-8").splitlines():
                with suppress(ValueError, KeyError, TypeError):  # half a line, of a killed process
                    lines += [f"{line}\n"] if json.loads(line)["step"] <= self.step else []
            log.write_text("".join(lines), encoding="utf-8")
        return True

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """SIGINT and SIGTERM end the run after the step that is under way; a second SIGINT at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def stop(number: int, frame: Any) -> None:
            if self.interrupted:
                raise KeyboardInterrupt
            self.interrupted = True

        old = {s: signal.signal(s, stop) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)

    @property
    def finished(self) -> bool:
        """Return whether all steps are done."""
        return self.step >= self.config.steps


def precision_of(precision: str, device: torch.device) -> str:
    """Return the precision of a run's products, "bf16" or "fp32"; "auto" stands for the faster one on a device.

    A processor without products of bf16 widens each factor: with AVX2 torch makes 10 GFLOP/s of them where float32 has
    75, and with AVX-512 alone 30.
    """
    if precision != "auto":
        return precision
    arm = platform.machine().lower() in ("aarch64", "arm64")
    has_products = device.type != "cpu" or (can_pack() and (arm or torch.cpu._is_avx512_bf16_supported()))
    return "bf16" if has_products else "fp32"


def products(precision: str, device: torch.device) -> torch.autocast:
    """Return a context in which products are made in ``precision``; parameters and sums stay float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


def training_device() -> torch.device:
    """Return where a run computes: a GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def plan(mixture: Mixture, phases: Sequence[Phase], steps: int) -> Iterator[tuple[int, TokenBatch]]:
    """Yield the batch of every step of a run in its order, with the step's number."""
    first = 0
    for phase in phases:
        until = steps if phase is phases[-1] else round(phase.until * steps)
        yield from zip(range(first, until), mixture.batches(phase.rows, phase.length), strict=False)
        first = until
