"""One request: figures 11, 12, 14 and 15."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean
from typing import Any

from kit import figures, timeline
from kit.clock import VIRTUAL
from kit.figures import Panel, Series
from kit.static_tree import StaticTreeConfig
from kit.study import Table

from paceline.papers.specpipe.config import PipelineConfig
from specpipe_parts.common import (
    EVEN,
    HOW,
    OWN,
    STAGE_MS,
    Evenly,
    PipeFlags,
    decode,
    draft_of,
    greedy,
    levels,
    plain,
    prompts,
    study,
    two_hosts,
)
from specpipe_parts.law import equation_2, expected_tbt, hit_rate_of, tbt_with_bubbles
from specpipe_parts.times import times_of


def both_links(ask: PipeFlags) -> dict[str, dict[str, Any]]:
    """One host, and two."""
    return {"no link": {}, "10 GbE": two_hosts(ask)}


MS = f"ms between tokens ({VIRTUAL})"


@study.table(takes=("stages",), prompts=1, max_new_tokens=200)
def figure_11(ask: PipeFlags) -> Iterator[Table | None]:
    """The formula, in the clock: hit rates inverted from the paper's speed-ups, a source that is right so often."""
    tokens = ask.max_new_tokens or 0
    (prompt,) = prompts(ask, tokens)[:1]
    yield None
    jobs = [(prompt, greedy(tokens))]
    (answer,) = plain(ask, jobs)
    links = both_links(ask)
    slow = {where: decode(ask, jobs, None, levels(ask), **EVEN, **link) for where, link in links.items()}
    rows: list[list[str]] = []
    values: list[dict[str, Any]] = []
    same = all(run.said == [answer] for run in slow.values())
    for paper in (4.19, 5.53):
        rate = hit_rate_of(ask.stages, paper)
        for where, link in links.items():
            source = Evenly([*prompt, *answer], rate)
            run = decode(ask, jobs, source, levels(ask, width=1, children=1), **EVEN, **link)
            same &= run.said == [answer]
            t = STAGE_MS
            found = {
                "paper": paper,
                "link": where,
                "hit_rate": run.hit_rate,
                "tbt_ms": run.tbt * 1e3,
                "times_plain": slow[where].tbt / run.tbt,
                "formula_ms": expected_tbt(t, ask.stages, run.hit_rate),
                "equation_2_ms": equation_2(t, ask.stages, run.hit_rate),
                "bubbles_ms": tbt_with_bubbles(t, run.mean_bubble),
            }
            values.append(found)
            rows.append(
                [
                    f"{paper:.2f}",
                    where,
                    f"{rate:.3f}",
                    f"{run.hit_rate:.3f}",
                    f"{run.tbt * 1e3:.2f}",
                    f"{found['formula_ms']:.2f}",
                    f"{found['equation_2_ms']:.2f}",
                    f"{found['times_plain']:.2f}",
                ]
            )
    yield Table(
        title=f"{ask.stages} stages, a synthetic source ({VIRTUAL})",
        head=("inverted from", "link", "P wanted", "P", "TBT ms", "P t + (1-P) m t", "eq. 2", "times plain"),
        parts={"": rows},
        values={
            "runs": values,
            "plain_ms": {where: run.tbt * 1e3 for where, run in slow.items()},
            "stages": ask.stages,
        },
        remarks=[
            "plain pipeline: " + ", ".join(f"{run.tbt * 1e3:.2f} ms ({where})" for where, run in slow.items()),
            "the hit rates are inverted from the paper's speed-ups: that these come out again says that clock and "
            "formula agree, and nothing of what a draft reaches",
        ],
        how=[
            [HOW, f"1 prompt, {tokens} tokens, {STAGE_MS:.1f} ms a stage and nothing else; the source knows the text"]
        ],
        same=same,
    )


