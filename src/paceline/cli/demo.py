"""``paceline demo``: the same model plainly and speculatively; the same tokens, and how many a second."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass
from importlib import resources
from typing import Annotated, Any, TypedDict

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .. import zoo
from ..config import LLMConfig
from ..core.errors import ConfigError
from ..core.request import RequestOutput
from ..core.sampling import SamplingParams
from ..llm import LLM
from .console import Painter, legend, stdout
from .options import takes
from .session import DEFAULT_MODEL, counting, figures, open_llm

app = typer.Typer(add_completion=False)


SETTLE_S = 1.0  # each prompt is asked for at least this long, both ways together
MAX_TURNS = 15


class Prompt(TypedDict):
    """One line of ``data/demo_prompts.jsonl`` (where they are from: ``data/SOURCES.md``)."""

    domain: str
    chat: bool  # a user's turn, for the chat template; else text to be continued
    text: str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """One prompt, answered both ways in turns."""

    prompt: Prompt
    plain: RequestOutput
    speculative: RequestOutput
    plain_rates: list[float]  # tokens a second, one a repeat
    speculative_rates: list[float]

    @property
    def identical(self) -> bool:
        return self.plain.outputs[0].token_ids == self.speculative.outputs[0].token_ids

    @property
    def ratio(self) -> float:
        """Speculative over plain, of the medians."""
        return statistics.median(self.speculative_rates) / statistics.median(self.plain_rates)


@app.command()
@takes(
    llm=LLMConfig,
    defaults={"model": DEFAULT_MODEL, "exact": True},
    shown={"drafter": "the model's own drafter, which the zoo names"},
    without={"applications"},
)
def demo(
    prompts: Annotated[int, typer.Option(help="Prompts to compare, of the 20 that come with Paceline.")] = 20,
    repeats: Annotated[
        int, typer.Option(help="Times each prompt is answered each way, at least; medians are shown.")
    ] = 3,
    color: Annotated[bool, typer.Option(help="Colour tokens by how they came about; NO_COLOR is heard too.")] = True,
    *,
    llm: dict[str, Any],
) -> None:
    """Answer prompts plainly and speculatively, greedily, and compare.

    In bfloat16 a pass over many rows may round otherwise than a pass over one; --exact, the default here,
    rules that out, so the tokens must be the same: where they are not, the exit status is 1.
    """
    chosen = _load(prompts)
    if repeats < 1:
        raise ConfigError(f"--repeats {repeats}", "nothing would be measured", "give 1 or more")
    if llm["drafter"] is None and zoo.default_drafter(llm["model"]) is None:
        raise ConfigError(f"--model {llm['model']}", "it has no drafter of its own", "name one: --drafter ngram")
    plain, speculative = open_llm({**llm, "drafter": "none"}), open_llm(llm)
    console = stdout(color)
    first = _compare(plain, speculative, chosen[0], repeats)
    _show_answers(console, speculative, first)
    rest = _compare_all(plain, speculative, chosen[1:], repeats)
    console.print(_table([first, *rest]))
    if not _verdict(console, [first, *rest]):
        raise typer.Exit(1)


def _load(count: int) -> list[Prompt]:
    lines = resources.files("paceline").joinpath("data/demo_prompts.jsonl").read_text(encoding="utf-8").splitlines()
    if not 1 <= count <= len(lines):
        raise ConfigError(f"--prompts {count}", f"there are {len(lines)} of them", f"give 1 to {len(lines)}")
    return [json.loads(line) for line in lines[:count]]


def _compare_all(plain: LLM, speculative: LLM, prompts: list[Prompt], repeats: int) -> list[Comparison]:
    done: list[Comparison] = []
    with counting("comparing", len(prompts)) as progress:
        for prompt in prompts:
            done.append(_compare(plain, speculative, prompt, repeats))
            progress(len(done))
    return done


def _compare(plain: LLM, speculative: LLM, prompt: Prompt, repeats: int) -> Comparison:
    """Both ways in turns, so that a slow moment of the machine falls on both.

    Short answers get more turns than asked for, since a few milliseconds say little. The unmeasured round first
    fills the prefix cache of both, so that what is compared is mostly decoding.
    """
    _ask(plain, prompt), _ask(speculative, prompt)
    turns: list[tuple[tuple[RequestOutput, float], tuple[RequestOutput, float]]] = []
    began = time.perf_counter()
    while len(turns) < repeats or (time.perf_counter() - began < SETTLE_S and len(turns) < MAX_TURNS):
        turns.append((_ask(plain, prompt), _ask(speculative, prompt)))
    (first_plain, _), (first_speculative, _) = turns[0]
    rates = [[rate for _, rate in side] for side in zip(*turns, strict=True)]
    return Comparison(prompt, first_plain, first_speculative, *rates)


def _ask(model: LLM, prompt: Prompt) -> tuple[RequestOutput, float]:
    """The answer, and the tokens a second of the whole request, prompt included."""
    params = SamplingParams(temperature=0.0, max_tokens=prompt["max_tokens"])
    start = time.perf_counter()
    [output] = model.generate([_token_ids(model, prompt)], params)
    return output, len(output.outputs[0].token_ids) / (time.perf_counter() - start)


def _token_ids(model: LLM, prompt: Prompt) -> dict[str, list[int]]:
    tokenizer = model.tokenizer
    if prompt["chat"]:
        messages = [{"role": "user", "content": prompt["text"]}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    else:
        text = (tokenizer.bos_token or "") + prompt["text"]
    return {"prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}


def _show_answers(console: Console, model: LLM, first: Comparison) -> None:
    console.print(Text(first.prompt["text"], style="dim"))
    console.print(legend())
    for name, output, rates in (
        ("plain", first.plain, first.plain_rates),
        ("speculative", first.speculative, first.speculative_rates),
    ):
        answer = output.outputs[0]
        painter = Painter(model.tokenizer, output.prompt_token_ids)
        painter.feed(answer.token_ids, answer.origins)
        console.print(Text.assemble((f"{name:<12}", "bold"), f"{statistics.median(rates):6.0f} tokens/s"))
        console.print(painter.take(answer.text))
        console.print(figures(output), style="dim")
    console.print()


def _table(comparisons: list[Comparison]) -> Table:
    table = Table("domain", box=None, header_style="bold")
    for column in ("tokens", "plain tokens/s", "speculative tokens/s", "ratio", "mean accepted", "same tokens"):
        table.add_column(column, justify="right")
    for one in comparisons:
        table.add_row(
            one.prompt["domain"],
            str(len(one.plain.outputs[0].token_ids)),
            f"{statistics.median(one.plain_rates):.0f}",
            f"{statistics.median(one.speculative_rates):.0f}",
            f"{one.ratio:.2f}",
            f"{one.speculative.stats.mean_accepted_length:.2f}",
            "yes" if one.identical else Text("NO", style="bold red"),
        )
    return table


def _verdict(console: Console, comparisons: list[Comparison]) -> bool:
    ratios = [one.ratio for one in comparisons]
    same, total = sum(one.identical for one in comparisons), len(comparisons)
    word = Text("IDENTICAL", style="bold green") if same == total else Text("DIFFERENT", style="bold red")
    console.print(Text.assemble(word, f": {same} of {total} answers have the same tokens both ways"))
    console.print(f"speculative over plain: {statistics.geometric_mean(ratios):.2f} (geometric mean), ", end="")
    console.print(f"{min(ratios):.2f} at least, {max(ratios):.2f} at most")
    return same == total
