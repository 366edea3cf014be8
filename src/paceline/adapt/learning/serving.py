"""The server's side of learning: keeps requests, runs the learner, and lets better drafters take over.

The learner is a process of the lowest priority. What it offers was checked on requests that it had not learned
from; it takes over between two steps, and the one before it returns where fewer of its tokens are accepted. Tokens of
answers are the target's in any case.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from threading import Event, Thread
from time import monotonic
from typing import Any

from ...core.errors import CapabilityError, ConfigError
from ...draft.base import Drafter
from ...draft.states.network import LAST
from ...draft.states.sessions import StateDrafter
from ...engine.engine import Engine
from ...engine.live import LiveRequest
from . import files
from .store import RequestStore

log = logging.getLogger(__name__)

LOOK_S = 0.1  # between two looks at engine, learner and offers
AGAIN_S, LONGEST_S = 20.0, 300.0  # between two starts of the learner, which may die: at first, and at most
WAITING = 256  # requests that have ended and are not written down yet; of more the oldest are left out
WINDOW = 64  # requests after which two drafters are compared at work
WORSE = 0.9  # of what was accepted before, below which the one before returns

Build = Callable[[str], Drafter]  # folder of weights -> the drafter, bound to the target


class Learning:
    """Learning next to an engine.

    Args:
        folder: of all that is kept; made with mode 0700 where it is missing.
        engine: whose requests are learned from.
        part: the drafter that is learned, as the engine runs it.
        build: makes another one of its kind.
        task: what the learner is to know: model, kind, weights.

    Raises:
        ConfigError: a folder that cannot be used.
    """

    def __init__(
        self,
        folder: Path,
        engine: Engine,
        part: StateDrafter,
        build: Build,
        task: dict[str, Any],
    ) -> None:
        self.folder, self.engine, self.part, self._build, self._task = folder, engine, part, build, task
        self._private()
        self.store = RequestStore(folder / files.REQUESTS)
        self.number, self.before, self.last_check = 0, 0, {}  # type: tuple[int, int, dict[str, Any]]
        self.kept = self.left_out = self.taken = self.returned = self.starts = 0
        self._ready: tuple[int, StateDrafter] | None = None
        self._good: dict[str, Any] | None = None  # the part as it was before the last one took over
        self._accepted: dict[int, deque[float]] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = Event()
        self._tried = 0
        self._to_keep: deque[tuple[list[int], list[int]]] = deque(maxlen=WAITING)
        self._thread = Thread(target=self._watch, name="paceline-learning", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        engine.on_leave, engine.between = self.ended, self.between

    def _private(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            (self.folder / files.DRAFTERS).mkdir(exist_ok=True, mode=0o700)
            task = files.read(self.folder / files.TASK, {})
            names = ("fingerprint", "kind")
            if task and any(task.get(name) != self._task[name] for name in names):
                wrong = f"it was learned in for another model ({task.get('model')}) or kind of drafter"
                raise ConfigError(f"learn={self.folder}", wrong, "name another folder")
            files.write(self.folder / files.TASK, self._task)
        except OSError as error:
            raise ConfigError(f"learn={self.folder}", f"it cannot be used ({error})", "name another folder") from error

    # -- in the engine's thread

    def ended(self, live: LiveRequest) -> None:
        """Store a request that has ended, and count how it was drafted for."""
        sequence, stats = live.sequences[0], live.sequences[0].stats
        if stats.passes and stats.drafted:
            lengths = self._accepted.setdefault(self.number, deque(maxlen=WINDOW))
            lengths.append(1 + stats.accepted / stats.passes)
        whole = sequence.checker.finish_reason in ("stop", "length")
        if not live.store or not whole or sequence.checker.num_tokens < 2 or live.application is not None:
            self.left_out += 1
            return
        self._to_keep.append((list(live.prompt_ids), sequence.output_ids))
        self.kept += 1

    def between(self) -> None:
        """Replace the drafter before a step by one that is ready, or by the one before."""
        if self._ready is not None:
            number, fresh = self._ready
            self._ready = None
            self._take(number, fresh)
        elif self._good is not None:
            old, new = self._accepted.get(self.before, ()), self._accepted.get(self.number, ())
            if len(new) == WINDOW and len(old) >= WINDOW // 2 and fmean(new) < WORSE * fmean(old):
                self._give_back()

    def _take(self, number: int, fresh: StateDrafter) -> None:
        """Replace the part by another drafter; running sequences are drafted for from their next states on."""
        self.part.release([s.key for live in self.engine.live.values() for s in live.sequences])
        self._good = dict(vars(self.part))
        self.before, self.number, self.taken = self.number, number, self.taken + 1
        _become(self.part, vars(fresh))
        self.engine.budget.reset_source(self.part.spec.name, self.last_check["is"])
        log.info("drafter %d takes over: %s", number, json.dumps(self.last_check))

    def _give_back(self) -> None:
        """Restore the previous drafter, which is learned on from."""
        assert self._good is not None
        refused = [*files.read(self.folder / files.REFUSED, []), self.number]
        log.warning("drafter %d is accepted less than the one before it, which returns", self.number)
        _become(self.part, self._good)
        self.engine.budget.reset_source(self.part.spec.name, fmean(self._accepted[self.before]) - 1)
        self.number, self._good, self.returned = self.before, None, self.returned + 1
        try:
            files.write(self.folder / files.REFUSED, refused)
        except OSError as error:
            log.warning("%s cannot be written: %s", files.REFUSED, error)

    # -- in a thread of its own

    def _watch(self) -> None:
        """Look after the learner while the engine runs."""
        again, pause = 0.0, AGAIN_S
        while not self._ended.wait(LOOK_S):
            now = monotonic()
            self._keep()
            if (self._process is None or self._process.poll() is not None) and now >= again:
                self._start()
                again, pause = now + pause, min(2 * pause, LONGEST_S)
            try:
                self._look()
            except Exception as error:  # a drafter that cannot be used: the serving one continues
                log.warning("an offer of the learner is refused: %s", error)
        self._keep()

    def _keep(self) -> None:
        """Write down the requests that have ended."""
        while self._to_keep:
            try:
                self.store.add(*self._to_keep.popleft())
            except OSError as error:
                log.warning("a request cannot be kept: %s", error)

    def _look(self) -> None:
        """Make a drafter of a new offer."""
        offer = files.read(self.folder / files.OFFER, {})
        number = int(offer.get("number", 0))
        if number <= max(self.number, self._tried) or number in files.read(self.folder / files.REFUSED, []):
            return
        self._tried = number
        fresh = self._build(str(self.folder / files.DRAFTERS / str(number)))
        if type(fresh) is not type(self.part) or fresh.spec != self.part.spec:
            raise CapabilityError(
                f"drafter {number}", "its kind differs from that of the serving drafter", "train it again"
            )
        self.last_check = {name: offer.get(name) for name in ("was", "is", "requests")}
        self._ready = number, fresh

    def _start(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        command = [sys.executable, "-m", "paceline.adapt.learner", str(self.folder), str(os.getpid())]
        try:
            handle = os.open(self.folder / files.LOG, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
            with os.fdopen(handle, "ab") as sink:
                self._process = subprocess.Popen(
                    command, env=environment, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True
                )
        except OSError as error:
            log.warning("the learner cannot be started: %s", error)
            return
        self.starts += 1

    def close(self) -> None:
        """End the learner; stored requests stay."""
        self._ended.set()
        self.engine.on_leave = self.engine.between = None
        self._thread.join()
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.kill()
            process.wait()
        atexit.unregister(self.close)

    def describe(self) -> dict[str, Any]:
        """Return the state, ready for JSON."""
        window = self._accepted.get(self.number, ())
        return {
            "state": "on: token ids of requests are kept, and the drafter learns from them when cores are idle",
            "requests_kept": self.kept,
            "requests_left_out": self.left_out,
            "drafter": self.number,
            "taken_over": self.taken,
            "returned": self.returned,
            "learner_starts": self.starts,
            "last_check": self.last_check,
            "tokens_a_pass": fmean(window) if window else None,
        }


def _become(part: Drafter, values: dict[str, Any]) -> None:
    """Give a drafter another one's weights and state; its owner draws from these from now on."""
    vars(part).clear()
    vars(part).update(values)


def learned_part(drafter: Drafter | None, what: str) -> StateDrafter:
    """Return the drafter, or the part of one, that can be learned.

    Raises:
        CapabilityError: none can.
    """
    parts = [] if drafter is None else drafter.parts or [drafter]
    head = next((part for part in parts if isinstance(part, StateDrafter)), None)
    if head is None:
        wrong = "the drafter has no head that learns from states"
        raise CapabilityError(
            what, wrong, "draft with eagle or lyanna, as paceline adapt makes them, or leave learn out"
        )
    if head.spec.taps != (LAST,):
        wrong = "the drafter reads other states of the target than its last one, which alone is kept"
        raise CapabilityError(what, wrong, "draft with an eagle or lyanna head of the last state, or leave learn out")
    return head
