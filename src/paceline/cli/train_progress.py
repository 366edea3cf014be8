"""Progress of a training run: a bar on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .console import note


class Bar:
    """A progress bar with the time left and the latest figures; without a terminal, a line now and then."""

    def __init__(self, console: Any, steps: int) -> None:
        words = TextColumn("step"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}")
        self.console, self.steps, self.accepted = console, steps, ""
        self.bar = Progress(
            *words, TimeElapsedColumn(), TimeRemainingColumn(), console=console, disable=not console.is_terminal
        )
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
