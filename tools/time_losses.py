"""Slopes by hand: processor time of a forward and backward pass on one thread, beside other ways to the same gradient.

    .venv/bin/python tools/time_losses.py --rounds 15
    git archive 9ea3473~1 src/paceline | (mkdir -p build/before && tar -x -C build/before)
    .venv/bin/python tools/time_losses.py --before build/before     # and all losses as they were with slopes by hand

The two slopes by hand that there are stand beside autograd's; with `--before` losses whose slopes were all written by
hand stand beside what is there now. Each subject is computed in both ways in turns (A B B A ...) from the same inputs;
a figure is the median over the rounds of a round's other way over by hand, with its 95% interval (bootstrap).
"""

from __future__ import annotations

import argparse
import importlib
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from paceline.train import carriers as grouped
from paceline.train import losses
from paceline.train.losses import TargetHidden, TargetTop

D, TOP = 256, 32
SIZES = {8192: 1024, 49152: 256}  # rows by vocabulary
Ways = tuple[Callable[[], Any], Callable[[], Any]]  # by hand, and the other


def outcomes(logits: Tensor, ids: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """As `losses._Outcomes`, for autograd to differentiate."""
    others = logits.scatter(1, ids, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat((logits.gather(1, ids), others), -1), logits.gather(1, tokens[:, None])[:, 0]


def attention(
    q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor, unseen: Tensor, hidden: Tensor, scale: float
) -> Tensor:
    """As `carriers._GroupAttention`, for autograd to differentiate."""
    far = (q.flatten(1, 2) @ k.mT).unflatten(1, q.shape[1:3]).masked_fill(unseen, -torch.inf)
    close = (q @ own_k.mT).masked_fill(hidden, -torch.inf)
    weights = (torch.cat((far, close), -1).float() * scale).softmax(-1).to(q.dtype)
    far, close = weights.split((k.shape[1], own_k.shape[2]), -1)
    return (far.flatten(1, 2) @ v).view_as(q) + close @ own_v


def batch(vocab: int) -> dict[str, Any]:
    """Rows, a head, tokens, and what a target says."""
    rows, draw = SIZES[vocab], torch.Generator().manual_seed(0)
    hidden, head, theirs, other = (torch.randn(n, D, generator=draw) * 0.2 for n in (rows, vocab) * 2)
    p, ids = (theirs @ other.t()).softmax(-1).topk(TOP)
    top = TargetTop(ids, torch.cat((p, 1 - p.sum(-1, keepdim=True)), -1).log())
    tokens = torch.randint(vocab, (rows,), generator=draw)
    inputs = hidden.requires_grad_(), head.requires_grad_()
    return {"inputs": inputs, "whole": TargetHidden(theirs, other), "top": top, "tokens": tokens}


def gradients(loss: Callable[..., Any], inputs: tuple[Tensor, ...], *rest: Any, **options: Any) -> tuple[Tensor, ...]:
    """Of a loss, or of the sum of what is not a scalar."""
    made = loss(*inputs, *rest, **options)
    return torch.autograd.grad((made[0] if isinstance(made, tuple) else made).sum(), inputs)


def top_loss(by_hand: bool, case: dict[str, Any]) -> Any:
    """The loss over likeliest tokens, from logits that are there."""
    kept = losses._Outcomes.apply
    losses._Outcomes.apply = kept if by_hand else outcomes  # type: ignore[method-assign]
    try:
        return gradients(losses.distilled, case["inputs"], case["top"], case["tokens"])
    finally:
        losses._Outcomes.apply = kept  # type: ignore[method-assign]


def attention_inputs(carriers: int, groups: int, keys: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """Of one document: H = 6 heads of 64, gamma = 4 streams."""
    draw = torch.Generator().manual_seed(1)
    shapes = ((carriers, groups, 64), (keys, 64), (keys, 64), (carriers, 4, 64), (carriers, 4, 64))
    inputs = tuple(torch.randn(6, *s, generator=draw).to(dtype).requires_grad_() for s in shapes)
    places = torch.arange(keys - carriers, keys)
    unseen = (torch.arange(keys) > places[:, None])[:, None]
    hidden = torch.ones(groups, 4, dtype=torch.bool).triu(1 + 4 - groups)
    return inputs, unseen, hidden, 64**-0.5


def subjects(before: ModuleType | None) -> Iterator[tuple[str, Ways]]:
    """What is timed, by name."""
    for vocab in SIZES:
        case = batch(vocab)
        yield f"distilled, 32 likeliest of {vocab:,}", (partial(top_loss, True, case), partial(top_loss, False, case))
        for name, rest, options in (
            ("cross_entropy", ("tokens",), {}),
            ("mixed", ("whole",), {}),
            ("mixed", ("whole",), {"omega": 1.0}),
            ("distilled", ("whole", "tokens"), {}),
        ):
            if before is not None:
                given = [case[part] for part in rest]
                old = before.TargetHidden(case["whole"].hidden, case["whole"].head)
                theirs = [old if part == "whole" else case[part] for part in rest]
                ways = (
                    partial(gradients, getattr(before, name), case["inputs"], *theirs, check=False, **options),
                    partial(gradients, getattr(losses, name), case["inputs"], *given, **options),
                )
                yield f"{name} {options or ''} of {vocab:,}", ways
    for dtype in (torch.float32, torch.bfloat16):
        for carriers, keys in ((64, 128), (256, 512), (512, 1024)):
            inputs, *rest = attention_inputs(carriers, 4, keys, dtype)
            by_hand, auto = grouped._GroupAttention.apply, attention
            name = f"attention of {carriers} x 4 streams over {keys} keys, {dtype}".replace("torch.", "")
            yield name, (partial(gradients, by_hand, inputs, *rest), partial(gradients, auto, inputs, *rest))


def compare(ways: Ways, rounds: int) -> tuple[list[float], list[float]]:
    """ms of each round, by hand and the other way."""
    torch.testing.assert_close(ways[0](), ways[1](), rtol=3e-2, atol=1e-2)
    taken: tuple[list[float], list[float]] = ([], [])
    for index in range(rounds):
        for way in (0, 1) if index % 2 else (1, 0):
            began = time.process_time()
            ways[way]()
            taken[way].append((time.process_time() - began) * 1e3)
    return taken


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """The median, and its 95% interval."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(1000))
    return statistics.median(ratios), medians[25], medians[974]


def before_of(folder: Path) -> ModuleType:
    """`paceline.train.losses` of another checkout, beside this one's."""
    package = ModuleType("before")
    package.__path__ = [str(folder / "src" / "paceline")]
    sys.modules["before"] = package
    return importlib.import_module("before.training.losses")


def main() -> None:
    """Time all subjects, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--before", type=Path, help="a checkout with all slopes by hand")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print("| subject | by hand, ms | other, ms | other over by hand |\n|:--|--:|--:|:--|")
    for name, ways in subjects(None if asked.before is None else before_of(asked.before)):
        hand, other = compare(ways, asked.rounds)
        middle, low, high = interval([b / a for a, b in zip(hand, other, strict=True)])
        figures = (
            f"{statistics.median(hand):.1f} | {statistics.median(other):.1f} | {middle:.2f} [{low:.2f}, {high:.2f}]"
        )
        print(f"| {name} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
