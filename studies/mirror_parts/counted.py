"""What is counted, not timed: fallbacks, traces, accepted tokens, and a run on a virtual clock."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any
from unittest.mock import patch

import numpy as np
from kit import figures
from kit.clock import VIRTUAL, VirtualClock
from kit.figures import Panel, Series
from kit.mirror_watch import WindowVerdict
from kit.study import Table

from mirror_parts.common import MirrorFlags, drafter_of, listen, mirror_of, plain_llm, prompts_of, study
from mirror_parts.modelled import HALF as BEHIND
from mirror_parts.modelled import TABLE_1, TASKS, constant, exception, ratios
from paceline import LLM
from paceline.core.errors import ConfigError
from paceline.papers.mirror import round as mirror_round
from paceline.papers.mirror.channel import propose

COUNTS: dict[str, Any] = {"prompts": 2, "max_new_tokens": 32, "repeats": 1}
OWN = "sql,spec_bench"
HALF = "1/2"


# -- fallbacks (figure 7)


@dataclass(frozen=True, slots=True)
class Fallbacks:
    """Verdicts of one exit on one task, those of one request in a row."""

    missed: np.ndarray[Any, Any]  # [verdicts, widths] 1: what was said was not among so many candidates
    mass: np.ndarray[Any, Any]  # [verdicts, widths] the target's own probability of these

    @staticmethod
    def of(verdicts: Sequence[WindowVerdict], widths: Sequence[int]) -> Fallbacks:
        """Of a run with the most candidates: fewer are the first of them."""
        told = [v for v in verdicts if v.told]
        missed = [[float(v.said not in v.candidates[:width]) for width in widths] for v in told]
        mass = [[sum(v.chances[:width]) for width in widths] for v in told]
        return Fallbacks(np.array(missed), np.array(mass))

    def rates(self) -> list[float]:
        """FF, by width."""
        return [float(rate) for rate in self.missed.mean(0)]

    def predicted(self) -> list[float]:
        """1 - overlap mass, by width."""
        return [1 - float(mass) for mass in self.mass.mean(0)]

    def differences(self) -> list[tuple[float, float]]:
        """95% intervals of FF less what is predicted, by width.

        Given all that went before, a verdict misses with the chance 1 - mass. So its difference from that has the mean
        0 and the variance mass (1 - mass), whatever windows and earlier verdicts were, and variances add up.
        """
        off = self.missed.mean(0) - (1 - self.mass.mean(0))
        spread = 1.96 * np.sqrt((self.mass * (1 - self.mass)).sum(0)) / len(self.mass)
        return [(float(one - wide), float(one + wide)) for one, wide in zip(off, spread, strict=True)]


@study.figure(takes=("draft", "gamma", "heads", "exits", "kappas"), tasks=OWN, **COUNTS)
def figure_7(ask: MirrorFlags) -> Iterator[Table | None]:
    """Fallbacks at T=1 by candidates, for three exits: counted, and predicted as 1 - overlap mass where windows end."""
    widths = ask.widths
    yield None
    base = plain_llm(ask)
    rows, values, panels = [], [], []
    within = total = 0
    for task in ask.names:
        series = []
        for place, exit_ in enumerate(ask.depths):
            found = {}
            for ranks in ("scores", "noise"):
                llm = LLM(
                    ask.model,
                    drafter=f"{drafter_of(ask)},proposes=point",
                    round=mirror_of(ask, max(widths), exit_),
                    share=base,
                    **ask.llm,
                )
                with patch.object(mirror_round, "propose", partial(propose, noisy=ranks == "noise")):
                    heard = listen(llm, prompts_of(ask, llm, task), ask, temperature=1.0)
                found[ranks] = Fallbacks.of(heard.verdicts, widths)
            plain, said = found["scores"], found["scores"].predicted()
            bounds = plain.differences()
            hits = [low <= 1e-9 and high >= -1e-9 for low, high in bounds]
            within, total = within + sum(hits), total + len(hits)
            for width, rate, wanted, bound, noisy in zip(
                widths, plain.rates(), said, bounds, found["noise"].rates(), strict=True
            ):
                interval = f"[{bound[0]:+.3f}, {bound[1]:+.3f}]"
                rows.append([task, exit_, str(width), f"{rate:.3f}", f"{wanted:.3f}", interval, f"{noisy:.3f}"])
            values.append(
                {"task": task, "exit": exit_, "verdicts": len(plain.missed), "rates": plain.rates()}
                | {"predicted": said, "differences": bounds, "with_noise": found["noise"].rates()}
            )
            series.append(Series(label=f"exit {exit_}", x=widths, y=plain.rates(), colour=place))
            series.append(Series(label=f"exit {exit_}, predicted", x=widths, y=said, colour=place, dashed=True))
        panels.append(Panel(title=task, series=series, x_label="candidates", y_label="fallbacks", log_x=True, y_from=0))
    yield Table(
        title=f"Fallbacks at T=1, {ask.exit_words}",
        head=("task", "exit", "kappa", "fallbacks", "1 - mass", "difference, 95%", "ranked with the target's noise"),
        parts={"": rows},
        values={"widths": widths, "traces": values, "within": within, "of": total},
        remarks=[
            f"equal within the interval: {within} of {total}",
            "a set of fewer candidates is a part of one of more, so that fallbacks fall with kappa on every trace",
            "the last column's candidates depend on the noise that decides what is said; the prediction is not theirs",
            f"drafts are the draft's likeliest tokens, windows of {ask.gamma}",
            "intervals: of a sum of coins that fall by the mass",
        ],
        plots={".svg": lambda path: figures.lines(panels, path, width=1.7)},
    )


# -- traces (eq. 11 to 13) and accepted tokens (figure 3b)


def _counts(outputs: Sequence[Any]) -> list[tuple[int, int, tuple[int, ...], tuple[int, ...]]]:
    """Of each request: passes, drafted tokens, accepted lengths, and its ids."""
    return [
        (o.stats.passes, o.stats.drafted, tuple(o.stats.accepted_histogram), tuple(o.outputs[0].token_ids))
        for o in outputs
    ]


@study.table(takes=("draft", "gamma", "heads"), tasks=OWN, dtype="float32", **COUNTS)
def traces(ask: MirrorFlags) -> Iterator[Table | None]:
    """Passes, drafted tokens and accepted lengths of the mirror round beside serial's, request by request."""
    yield None
    options = {**ask.llm, "exact": True}
    base = LLM(ask.model, **options)
    serial = LLM(ask.model, drafter=drafter_of(ask), budget=ask.gamma, share=base, **options)
    mirror = LLM(ask.model, drafter=drafter_of(ask), round=mirror_of(ask, 8, HALF), share=base, **options)
    rows, values, same = [], {}, True
    for task in ask.names:
        for temperature in (0.0, 1.0):
            prompts = prompts_of(ask, base, task)
            plain, one, two = (
                _counts(listen(llm, prompts, ask, temperature, alone=True).outputs) for llm in (base, serial, mirror)
            )
            equal = sum(a == b for a, b in zip(one, two, strict=True))
            ids = sum(a[-1] == b[-1] for a, b in zip(plain, two, strict=True))
            same = same and ids == len(plain)
            passes = sum(a[0] for a in one), sum(b[0] for b in two)
            rows.append([task, f"{temperature:g}", *map(str, passes), f"{equal} of {len(one)}", f"{ids} of {len(one)}"])
            values[f"{task}, T={temperature:g}"] = {"passes": passes, "equal": equal, "ids": ids, "requests": len(one)}
    yield Table(
        title="Traces: serial speculation and the mirror round",
        head=(
            "task",
            "T",
            "passes, serial",
            "passes, mirror",
            "requests with equal traces",
            "with plain decoding's ids",
        ),
        parts={"": rows},
        values={"tasks": values},
        remarks=[f"windows of {ask.gamma}; a trace: passes, drafted tokens and the counts of each length"],
        same=same,
    )


