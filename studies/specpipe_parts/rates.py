"""Hit rates by width, candidates and stages: figures 7 and 10."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

from kit import figures
from kit.clock import VIRTUAL
from kit.figures import Panel, Series
from kit.study import Table

from paceline.draft.sessions import ROOT, Expand, Opening
from paceline.papers.specpipe.flight import NONE
from specpipe_parts.common import (
    HOW,
    OWN,
    Job,
    PipeFlags,
    decode,
    draft_of,
    greedy,
    levels,
    plain,
    prompts,
    study,
    target,
)
from specpipe_parts.law import MeasuredTree, choose_tree
from specpipe_parts.times import times_of

WIDTHS = (1, 2, 4, 8)


def ranks_below(ask: PipeFlags, jobs: Sequence[Job], answers: Sequence[Sequence[int]], width: int) -> list[int]:
    """Of each token but an answer's first, its place among the draft's candidates below the text; -1: none of them.

    It is what a level hits whose parent is known: P(w, 1), the paper's own figure 7.
    """
    drafter = draft_of(ask)
    decoder = target(ask).decoder
    drafter.bind(decoder.info("target", target(ask).tokenizer), 1, 4096, decoder.device)
    sessions = drafter.sessions(width)
    ranks = []
    for key, ((prompt, params), answer) in enumerate(zip(jobs, answers, strict=True)):
        sessions.open(Opening(key, [*prompt, answer[0]], len(prompt), params, 0, 0))
        for token in answer[1:]:
            (grown,) = sessions.grow([Expand(key, expand=[ROOT], width=width)])
            order = sorted(range(len(grown.tokens)), key=lambda place: -grown.log_q[place])
            best = [grown.tokens[place] for place in order]
            ranks.append(best.index(token) if token in best else NONE)
            sessions.commit(key, [token])
        sessions.close(key)
    return ranks


@study.figure(takes=OWN, tasks="books", prompts=7, max_new_tokens=32)
def figure_7(ask: PipeFlags) -> Iterator[Table | None]:
    """Hit rate P(w, m) on books, by width and by the levels that the source must be ahead.

    With one stage nothing is ahead, and P(w, 1) is the share of tokens among the draft's w best below the text.
    """
    tokens = ask.max_new_tokens or 0
    found = prompts(ask, tokens)
    counts = ask.few(range(1, 9))
    yield None
    rows: list[list[str]] = []
    values: list[dict[str, Any]] = []
    same, series = True, []
    jobs = [(prompt, greedy(tokens)) for prompt in found]
    answers = plain(ask, jobs)
    for stages in counts:
        if stages == 1:
            ranks = ranks_below(ask, jobs, answers, max(WIDTHS))
            hits = {width: [0 <= rank < width for rank in ranks] for width in WIDTHS}
        else:
            hits = {}
            for width in WIDTHS:
                shape = levels(ask, stages=stages, width=width)
                runs = [decode(ask, [job], draft_of(ask), shape) for job in jobs]
                same &= [run.said[0] for run in runs] == answers
                hits[width] = [verdict.hit for run in runs for tick in run.ticks for verdict in tick.verdicts]
        rates = {width: fmean(found) for width, found in hits.items()}
        values.append({"stages": stages, "rates": rates, "verdicts": len(hits[max(WIDTHS)])})
        series.append(Series(label=f"m = {stages}", x=WIDTHS, y=[rates[width] for width in WIDTHS]))
        rows.append([str(stages), *(f"{rates[width]:.3f}" for width in WIDTHS), str(len(hits[max(WIDTHS)]))])
    panel = Panel(title="", x_label="w", y_label="P(w, m)", series=series, log_x=True, y_from=0.0)
    yield Table(
        title="Share of said tokens that the tree held, on books",
        head=("stages m", *(f"w = {width}" for width in WIDTHS), "tokens"),
        parts={"": rows},
        values={"rows": values},
        how=[[HOW, f"{len(found)} passages, {tokens} tokens each, k = {ask.children}, {ask.draft} drafts"]],
        plots={".svg": lambda path: figures.lines([panel], path)},
        same=same,
    )


@study.figure(takes=(*OWN, "measured"), tasks="sql,e2e,gsm8k", prompts=1, max_new_tokens=32)
def figure_10(ask: PipeFlags) -> Iterator[Table | None]:
    """Time between tokens and hit rate by width w and candidates k, and what the planner would choose."""
    tokens = ask.max_new_tokens or 0
    found, times = prompts(ask, tokens), times_of(ask)
    yield None
    jobs = [(prompt, greedy(tokens)) for prompt in found]
    answers = plain(ask, jobs)
    rows, tried, same = [], {}, True
    series: dict[int, list[tuple[int, float]]] = {}
    for children in ask.few((2, 4, 8)):
        for width in ask.few((1, 2, 4, 8, 16, 32, 128)):
            shape = levels(ask, width=width, children=children, layers=times.layers)
            runs = [decode(ask, [job], draft_of(ask), shape, **times.whole) for job in jobs]
            same &= [run.said[0] for run in runs] == answers
            rate = sum(run.hit_rate for run in runs) / len(runs)
            tbt = sum(run.tbt for run in runs) / len(runs) * 1e3
            tried[width, children] = rate, tbt
            series.setdefault(children, []).append((width, tbt))
            bound = times.expected_ms(rate)
            rows.append([str(width), str(children), f"{rate:.3f}", f"{tbt:.1f}", f"{bound:.1f}"])
    rates = {key: rate for key, (rate, _) in tried.items()}
    chosen = choose_tree([MeasuredTree(*key, rate) for key, rate in rates.items()], times.step_s, ask.stages)
    best = min(tried, key=lambda key: (tried[key][1], key))
    panel = Panel(
        title="",
        x_label="w",
        y_label=f"ms between tokens ({VIRTUAL})",
        log_x=True,
        series=[Series(label=f"k = {k}", x=[x for x, _ in p], y=[y for _, y in p]) for k, p in series.items()],
    )
    yield Table(
        title=f"Width and candidates in {ask.stages} stages ({VIRTUAL})",
        head=("w", "k", "in flight when said", "TBT ms", "P t + (1-P) m t"),
        parts={"": rows},
        values={"rows": [{"w": w, "k": k, "hit_rate": r, "tbt_ms": t} for (w, k), (r, t) in tried.items()]},
        remarks=[
            f"fastest: w = {best[0]}, k = {best[1]}; chosen by the planner from hit rates: "
            f"w = {chosen.width}, k = {chosen.children}",
        ],
        how=[[HOW, f"{len(jobs)} prompts, {tokens} tokens each"]],
        plots={".svg": lambda path: figures.lines([panel], path)},
        same=same,
    )