@study.table(takes=(*OWN, "measured"), tasks="sql,e2e,gsm8k,books", prompts=2, max_new_tokens=48)
def figure_13(ask: PipeFlags) -> Iterator[Table | None]:
    """Our own drafts by task, in one host and over 10 GbE between two: times the plain pipeline."""
    tokens = ask.max_new_tokens or 0
    found, times = {task: prompts(replace(ask, tasks=task), tokens) for task in ask.names}, times_of(ask)
    shape = levels(ask, layers=times.layers)
    yield None
    rows: list[list[str]] = []
    values: list[dict[str, Any]] = []
    same = True
    for task, texts in found.items():
        for where, link in both_links(ask).items():
            runs, slow = [], []
            for prompt in texts:
                jobs = [(prompt, greedy(tokens))]
                slow.append(decode(ask, jobs, None, shape, **times.bare, **link))
                runs.append(decode(ask, jobs, draft_of(ask), shape, **times.whole, **link))
                same &= plain(ask, jobs) == slow[-1].said == runs[-1].said
            rate, tbt, before, bubble = (
                sum(map(each, some)) / len(some)
                for each, some in (
                    (lambda run: run.hit_rate, runs),
                    (lambda run: run.tbt * 1e3, runs),
                    (lambda run: run.tbt * 1e3, slow),
                    (lambda run: run.mean_bubble, runs),
                )
            )
            ticks = tbt_with_bubbles(times.tick_ms, bubble)
            formula = times.expected_ms(rate)
            values.append(
                {
                    "task": task,
                    "link": where,
                    "hit_rate": rate,
                    "tbt_ms": tbt,
                    "ticks_ms": ticks,
                    "formula_ms": formula,
                    "times_plain": before / tbt,
                }
            )
            shown = f"{tbt:.1f}", f"{ticks:.1f}", f"{formula:.1f}", f"{before / tbt:.2f}"
            rows.append([task, where, f"{rate:.3f}", *shown])
    yield Table(
        title=f"{ask.stages} stages, drafts of {ask.draft} ({VIRTUAL})",
        head=("task", "link", "P", "TBT ms", "t x ticks a token", "P t + (1-P) m t", "times plain"),
        parts={"": rows},
        values={"rows": values},
        remarks=[times.words, "10 GbE: half of the stages are behind the coordinator's link, with 1 ms a way"],
        how=[[HOW, f"{ask.prompts} prompts of each task, {tokens} tokens, w = {ask.width}, k = {ask.children}"]],
        same=same,
    )


@study.figure(takes=(*OWN, "measured"), prompts=1, max_new_tokens=24)
def figure_12(ask: PipeFlags) -> Iterator[Table | None]:
    """Who works when: source, stages, links; steps that stand below each other, and a flush."""
    tokens = ask.max_new_tokens or 0
    (prompt,) = prompts(ask, tokens)[:1]
    times = times_of(ask)
    yield None
    jobs = [(prompt, greedy(tokens))]
    run = decode(ask, jobs, draft_of(ask), levels(ask, layers=times.layers), **times.whole, **two_hosts(ask))
    same = run.said == plain(ask, jobs)
    flushes = sum(not verdict.alive for tick in run.ticks for verdict in tick.verdicts)
    shares = {
        what: sum(span.ended - span.began for span in run.spans if span.what == what)
        for what in ("compute", "transmit", "prune")
    }
    yield Table(
        title=f"Timeline of one request ({VIRTUAL})",
        head=("ticks", "tokens", "hits", "flushes", "refills", "late siblings"),
        parts={
            "": [
                [
                    str(len(run.ticks)),
                    str(tokens),
                    f"{run.hit_rate:.2f}",
                    str(flushes),
                    str(sum(tick.refills for tick in run.ticks)),
                    str(sum(tick.late for tick in run.ticks)),
                ]
            ]
        },
        values={"flushes": flushes, "seconds": shares, "ticks": len(run.ticks)},
        remarks=[
            f"of the stages', the link's and the coordinator's time "
            f"{shares['compute'] / sum(shares.values()):.1%} is computation",
            times.words,
        ],
        how=[[HOW, "1 prompt; two hosts with 10 GbE between them"]],
        plots={".svg": lambda path: timeline.draw(run.spans, path, VIRTUAL, "one request")},
        same=same,
    )


WAYS = ("SpecPipe", "SpecInfer")


def way(ask: PipeFlags, name: str, layers: str) -> PipelineConfig:
    """A method in the same stages."""
    if name == WAYS[0]:
        return levels(ask, layers=layers)
    return StaticTreeConfig(stages=ask.stages, layers=layers)


