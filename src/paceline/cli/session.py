"""Loading a model and asking it, as the commands that answer do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .. import zoo
from ..core.errors import CapabilityError
from ..core.request import RequestOutput
from ..llm import LLM
from .console import stderr, waiting

DEFAULT_MODEL = "paceline-small"
DRAFTER_SHOWN = "the model's own drafter where the zoo names one, else none"


def open_llm(options: dict[str, Any]) -> LLM:
    """Load a model; a target of the zoo comes with its own drafter unless one is named."""
    model, drafter = options["model"], options["drafter"]
    if drafter is None:
        drafter = zoo.default_drafter(model)
    with waiting(f"loading {model}"):
        llm = LLM(**{**options, "drafter": drafter})
    if llm.tokenizer is None:
        raise CapabilityError(f"--model {model}", "it has no tokenizer, so text means nothing to it", "add its files")
    return llm


@contextmanager
def counting(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr; the function it gives takes how many are done. No terminal, no bar."""
    console = stderr()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)


def first_wait(chunks: Iterator[Any], what: str) -> Iterator[Any]:
    """The chunks as they come, with a spinner until the first one is there (long prompts take time)."""
    with waiting(what):
        first = next(chunks, None)
    if first is not None:
        yield first
        yield from chunks


def figures(output: RequestOutput) -> str:
    """The line of figures that ends an answer."""
    return output.stats.summary()
