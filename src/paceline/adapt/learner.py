"""The process that learns from served requests: ``python -m paceline.adapt.learner FOLDER PARENT``.

It has the lowest priority there is and ends with the serving process. Each round it puts the newest
requests aside, trains the drafter that serves on those before them, and checks both on what was put aside. One that is
better there is offered; the next round learns from what was put aside in this one.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ..core.errors import PacelineError
from ..model.hot import FILE as HOT
from ..train.data import SourceSpec
from ..train.job import finish, prepare
from ..weights.source import read_config, resolve_folder
from .learning import files
from .learning.store import ANSWER, PROMPT, RequestStore, ServedRequest
from .training import accepted_of, job_of

FRESH, MOST, ASIDE = 96, 512, 24  # requests that a round waits for, that it learns from, that it puts aside
STEPS_A_REQUEST = 0.25
BETTER = 1.01  # tokens a pass on what was put aside, over those of the one that serves
LOOK_S, FAULT_S = 1.0, 60.0
KEPT = 3  # drafters


def main(folder: Path, parent: int) -> None:
    """Learn until the parent is gone."""
    lowest_priority()
    os.umask(0o077)
    torch.set_num_threads(1)
    task = files.read(folder / files.TASK)
    store = RequestStore(folder / files.REQUESTS)
    seen = int(files.read(folder / files.SEEN, 0))
    while os.getppid() == parent:
        if len(store.numbers(after=seen)) < FRESH:
            time.sleep(LOOK_S)
            continue
        try:
            seen = learn(folder, task, store.read(store.numbers()[-MOST - ASIDE :]))
            files.write(folder / files.SEEN, seen)
        except (PacelineError, OSError) as error:  # a full disk, for one: the serving drafter continues
            say(error=str(error))
            time.sleep(FAULT_S)


def lowest_priority() -> None:
    """Run where nobody else wants to, and end with the parent."""
    with suppress(AttributeError, OSError):
        os.nice(19)
    with suppress(AttributeError, OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, of Linux
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's is for the parent


def serving(folder: Path, task: dict[str, Any]) -> tuple[int, Path]:
    """Return number and weights of the serving drafter: the last offer that was not refused, else the first one."""
    refused = files.read(folder / files.REFUSED, [])
    offered = int(files.read(folder / files.OFFER, {}).get("number", 0))
    good = [n for n in range(offered, 0, -1) if n not in refused and (folder / files.DRAFTERS / str(n)).is_dir()]
    return (good[0], folder / files.DRAFTERS / str(good[0])) if good else (0, Path(task["weights"]))


def learn(folder: Path, task: dict[str, Any], served: Sequence[ServedRequest]) -> int:
    """Run one round; return the number of the last request that it used."""
    learned, held = served[:-ASIDE][-MOST:], served[-ASIDE:]
    place = folder / "round"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(mode=0o700)
    try:
        for name, part in (("learned", learned), ("held", held)):
            lines = [json.dumps({"prompt_tokens": one.prompt, "completion_tokens": one.answer}) for one in part]
            (place / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        number, was, now, result = train(folder, task, place, len(learned))
        better = now == now and 1 + now >= BETTER * (1 + was)
        say(requests=len(learned), was=was, now=now, offered=better)
        if better:
            offer(folder, number, result, {"was": was, "is": now, "requests": len(learned)})
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return served[-ASIDE].number - 1  # requests that were set aside are learned from next time


def train(folder: Path, task: dict[str, Any], place: Path, requests: int) -> tuple[int, float, float, Path]:
    """Train on what is to be learned.

    Returns:
        The new drafter's number; accepted tokens of a draft, on what was put aside, of the one that serves and of the
        new one; the new one's folder.
    """
    number, weights = serving(folder, task)
    target = resolve_folder(task["target"], offline=True)
    shape = read_config(target)
    job = job_of(
        kind=task["kind"],
        target=target,
        shape=shape,
        sources=[SourceSpec(file=str(place / "learned.jsonl"))],
        held_out=[SourceSpec(file=str(place / "held.jsonl"), domain="served")],
        length=min(PROMPT + ANSWER, shape.max_position),
        cache=place / "states",
        init=weights,
        out=place / "training",
        steps=max(8, round(STEPS_A_REQUEST * requests)),
        seed=number,
        options={"start": "random", "hot_head": 0.0, **task["options"]},
        config={"final_ratio": 0.1, "learning_rate": task["rate"]},
    )
    trainer = prepare(job)
    was = accepted_of(trainer.evaluate()) or 0.0
    trainer.run()
    now = accepted_of(trainer.evaluate()) or 0.0
    last = max([number, *(int(p.name) for p in (folder / files.DRAFTERS).iterdir() if p.name.isdigit())])
    result = finish(job, trainer)
    if (weights / HOT).is_file():  # a round's few requests do not show which tokens are hot
        shutil.copyfile(weights / HOT, result / HOT)
    return last + 1, was, now, result


def offer(folder: Path, number: int, result: Path, check: dict[str, Any]) -> None:
    """Put a drafter where the server finds it."""
    place = folder / files.DRAFTERS
    fresh = place / f"{number}.part"
    shutil.rmtree(fresh, ignore_errors=True)
    shutil.copytree(result, fresh)
    fresh.replace(place / str(number))
    files.write(folder / files.OFFER, {"number": number, **check})
    numbers = sorted(int(p.name) for p in place.iterdir() if p.name.isdigit())
    for old in numbers[:-KEPT]:
        shutil.rmtree(place / str(old), ignore_errors=True)


def say(**facts: Any) -> None:
    """Write a line of the learner's log."""
    with suppress(OSError):
        print(json.dumps({"time": round(time.time()), **facts}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