@study.figure(takes=(*OWN, "measured"), tasks="sql,e2e,gsm8k", prompts=2, max_new_tokens=32)
def figure_14(ask: PipeFlags) -> Iterator[Table | None]:
    """Hit rate against time between tokens: SpecPipe, and SpecInfer's tree in the same stages."""
    tokens = ask.max_new_tokens or 0
    found, times = prompts(ask, tokens), times_of(ask)
    yield None
    rows: list[list[str]] = []
    values: list[dict[str, Any]] = []
    same, series, shape = True, [], levels(ask, layers=times.layers)
    base = 1e3 * fmean(decode(ask, [(prompt, greedy(tokens))], None, shape, **times.bare).tbt for prompt in found)
    for name in WAYS:
        points: list[tuple[float, float]] = []
        for prompt in found:
            jobs = [(prompt, greedy(tokens))]
            run = decode(ask, jobs, draft_of(ask), way(ask, name, times.layers), **times.whole)
            same &= run.said == plain(ask, jobs)
            points.append((run.hit_rate, run.tbt * 1e3))
        mean = sum(y for _, y in points) / len(points)
        rate = sum(x for x, _ in points) / len(points)
        series.append(Series(label=name, x=[x for x, _ in points], y=[y for _, y in points]))
        values.append({"method": name, "points": points, "tbt_ms": mean, "hit_rate": rate})
        rows.append([name, f"{rate:.3f}", f"{mean:.1f}", f"{base / mean:.2f}"])
    panel = Panel(title="", x_label="hit rate", y_label=MS, series=series)
    yield Table(
        title=f"SpecPipe and SpecInfer in {ask.stages} stages ({VIRTUAL})",
        head=("method", "in flight when said", "TBT ms", "times plain"),
        parts={"": rows},
        values={"methods": values, "plain_ms": base},
        remarks=[
            f"SpecPipe is {values[1]['tbt_ms'] / values[0]['tbt_ms']:.2f} times as fast as SpecInfer's tree "
            "(paper: 2.09 to 2.38)",
            times.words,
        ],
        how=[[HOW, f"{len(found)} prompts, {tokens} tokens each"]],
        plots={".svg": lambda path: figures.lines([panel], path, kind="points")},
        same=same,
    )


PAPERS_SAMPLING: dict[str, Any] = {"temperature": 0.6, "top_p": 0.9, "top_k": 80}


@study.table(takes=(*OWN, "measured"), tasks="sql,e2e,gsm8k", prompts=3, max_new_tokens=48)
def figure_15(ask: PipeFlags) -> Iterator[Table | None]:
    """Greedy and stochastic decoding (temperature 0.6, top-p 0.9, top-k 80; five seeds).

    Answers end where they end: behind its end a greedy answer repeats itself, which a draft predicts too well.
    """
    tokens = ask.max_new_tokens or 0
    found, clock = prompts(ask, tokens), times_of(ask)
    seeds = ask.few(range(5))
    yield None
    rows: list[list[str]] = []
    values: list[dict[str, Any]] = []
    same = True
    for kind, chosen in (("greedy", [None]), ("stochastic", seeds)):
        hits, times, bubbles = [], [], 0.0
        for prompt in found:
            for seed in chosen:
                given = {} if seed is None else {**PAPERS_SAMPLING, "seed": seed}
                jobs = [(prompt, greedy(tokens, ignore_eos=False, **given))]
                run = decode(ask, jobs, draft_of(ask), levels(ask, layers=clock.layers), **clock.whole)
                same &= run.said == plain(ask, jobs)
                hits += [verdict.hit for tick in run.ticks for verdict in tick.verdicts]
                times += [1e3 * gap for gap in run.gaps]
                bubbles += run.mean_bubble * max(1, len(run.gaps))
        rate, mean, ticks = sum(hits) / len(hits), sum(times) / len(times), 1 + bubbles / len(times)
        values.append({"kind": kind, "hit_rate": rate, "tbt_ms": mean, "tokens": len(times), "ticks": ticks})
        rows.append([kind, str(len(times)), f"{rate:.3f}", f"{ticks:.2f}", f"{mean:.1f}"])
    change = values[1]["tbt_ms"] / values[0]["tbt_ms"] - 1
    yield Table(
        title=f"Stochastic decoding ({VIRTUAL})",
        head=("decoding", "tokens", "in flight when said", "ticks a token", "TBT ms"),
        parts={"": rows},
        values={"rows": values, "slower": change},
        remarks=[f"stochastic decoding is {change:+.1%} in time between tokens (paper: +4.39%)", clock.words],
        how=[[HOW, f"{len(found)} prompts, {tokens} tokens at most, {len(seeds)} seeds"]],
        same=same,
    )
