"""``paceline generate``: answer prompts, token by token in colour, with a line of figures."""

from __future__ import annotations

import dataclasses
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic_core import to_json
from rich.console import Console

from ..api.config import LLMConfig
from ..api.llm import LLM
from ..core.errors import ConfigError, RequestError
from ..core.outputs import RequestOutput
from ..core.sampling import SamplingParams
from ..engine.tokens import Prompt, chat_ids
from .console import Painter, ProgressLine, coloured, legend, note, stdout
from .options import DEFAULTS, takes
from .session import (
    CHAT_SHOWN,
    SAMPLED,
    Application,
    Color,
    Verbose,
    application_named,
    chosen,
    figures,
    open_llm,
    painted,
    stopping,
)

app = typer.Typer(add_completion=False)
GREEDY = {"temperature": 0.0}
GREEDY_SHOWN = {
    name: f"{GREEDY.get(name, getattr(SamplingParams(), name))}; with --chat {chat_default}"
    for name, chat_default in CHAT_SHOWN.items()
}


@app.command()
@takes(
    params=SamplingParams,
    llm=LLMConfig,
    defaults={**DEFAULTS, "max_tokens": 128, **SAMPLED},
    shown_defaults=GREEDY_SHOWN,
)
def generate(
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="What to answer; repeat it for several.")
    ] = None,
    prompt_file: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH",
            help="A file that holds one prompt; - is standard input, which is read where no prompt is named.",
        ),
    ] = None,
    as_: Application = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="Wrap each prompt in the model's chat template, and sample as `paceline chat` does."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a prompt, with token ids.")] = False,
    verbose: Verbose = False,
    color: Color = True,
    *,
    llm: dict[str, Any],
    params: dict[str, Any],
) -> None:
    """Answer prompts: greedily, or with --chat as `paceline chat` does.

    Green tokens were drafted and accepted, the others are the target's own. The answer goes to stdout,
    progress and figures to stderr. Ctrl-C ends the answers, with the figures so far.

    Examples:
        paceline generate -p "The three largest cities of France are"
        paceline generate --chat --model smollm2-135m < question.txt
        paceline generate -p "One" -p "Two" --max-tokens 32 --json
    """
    prompts = _prompts(prompt, prompt_file)
    overrides = chosen(params)
    sampling = SamplingParams(**{**GREEDY, **overrides})
    if not as_json and (sampling.logprobs is not None or sampling.prompt_logprobs is not None):
        raise ConfigError("log-probabilities", "the coloured text has no place for them", "add --json")
    application = application_named(as_, llm["applications"] or {})
    model = open_llm(llm, len(prompts) * sampling.n)
    requests: list[Prompt] = [*prompts]
    if chat:
        sampling = model.default_sampling_params(**overrides)
        turns = [[{"role": "user", "content": prompt}] for prompt in prompts]
        rendered = [chat_ids(turn, model.tokenizer, llm["model"]) for turn in turns]
        requests = [{"prompt_token_ids": ids, "prompt": text} for ids, text in rendered]
    console = stdout(color)
    streamed = len(prompts) == 1 and sampling.n == 1 and not sampling.echo and not as_json
    if coloured(console) and not as_json:
        console.print(legend())
    outputs: list[RequestOutput] = []
    with stopping(model) as stopped:
        if streamed:
            with suppress(RequestError):  # raised below, once the figures are shown
                for chunk in painted(console, model, model.stream(requests[0], sampling, application), sampling):
                    outputs += [chunk.output] if chunk.output is not None else []
            console.print()
        else:
            with ProgressLine() as line:
                progress = line.counting("answering", len(requests))
                outputs = model.generate(requests, sampling, progress=progress, application=application)
    for number, output in enumerate(outputs, 1):
        if as_json:
            record = {**dataclasses.asdict(output), "stats": output.stats.as_dict()}
            typer.echo(to_json(record, inf_nan_mode="null"))  # an impossible token's log-probability is infinite
            continue
        if len(prompts) > 1:
            first = prompts[number - 1].strip().partition("\n")[0]
            console.print(f"{chr(10) * (number > 1)}[{number} of {len(prompts)}] {first}", style="bold", markup=False)
        if not streamed:
            _show(model, output, sampling, console)
        note(figures(output, verbose))
    for output in outputs:
        if output.error is not None:
            raise RequestError(output.request_id, output.error, output)
    if stopped:
        raise KeyboardInterrupt


def _prompts(prompts: list[str] | None, files: list[str] | None) -> list[str]:
    if not prompts and not files and sys.stdin and not sys.stdin.isatty():
        prompts = [text] if (text := _read("-")) else None
    texts = [*(prompts or []), *(_read(name) for name in files or [])]
    if texts:
        return texts
    raise ConfigError("no prompt", "there is nothing to answer", 'give --prompt "..." or --prompt-file PATH')


def _read(name: str) -> str:
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
        return text.removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompt-file {name}", f"it cannot be read ({error})", "name a UTF-8 text file") from error


def _show(model: LLM, output: RequestOutput, params: SamplingParams, console: Console) -> None:
    for answer in output.outputs:
        if len(output.outputs) > 1:
            console.print(f"[{answer.index}]", style="bold", markup=False)
        painter = Painter(model.tokenizer, output.prompt_token_ids, params.skip_special_tokens)
        echoed = len(output.prompt or "") if params.echo else 0
        console.print(answer.text[:echoed], style="dim", end="", markup=False)
        painter.feed(answer.token_ids, answer.origins)
        console.print(painter.take(answer.text[echoed:]))
