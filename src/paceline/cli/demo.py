"""``paceline demo``: one model in bf16 and in 4 bits, plainly and speculatively, on the same prompts; which to take."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from itertools import chain
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..api.config import LLMConfig
from ..api.llm import LLM
from ..bench.measure import ask
from ..core.errors import CapabilityError
from ..core.outputs import RequestOutput
from ..core.sampling import SamplingParams
from ..engine.tokens import chat_ids
from ..weights import zoo
from ..weights.source import read_config
from .console import Painter, ProgressLine, legend, note, stderr, stdout
from .options import DEFAULT_MODEL, DEFAULTS, takes
from .session import Color, open_llm

app = typer.Typer(add_completion=False)


TURNS = 2  # in which each prompt is answered in all ways
TOTAL_S = 100.0  # after which no further prompt begins, unless prompts are counted by the user
WORTH = 1.03  # times as fast: less is not worth a change
SHOWN = "smollm2-135m"  # where its weights are on this machine; else the embedded model
DemoPrompt = dict[str, Any]  # a line of the files in ``data``: domain, chat (a user's turn), text, max_tokens


@dataclass(frozen=True, slots=True)
class Comparison:
    """One prompt, answered in turns: in each type of weights plainly, then speculatively."""

    prompt: DemoPrompt
    outputs: list[RequestOutput]  # the first answer of each
    rates: list[float]  # tokens a second of the whole request, prompt included: medians

    @property
    def identical(self) -> bool:
        """Check that drafting changed no answer."""
        ids = [output.outputs[0].token_ids for output in self.outputs]
        return ids[::2] == ids[1::2]

    @property
    def ratios(self) -> list[float]:
        """Return speculative over plain speed, in each type of weights."""
        return [drafted / plain for plain, drafted in zip(self.rates[::2], self.rates[1::2], strict=True)]


@app.command()
@takes(
    llm=LLMConfig,
    defaults={**DEFAULTS, "model": None},
    shown_defaults={
        "model": f"{SHOWN} where its weights are on this machine, else {DEFAULT_MODEL}",
        "dtype": "bfloat16 next to 4 bits",
    },
    only={"model", "drafter", "dtype", "device", "kernels", "threads", "revision", "offline"},
)
def demo(
    prompts: Annotated[
        int | None,
        typer.Option(min=1, max=20, help="Prompts to compare.", show_default="as many as two minutes allow"),
    ] = None,
    color: Color = True,
    *,
    llm: dict[str, Any],
) -> None:
    """Answer prompts in bf16 and in 4 bits, plainly and speculatively, greedily, and recommend one for this machine.

    Drafting must not change a token: if it does, the exit status is 1. The answer that gained most is shown.

    Examples:
        paceline demo
        paceline demo --model smollm2-135m --drafter suffix --prompts 3
        paceline demo --model folder/model.gguf --dtype int8 --drafter ngram
    """
    llm["model"] = llm["model"] or _model()
    chosen = _load(llm["model"], prompts)
    sides = _open(llm)
    engines, console, done = [*chain(*sides.values())], stdout(color), list[Comparison]()
    for engine in engines:  # memory is touched and costs are estimated in the first answers
        ask(engine, [_token_ids(engine, chosen[0])], SamplingParams(temperature=0, max_tokens=16))
    began = time.perf_counter()
    with ProgressLine() as line:
        for prompt in chosen:
            if prompts is not None or not done or time.perf_counter() - began < TOTAL_S:
                line.show(f"prompt {len(done) + 1} of {len(chosen)}, answered {TURNS} times {len(engines)} ways")
                done.append(_compare(engines, prompt))
    _show_answer(console, engines, done)
    console.print(_table(sides, done))
    if not _verdict(console, sides, done):
        raise typer.Exit(1)


def _model() -> str:
    if any(entry.name == SHOWN and entry.path is not None for entry in zoo.available()):
        return SHOWN
    stderr().print(f"{SHOWN} is not on this machine (paceline models get {SHOWN}): {DEFAULT_MODEL} is shown instead")
    return DEFAULT_MODEL


def _load(model: str, count: int | None) -> list[DemoPrompt]:
    """Return the first prompts that suit the model: a chat model's, or those of the embedded model's five domains."""
    name = "demo_prompts" if model == DEFAULT_MODEL else "chat_prompts"
    lines = resources.files(__package__).joinpath(f"data/{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines[:count]]


def _open(llm: dict[str, Any]) -> dict[str, list[LLM]]:
    """Load the model in bf16 and in 4 bits, or in the requested dtype: of each a plain engine and one that drafts."""

    def pair(dtype: str) -> list[LLM]:
        plain = open_llm({**llm, "dtype": dtype, "drafter": "none"})
        return [plain, open_llm({**llm, "dtype": dtype, "share": plain})]

    if llm["dtype"] != "auto":
        return {llm["dtype"]: pair(llm["dtype"])}
    sides = {"bf16": pair("bfloat16")}
    plain, label, form = sides["bf16"][0], "4 bits", "q4_0"
    if read_config(plain.folder).checkpoint_dtype == "stored":  # in blocks
        label, form = "stored", "auto"
        note("bf16 here are the file's weights widened to 16 bits: the time of bf16, no better answers")
    try:
        if plain.kernels == "torch":
            raise CapabilityError(label, "they need compiled kernels, and torch's are in use", "install a C++ compiler")
        sides[label] = pair(form)
    except CapabilityError as error:
        note(f"{label} weights are left out: {error.wrong}; {error.remedy}")
    return sides


def _compare(engines: list[LLM], prompt: DemoPrompt) -> Comparison:
    """Compare all ways in turns, so that a slow moment of the machine affects each; every turn begins afresh."""
    prompts, params = [_token_ids(engines[0], prompt)], SamplingParams(temperature=0, max_tokens=prompt["max_tokens"])
    turns = [[ask(engine, prompts, params) for engine in engines] for _ in range(TURNS)]
    outputs = [output for [output], _ in turns[0]]
    seconds = [statistics.median(duration for _, duration in side) for side in zip(*turns, strict=True)]
    counts = [len(output.outputs[0].token_ids) for output in outputs]
    return Comparison(prompt, outputs, [count / duration for count, duration in zip(counts, seconds, strict=True)])


def _token_ids(model: LLM, prompt: DemoPrompt) -> list[int]:
    tokenizer = model.tokenizer
    if prompt["chat"]:
        return chat_ids([{"role": "user", "content": prompt["text"]}], tokenizer, "this model")[0]
    return [*tokenizer.encode((tokenizer.bos_token or "") + prompt["text"], add_special_tokens=False)]


def _show_answer(console: Console, engines: list[LLM], done: list[Comparison]) -> None:
    """Show the answer that drafts made faster than any other."""
    best, side = max(((one, side) for one in done for side in range(len(one.ratios))), key=lambda o: o[0].ratios[o[1]])
    output = best.outputs[2 * side + 1]
    answer = output.outputs[0]
    painter = Painter(engines[2 * side + 1].tokenizer, output.prompt_token_ids)
    painter.feed(answer.token_ids, answer.origins)
    console.print(Text(best.prompt["text"], style="dim"), soft_wrap=False)
    console.print(legend())
    console.print(painter.take(answer.text), soft_wrap=False)
    rates = "{:.0f} tokens/s plainly, {:.0f} speculatively".format(*best.rates[2 * side : 2 * side + 2])
    console.print(f"{rates}: {best.ratios[side]:.2f} times, {output.stats.mean_accepted_length:.2f} tokens a pass\n")


def _means(done: list[Comparison]) -> list[float]:
    """Return tokens a second of each way: geometric means over the prompts."""
    return [statistics.geometric_mean(rates) for rates in zip(*(one.rates for one in done), strict=True)]


def _table(sides: Iterable[str], done: list[Comparison]) -> Table:
    """Return tokens a second of each prompt and way."""
    table = Table("tokens/s", box=None, header_style="bold")
    for way in (f"{side}\n{way}" for side in sides for way in ("plain", "speculative")):
        table.add_column(way, justify="right")
    table.add_column("same\ntokens", justify="right")
    different = Text("NO", style="bold red")
    rows = [(one.prompt["domain"], one.rates, "yes" if one.identical else different) for one in done]
    for name, rates, same in [*rows, ("mean", _means(done), "")]:
        pairs = zip(rates[::2], rates[1::2], strict=True)
        table.add_row(name, *(cell for a, b in pairs for cell in (f"{a:.0f}", f"{b:.0f} ({b / a:.2f})")), same)
    return table


def _verdict(console: Console, sides: dict[str, list[LLM]], done: list[Comparison]) -> bool:
    same, total, rates = sum(one.identical for one in done), len(done), _means(done)
    word = Text("IDENTICAL", style="bold green") if same == total else Text("DIFFERENT", style="bold red")
    console.print(Text.assemble(word, f": {same} of {total} prompts have the same tokens with drafts and without"))
    for side, (label, (_, drafting)) in enumerate(sides.items()):
        ratios = [one.ratios[side] for one in done]
        text = f"{label}: {statistics.geometric_mean(ratios):.2f} times plain, {min(ratios):.2f} to {max(ratios):.2f}"
        console.print(f"{text}, drafter {drafting.config.drafter}", markup=False, soft_wrap=False)
    best = max(range(len(rates)), key=lambda way: rates[way] / (WORTH if way % 2 else 1.0))
    side, drafts = best // 2, "drafts" if best % 2 else "no drafts (--drafter none)"
    label, dtype = [*sides][side], [*sides.values()][side][0].config.dtype
    flag = "" if dtype == "auto" else f" (--dtype {dtype})"
    advice = f"On this machine take {label}{flag} with {drafts}: {rates[best]:.0f} tokens/s."
    console.print(advice, markup=False, soft_wrap=False)
    return same == total
