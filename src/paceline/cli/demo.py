"""``paceline demo``: plain and speculative decoding of one model; the same tokens, and tokens a second of both."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass
from importlib import resources
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .. import zoo
from ..bench.measure import ask
from ..config import LLMConfig
from ..core.errors import ConfigError
from ..core.model_spec import parse_model
from ..core.request import RequestOutput
from ..core.sampling import SamplingParams
from ..llm import LLM
from .console import Painter, legend, note, stderr, stdout
from .options import DEFAULT_MODEL, DEFAULTS, takes
from .session import Color, counting, open_llm

app = typer.Typer(add_completion=False)


SETTLE_S = 1.0  # each prompt is asked for at least this long, both ways together
MAX_TURNS = 15
SHOWN = "smollm2-135m"  # where its weights are on this machine; else the embedded model
DemoPrompt = dict[str, Any]  # a line of the files in ``data``: domain, chat (a user's turn), text, max_tokens


@dataclass(frozen=True, slots=True)
class Comparison:
    """One prompt, answered plainly and speculatively in turns."""

    prompt: DemoPrompt
    outputs: list[RequestOutput]  # the first answer of each
    rates: list[float]  # tokens a second of the whole request, prompt included: medians

    @property
    def identical(self) -> bool:
        plain, speculative = (output.outputs[0].token_ids for output in self.outputs)
        return plain == speculative

    @property
    def ratio(self) -> float:
        """Speculative over plain."""
        return self.rates[1] / self.rates[0]


@app.command()
@takes(
    llm=LLMConfig,
    defaults={**DEFAULTS, "model": None},
    shown={"model": f"{SHOWN} where its weights are on this machine, else {DEFAULT_MODEL}"},
    without={"applications"},
)
def demo(
    prompts: Annotated[
        int | None, typer.Option(help="Prompts to compare, of those that come with Paceline.", show_default="all")
    ] = None,
    repeats: Annotated[
        int, typer.Option(help="Times each prompt is answered each way, at least; medians are shown.")
    ] = 3,
    color: Color = True,
    *,
    llm: dict[str, Any],
) -> None:
    """Answer prompts plainly and speculatively, greedily, and compare; each is asked as if it were the first.

    The tokens must be the same: if they are not, the exit status is 1. The answer that gained most is shown.

    Examples:
        paceline demo
        paceline demo --model smollm2-135m --drafter suffix --prompts 3
        paceline demo --model folder/model.gguf --drafter ngram
    """
    llm["model"] = llm["model"] or _model()
    chosen = _load(llm["model"], prompts)
    if repeats < 1:
        raise ConfigError(f"--repeats {repeats}", "nothing would be measured", "give 1 or more")
    plain, speculative = open_llm({**llm, "drafter": "none"}), open_llm(llm)
    console, done = stdout(color), list[Comparison]()
    note(f"{len(chosen)} prompts, each answered {repeats + 1} times or more both ways: {_time(plain, chosen, repeats)}")
    with counting("comparing", len(chosen)) as progress:
        for prompt in chosen:
            done.append(_compare(plain, speculative, prompt, repeats))
            progress(len(done))
    _show_answer(console, speculative, max(done, key=lambda one: one.ratio))
    spec = parse_model(llm["model"])
    if spec.stretch > 1:
        console.print(spec.label, markup=False, highlight=False)
    console.print(_table(done))
    if not _verdict(console, done):
        raise typer.Exit(1)


def _model() -> str:
    if any(entry.name == SHOWN and entry.path is not None for entry in zoo.available()):
        return SHOWN
    stderr().print(f"{SHOWN} is not on this machine (paceline models get {SHOWN}): {DEFAULT_MODEL} is shown instead")
    return DEFAULT_MODEL


def _load(model: str, count: int | None) -> list[DemoPrompt]:
    """The first prompts of those that suit the model: a chat model's, or those of the embedded model's five domains."""
    name = "demo_prompts" if parse_model(model).name == DEFAULT_MODEL else "chat_prompts"
    lines = resources.files("paceline").joinpath(f"data/{name}.jsonl").read_text(encoding="utf-8").splitlines()
    if count is not None and not 1 <= count <= len(lines):
        raise ConfigError(
            f"--prompts {count}", f"{len(lines)} prompts come with Paceline for this model", f"give 1 to {len(lines)}"
        )
    return [json.loads(line) for line in lines[:count]]


def _time(plain: LLM, prompts: list[DemoPrompt], repeats: int) -> str:
    """Return about how long comparing will take, in words: as if speculative answers took as long as one plain one."""
    [output], seconds = ask(plain, [_token_ids(plain, prompts[0])], _params(prompts[0]))
    a_token = seconds / len(output.outputs[0].token_ids)
    each = (max(SETTLE_S, 2 * repeats * a_token * prompt["max_tokens"]) for prompt in prompts)
    total = sum(each) * (repeats + 1) / repeats
    return f"about {total:.0f} s" if total < 90 else f"about {total / 60:.0f} minutes"


def _compare(plain: LLM, speculative: LLM, prompt: DemoPrompt, repeats: int) -> Comparison:
    """Both ways in turns, so that a slow moment of the machine falls on both.

    Short answers get more turns than asked for, since a few milliseconds say little. Every turn is asked as if it were
    the first; what is done once (memory touched, costs estimated) is done in a round that is not measured.
    """
    models, params = (plain, speculative), _params(prompt)
    asked = [_token_ids(plain, prompt)]
    turns: list[list[tuple[list[RequestOutput], float]]] = [[ask(model, asked, params) for model in models]]
    began = time.perf_counter()
    while len(turns) <= repeats or (time.perf_counter() - began < SETTLE_S and len(turns) <= MAX_TURNS):
        turns.append([ask(model, asked, params) for model in models])
    outputs = [output for [output], _ in turns[1]]
    seconds = [statistics.median(taken for _, taken in side) for side in zip(*turns[1:], strict=True)]
    counts = [len(output.outputs[0].token_ids) for output in outputs]
    return Comparison(prompt, outputs, [count / taken for count, taken in zip(counts, seconds, strict=True)])


def _params(prompt: DemoPrompt) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=prompt["max_tokens"])


def _token_ids(model: LLM, prompt: DemoPrompt) -> list[int]:
    tokenizer = model.tokenizer
    if prompt["chat"]:
        messages = [{"role": "user", "content": prompt["text"]}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    else:
        text = (tokenizer.bos_token or "") + prompt["text"]
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def _show_answer(console: Console, model: LLM, best: Comparison) -> None:
    output = best.outputs[1]
    answer = output.outputs[0]
    painter = Painter(model.tokenizer, output.prompt_token_ids)
    painter.feed(answer.token_ids, answer.origins)
    console.print(Text(best.prompt["text"], style="dim"), soft_wrap=False)
    console.print(legend())
    console.print(painter.take(answer.text), soft_wrap=False)
    rates = "{:.0f} tokens/s plainly, {:.0f} speculatively".format(*best.rates)
    console.print(f"{rates}: {best.ratio:.2f} times, {output.stats.mean_accepted_length:.2f} tokens a pass\n")


def _table(comparisons: list[Comparison]) -> Table:
    table = Table("domain", box=None, header_style="bold")
    for column in ("tokens", "plain tokens/s", "speculative tokens/s", "ratio", "mean accepted", "same tokens"):
        table.add_column(column, justify="right")
    for one in comparisons:
        table.add_row(
            one.prompt["domain"],
            str(len(one.outputs[0].outputs[0].token_ids)),
            *(f"{rate:.0f}" for rate in one.rates),
            f"{one.ratio:.2f}",
            f"{one.outputs[1].stats.mean_accepted_length:.2f}",
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