@study.figure(takes=("draft", "gamma"), tasks=OWN, **COUNTS)
def figure_3b(ask: MirrorFlags) -> Iterator[Table | None]:
    """Tokens accepted of a window, by task: mean and standard deviation over requests."""
    yield None
    base = plain_llm(ask)
    llm = LLM(ask.model, drafter=drafter_of(ask), round=mirror_of(ask, 8), share=base, **ask.llm)
    found: dict[str, list[float]] = {}
    for task in ask.names:
        heard = listen(llm, prompts_of(ask, llm, task), ask, temperature=0.0)
        windows: dict[int, list[int]] = {}
        for verdict in heard.verdicts:
            if verdict.window:
                windows.setdefault(verdict.key, []).append(verdict.accepted)
        found[task] = [fmean(own) for own in windows.values()]
    means = {task: (fmean(own), pstdev(own)) for task, own in found.items() if own}
    series = Series(label="accepted", x=[*means], y=[mean for mean, _ in means.values()])
    yield Table(
        title=f"Tokens accepted of a window of {ask.gamma}, greedy",
        head=("task", "mean", "standard deviation", "requests"),
        parts={"": [[t, f"{m:.2f}", f"{d:.2f}", str(len(found[t]))] for t, (m, d) in means.items()]},
        values={"tasks": {task: {"mean": m, "deviation": d} for task, (m, d) in means.items()}, "gamma": ask.gamma},
        plots={
            ".svg": lambda path: figures.bars(
                [Panel(title="Accepted tokens", series=[series], x_label="", y_label="tokens of a window")], path
            )
        },
    )


