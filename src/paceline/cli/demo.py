"""``paceline demo``: one model in bf16 and in 4 bits, plainly and speculatively, on the same prompts; which to take."""

from __future__ import annotations

import gc
import math
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.text import Text

from ..api.config import LLMConfig
from ..bench import workloads
from ..bench.config import BenchConfig
from ..bench.methods import NONE, parse_methods
from ..bench.report import COLUMNS, figures_table
from ..bench.run import Run
from ..bench.summary import Row, Summary, speed_logs
from ..core.errors import CapabilityError, ConfigError
from ..draft import adapted
from ..weights import zoo
from .console import ProgressLine, legend, note, stderr, stdout
from .options import DEFAULT_MODEL, DEFAULTS, takes
from .session import Color, painted

app = typer.Typer(add_completion=False)

TOTAL_S = 100.0  # after which no further prompt begins, unless prompts are counted by the user
WORTH = 1.03  # times as fast: less is not worth a change
SHOWN = "smollm2-135m"  # where its weights are on this machine; else the embedded model
CHAT = str(Path(__file__).parent / "data" / "chat_prompts.jsonl")
TASKS = ("wikisql", "humaneval", "books")  # for the embedded model, which chats about less
TOKENS = 96  # of an answer
REPEATS = 2  # of each, whose median counts
SHOWN_COLUMNS = {"tokens/s": "tok/s", "times plain": "speed-up", "tokens a pass": "length"}  # name here: in a report


@app.command()
@takes(
    llm=LLMConfig,
    defaults={**DEFAULTS, "model": None},
    shown_defaults={
        "model": f"{SHOWN} where its weights are on this machine, else {DEFAULT_MODEL}",
        "dtype": "bfloat16 next to 4 bits",
    },
    only={"model", "drafter", "dtype", "device", "kernels", "threads"},
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

    Drafting must not change a token: if it does, the exit status is 1. The embedded model answers prompts of three
    tasks, of which --prompts is rounded up to a multiple.

    Examples:
        paceline demo
        paceline demo --model smollm2-135m --drafter suffix --prompts 3
        paceline demo --model folder/model.gguf --dtype int8 --drafter ngram
    """
    llm["model"] = llm["model"] or _model()
    run, summary = _compare(llm, _sides(llm), prompts)
    if failed := [trial for row in summary.total(summary.main) for trial in row.failed]:
        note(f"{len(failed)} of {len(run.trials)} trials failed; {failed[0].method}: {failed[0].error}")
        raise typer.Exit(1)
    console, rows = stdout(color), [row for row in summary.total(summary.main) if row.speed is not None]
    best = max(rows, key=lambda row: (row.speed or 0.0) / (1.0 if row.method.plain else WORTH))
    drafting = max((row for row in rows if not row.method.plain), key=lambda row: row.speed or 0.0)
    model, group = run.runner(drafting.method).llm, next(iter(run.groups.values()))[0]
    prompt = group.prompts[0]
    texts = {one.id: one.turns[0] for name in run.config.workloads for one in workloads.load(name).prompts}
    console.print(Text(texts[prompt.id], style="dim"), soft_wrap=False)
    console.print(legend())
    params = group.params(prompt)
    for _ in painted(console, model, model.stream({"prompt_token_ids": [*prompt.ids]}, params), params):
        pass
    console.print("\n")
    cells = [[r.method.name, *(COLUMNS[of](r) for of in SHOWN_COLUMNS.values()), _by_prompt(summary, r)] for r in rows]
    console.print(figures_table(("", *SHOWN_COLUMNS, "by prompt"), cells))
    same, total = (sum(getattr(one, name) for one in summary.exact) for name in ("identical", "sequences"))
    word = Text("IDENTICAL", style="bold green") if same == total else Text("DIFFERENT", style="bold red")
    console.print(Text.assemble(word, f": {same} of {total} answers have the same tokens with drafts and without"))
    drafter = run.runner(best.method).llm.config.drafter
    drafts = "no drafts (--drafter none)" if drafter in (None, NONE) else f"drafts of {drafter}"
    form = "the file's own weights" if best.method.dtype == "stored" else f"--dtype {best.method.dtype}"
    advice = f"On this machine take {form} with {drafts}: {best.speed:.0f} tokens/s."
    console.print(advice, markup=False, soft_wrap=False)
    if same != total:
        raise typer.Exit(1)


def _by_prompt(summary: Summary, row: Row) -> str:
    """Return the lowest and the highest speed-up of a prompt."""
    if row.is_reference or row.reference is None:
        return ""
    names, factors = (row.method.name, row.reference), list[float]()
    for cell in summary.cells[row.section]:
        new, plain = (summary.trials.get((cell, name), ()) for name in names)
        factors += [math.exp(median(logs)) for logs in speed_logs(new, plain).values()]
    return f"{min(factors):.2f} to {max(factors):.2f}"


def _model() -> str:
    if any(entry.name == SHOWN and entry.path is not None for entry in zoo.available()):
        return SHOWN
    stderr().print(f"{SHOWN} is not on this machine (paceline models get {SHOWN}): {DEFAULT_MODEL} is shown instead")
    return DEFAULT_MODEL


def _sides(llm: dict[str, Any]) -> dict[str, str]:
    """Return the forms of the weights by label: bf16 and 4 bits, or the requested one."""
    if llm["dtype"] != "auto":
        return {llm["dtype"]: llm["dtype"]}
    if LLMConfig(**llm).resolve().shape.checkpoint_dtype == "stored":  # in blocks
        note("bf16 here are the file's weights widened to 16 bits: the time of bf16, no better answers")
        return {"bf16": "bfloat16", "stored": "stored"}
    return {"bf16": "bfloat16", "4 bits": "q4_0"}


def _compare(llm: dict[str, Any], sides: dict[str, str], prompts: int | None) -> tuple[Run, Summary]:
    """Measure each form plainly and with drafts, in turns on the same prompts; a second form that cannot run leaves.

    Raises:
        ConfigError: no drafter is to be compared.
    """
    drafter = llm["drafter"]
    if drafter in (None, NONE):
        subject = f"--drafter {drafter or NONE}"
        raise ConfigError(subject, "it drafts nothing, and drafts are what the demo compares", "leave --drafter out")
    drafter = adapted.named(drafter) if adapted.is_adapted(drafter) else drafter
    while True:
        texts = []
        for label, dtype in sides.items():
            more = f";dtype={dtype};kernels={llm['kernels']}"
            texts += [f"{label} plain=none{more}", f"{label} drafts={drafter}{more}"]
        workloads = TASKS if llm["model"] == DEFAULT_MODEL else (CHAT,)
        setup = BenchConfig(
            model=llm["model"],
            methods=tuple(parse_methods(texts)),
            workloads=workloads,
            prompts=-(-(prompts or 12) // len(workloads)),
            max_new_tokens=TOKENS,
            repeats=REPEATS,
            device=llm["device"],
            threads=llm["threads"],
            time_limit_s=None if prompts else TOTAL_S,
        )
        try:
            with ProgressLine() as line:
                run = Run(setup, progress=line.show)
                report = run.execute()
            break
        except CapabilityError as error:
            refused = run.unprepared
            if refused is None or not refused.plain or refused is setup.methods[0]:
                raise
            label, _ = sides.popitem()
            note(f"{label} weights are left out: {error.wrong}; {error.remedy}")
        del run  # with its weights, before others are loaded
        gc.collect()
    if report.interrupted:
        raise KeyboardInterrupt
    return run, Summary(report)
