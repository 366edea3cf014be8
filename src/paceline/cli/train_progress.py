"""Progress of a training run: a bar on the terminal, and TensorBoard's event file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .console import note


class Bar:
    """A progress bar with the time left and the latest figures; without a terminal, a line now and then."""

    def __init__(self, console: Any, steps: int) -> None:
        columns = (
            TextColumn("step"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self.console, self.steps, self.accepted = console, steps, ""
        self.bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self.task = self.bar.add_task("", total=steps)

    def step(self, step: int, figures: Mapping[str, float]) -> None:
        """Show loss and speed."""
        self.bar.start()
        text = f"loss {figures['loss']:.3f}, {figures['tokens_per_s']:.0f} tokens/s{self.accepted}"
        self.bar.update(self.task, completed=step, description=text)
        if not self.console.is_terminal and (step % 50 == 0 or step in (1, self.steps)):
            note(f"step {step} of {self.steps}: {text}")

    def evaluated(self, step: int, figures: Mapping[str, float]) -> None:
        """Show what was measured on held-out data."""
        lengths = [value for name, value in figures.items() if name.startswith("accepted/")]
        if lengths:
            self.accepted = f", accepted {sum(lengths) / len(lengths):.2f}"
        note(f"step {step}: " + ", ".join(f"{name} {value:.3f}" for name, value in figures.items()))

    def close(self) -> None:
        """Leave the terminal as it was."""
        self.bar.stop()


class EventFile:
    """TensorBoard's event file; it is opened with the first figures, so that a mistake leaves no file.

    Args:
        open_writer: gives TensorBoard's writer.
    """

    def __init__(self, open_writer: Callable[[], Any]) -> None:
        self._open = open_writer
        self._writer: Any = None

    def step(self, step: int, figures: Mapping[str, float]) -> None:
        """Write every figure of the step."""
        self._write("train", step, figures)

    def evaluated(self, step: int, figures: Mapping[str, float]) -> None:
        """Write held-out figures."""
        self._write("held_out", step, figures)

    def _write(self, part: str, step: int, figures: Mapping[str, float]) -> None:
        self._writer = self._writer or self._open()
        for name, value in figures.items():
            self._writer.add_scalar(f"{part}/{name}", value, step)

    def close(self) -> None:
        """Write what is left."""
        if self._writer is not None:
            self._writer.close()


def event_file(out: Path) -> list[EventFile]:
    """Return the watcher that writes ``out/tensorboard``; none, and a note, where the package is missing."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        note('no TensorBoard log: the package is missing (pip install "paceline[train]"); log.jsonl is written')
        return []
    return [EventFile(lambda: SummaryWriter(str(out / "tensorboard")))]
