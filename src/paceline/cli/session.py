"""Loading a model and asking it, as the commands that answer do."""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console

from ..api.llm import LLM
from ..core.errors import CapabilityError, ConfigError
from ..core.outputs import RequestOutput
from ..core.sampling import SamplingParams
from ..model.applications import BASE
from ..weights import generation
from .console import Painter, ProgressLine

Application = Annotated[
    str | None, typer.Option("--as", metavar="NAME", help="Which application answers; base for none.")
]
Color = Annotated[bool, typer.Option(help="Colour drafted and accepted tokens; NO_COLOR=1 turns it off, too.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Add counts, times and what speculation did to the figures.")]


def open_llm(options: dict[str, Any], sequences: int | None = None) -> LLM:
    """Load a model.

    Args:
        sequences: that will run at once, at the most; room for more takes time to make. None: nobody knows.
    """
    model = options["model"]
    if sequences is not None:
        options = {**options, "max_sequences": min(options["max_sequences"], sequences)}
    with ProgressLine(f"loading {model}"):
        llm = LLM(**options)
    if llm.tokenizer is None:
        raise CapabilityError(f"--model {model}", "it has no tokenizer, so it cannot read text", "add its files")
    return llm


def application_named(requested: str | None, loaded: Collection[str]) -> str | None:
    """Return the application that ``--as`` names: by default the only one that is loaded, else the base model.

    Raises:
        ConfigError: several are loaded and none was chosen, or another one was.
    """
    choices = ", ".join([*sorted(loaded), BASE])
    if requested is None:
        if len(loaded) > 1:
            raise ConfigError(f"{len(loaded)} applications", "none was chosen", f"add --as: {choices}")
        return next(iter(loaded), None)
    if requested == BASE:
        return None
    if requested not in loaded:
        raise ConfigError(f"--as {requested}", "no such application is loaded", f"name one of: {choices}")
    return requested


SAMPLED = {name: None for name in generation.SAMPLED}  # defaults of flags: not given
CHAT_SHOWN = {
    name: f"from the model's files, else {generation.CHAT.get(name, getattr(SamplingParams(), name))}"
    for name in SAMPLED
}


def chosen(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling options that the user set, and those that belong to no model."""
    return {name: value for name, value in params.items() if value is not None or name not in SAMPLED}


def painted(console: Console, model: LLM, chunks: Iterator[Any], params: SamplingParams) -> Iterator[Any]:
    """Print chunks in colour as they come; show a spinner until the first one, since long prompts take time."""
    with ProgressLine("reading the prompt"):
        first = next(chunks, None)
    painter = None
    for chunk in chain([] if first is None else [first], chunks):
        painter = painter or Painter(model.tokenizer, chunk.prompt_token_ids, params.skip_special_tokens)
        painter.feed(chunk.token_ids, chunk.origins)
        console.print(painter.take(chunk.text), end="")
        yield chunk


@contextmanager
def stopping(model: LLM) -> Iterator[list[int]]:
    """Let Ctrl-C end the requests in flight, whose outputs so far come as usual; a second one interrupts.

    Yields:
        A list that gets an entry when Ctrl-C is pressed.
    """
    stopped: list[int] = []
    previous = signal.getsignal(signal.SIGINT)

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(number, previous)
        stopped.append(number)
        for request_id in list(model.engine.live):
            model.engine.cancel(request_id)

    signal.signal(signal.SIGINT, stop)
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, previous)


def figures(output: RequestOutput, verbose: bool) -> str:
    """Return the line of figures that ends an answer."""
    stats, samples = output.stats, len(output.outputs)
    line = stats.summary(samples) if verbose else stats.headline(samples)
    return f"{output.application}: {line}" if output.application else line