# -- the paper's devices on a virtual clock (table 1)


DRAFTS = tuple(tenth / 10 for tenth in range(1, 16))  # T_draft / T_target


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What a step takes beside layers and drafts, as shares of a target pass."""

    exit: float  # head, token channel and sending
    verdict: float  # told, and the levels that came taken

    @staticmethod
    def read(file: Path) -> Costs:
        """Those that `law` measured.

        Raises:
            ConfigError: the file is not what it wrote.
        """
        try:
            parts = json.loads(file.read_text(encoding="utf-8"))["parts"]["alone"]
            whole = parts["prefix"] + parts["suffix"]
            return Costs(exit=(parts["exit"] + parts["send"]) / whole, verdict=parts["verdict"] / whole)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"--measured {file}", f"no parts ({error})", "name law.json of `law`") from error


@study.table(needs=("measured",), takes=("draft", "gamma", "heads"), tasks=OWN, **COUNTS)
def simulated(ask: MirrorFlags) -> Iterator[Table | None]:
    """Mirror over vanilla on a virtual clock: fallbacks are counted, exit and rendezvous measured (by `law`)."""
    assert ask.measured is not None
    costs = Costs.read(ask.measured)
    yield None
    base = plain_llm(ask)
    llm = LLM(ask.model, drafter=drafter_of(ask), round=mirror_of(ask, 8, HALF), share=base, **ask.llm)
    rows: list[list[str]] = []
    values: dict[str, dict[str, Any]] = {}
    missed = {
        (task, t): misses(listen(llm, prompts_of(ask, llm, task), ask, t).verdicts, ask.gamma)
        for task in ask.names
        for t in (0.0, 1.0)
    }
    for model in TABLE_1:
        paper = ratios(model)
        draft = constant({task: r for task, r in paper.items() if task != exception(paper)})[0] - 1
        for task in ask.names:
            own = missed[task, float(model[-1])]
            ratio, *others = (clock(own, one, ask.gamma, costs) for one in (draft, *DRAFTS))
            share = sum(own) / len(own)
            rows.append(
                [model, task, str(len(own)), f"{share:.2f}", f"{draft:.2f}", f"{ratio:.2f}", f"{max(others):.2f}"]
            )
            values[f"{model}, {task}"] = {"steps": len(own), "fallbacks": share, "draft": draft}
            values[f"{model}, {task}"] |= {"ratio": ratio, "most": max(others)}
    yield Table(
        title=f"Mirror over vanilla on a {VIRTUAL}, {ask.exit_words}",
        head=(
            "devices",
            "task",
            "steps",
            "fallbacks",
            "T_draft / T_target",
            "mirror over vanilla",
            "at most",
        ),
        parts={"": rows},
        values={"label": VIRTUAL, "runs": values, "costs": asdict(costs)}
        | {"paper": {m: ratios(m) for m in TABLE_1}, "papers_tasks": TASKS},
        remarks=[
            f"{VIRTUAL}: a pass takes 1, half of it behind the exit; a window T_draft, in series, fresh and for all "
            "candidates beside the target alike (rows cost nothing); after a fallback the rollout is called off at "
            "the end of its level, and the target waits for a fresh window",
            f"measured by `law`, of a pass: exit and sending {costs.exit:.3f}, verdict {costs.verdict:.3f}",
            "T_draft is table 1's constant less 1: its least, as the paper's ratio has the paper's own fallbacks in it",
            f"at most: of all T_draft / T_target from {DRAFTS[0]} to {DRAFTS[-1]}, with these fallbacks",
            "range: " + ", ".join(f"{min(v):.2f} to {max(v):.2f} ({m})" for m, v in _by_model(values).items()),
        ],
    )


def misses(verdicts: Sequence[WindowVerdict], gamma: int) -> list[bool]:
    """Of each step with a whole window: whether its outcome was not prepared for."""
    return [not v.reused for v in verdicts if v.told and len(v.window) == gamma]


def clock(missed: Sequence[bool], draft: float, gamma: int, costs: Costs) -> float:
    """Vanilla's time over mirror's: target and drafter as two devices that replay a run's fallbacks.

    Args:
        missed: of each step, whether the next window has to be drafted anew.
        draft: T_draft of a window, of a target pass of 1.
        gamma: levels of a window.
        costs: of a step.
    """
    with VirtualClock() as time:
        asked, drafted, called_off = time.mailbox(), time.mailbox(), [False]

        def drafter() -> None:
            while True:
                asked.get()
                for _ in range(gamma):
                    if not called_off[0]:
                        time.sleep_until(time.now() + draft / gamma)
                drafted.put(None)

        time.start("drafter", drafter)
        for fallback in missed:
            time.sleep_until(time.now() + 1 - BEHIND + costs.exit)
            asked.put(None)
            time.sleep_until(time.now() + BEHIND)
            called_off[0] = fallback
            drafted.get()
            called_off[0] = False
            time.sleep_until(time.now() + costs.verdict)
            if fallback:
                asked.put(None)
                drafted.get()
        return len(missed) * (1 + draft) / time.now()


def _by_model(values: Mapping[str, Mapping[str, Any]]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for name, own in values.items():
        found.setdefault(name.rpartition(", ")[0], []).append(own["ratio"])
    return found


# -- training (figure 9)


@study.figure(needs=("log",))
def figure_9(ask: MirrorFlags) -> Iterator[Table | None]:
    """Loss and agreement of exits while they are trained, from the log of the run."""
    assert ask.log is not None
    try:
        records = [json.loads(line) for line in ask.log.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"--log {ask.log}", f"no log of a training run ({error})", "name a log.jsonl") from error
    losses, agreements = curves(records, "ce_"), curves(records, "agreement/")
    if not losses:
        raise ConfigError(f"--log {ask.log}", "it has no loss of an exit", "name the log of a training of exits")
    yield None
    panels = [
        Panel(title=title, series=series, x_label="step", y_label=label)
        for title, label, own in (("Loss", "nats", losses), ("Agreement", "share of tokens", agreements))
        if (series := [Series(label=name, x=[*points], y=[*points.values()]) for name, points in own.items()])
    ]
    last = {name: [*points.values()][-1] for name, points in {**losses, **agreements}.items()}
    yield Table(
        title="Training of early exits",
        head=("figure", "last value"),
        parts={"": [[name, f"{value:.3f}"] for name, value in last.items()]},
        values={"losses": losses, "agreements": agreements},
        plots={".svg": lambda path: figures.lines(panels, path, width=1.7)},
    )


def curves(records: Sequence[Mapping[str, Any]], prefix: str) -> dict[str, dict[int, float]]:
    """By figure, with this beginning: its values by step."""
    found: dict[str, dict[int, float]] = {}
    for record in records:
        for name, value in record.items():
            if name.startswith(prefix):
                found.setdefault(name, {})[int(record["step"])] = float(value)
    return found
