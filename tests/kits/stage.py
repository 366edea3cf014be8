"""The tiny target in stages that are elsewhere, in threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from threading import Thread
from types import SimpleNamespace
from typing import Any

import torch
import zmq
from kit.ticks import watch_ticks

from kits import ranks
from kits.tiny import TOY_TEXTS, tiny_config
from paceline.engine.base import RoundParts
from paceline.engine.budget import FixedBudget
from paceline.engine.engine import Engine, EngineLimits
from paceline.engine.scheduler import SchedulerConfig
from paceline.kv.pool import KVPool
from paceline.kv.store import KVStore
from paceline.model.decoder import Decoder
from paceline.model.stages import Stage, even_cuts
from paceline.papers.specpipe.config import PipelineConfig
from paceline.papers.specpipe.records import Tick
from paceline.runtime.handshake import Facts, Hello
from paceline.runtime.serving import Progress, serve
from paceline.runtime.stage_service import StageService
from paceline.runtime.stage_workers import StageWorkers
from paceline.runtime.wire import Line, connected, listening

LAYERS, TOKENS = 8, 512
CONFIG = tiny_config(num_layers=LAYERS)


def part(start: int, stop: int, dtype: str = "float64", compiled: bool = False) -> Decoder:
    """Layers of the tiny target alone, with the weights that they have in it; the last ones with embedding and head."""
    return ranks.made(None, CONFIG, dtype, compiled, layers=(start, stop))


def made(start: int, stop: int, slots: int, dtype: str = "float64", compiled: bool = False) -> StageService:
    """A service with a stage of the tiny target."""
    decoder = part(start, stop, dtype, compiled)
    store = KVStore(*decoder.cache_shape, slots, decoder.dtype, decoder.device)
    return StageService(Stage(decoder, 0, stop - start, store), Facts(weights="tiny", dtype=dtype))


class Stand:
    """A worker whose service is in a thread; it comes back ``rest`` looks after it was lost."""

    def __init__(self, name: str, make: Callable[[], Any], rest: int = 2, host: str = "") -> None:
        self.name, self.make, self.rest, self.host = name, make, rest, host
        self.spec = SimpleNamespace(name=name)
        self.faults: list[str] = []
        self.line: Line | None = None
        self.hello: Hello | None = None
        self.progress = Progress()
        self.service: Any = None
        self.ended: dict[Line, str] = {}  # ends of services that failed, and why
        self.starts, self.left, self.silent_s = 0, 0, 0.0
        self.poll()

    @property
    def busy_s(self) -> float:
        return self.progress.busy_s()

    def poll(self) -> bool:
        if self.line is not None and self.other in self.ended:
            self.failed(self.ended[self.other])
        if self.line is None:
            self.left -= 1
            if self.left < 0:
                self.start()
        return self.line is not None

    def start(self) -> None:
        socket, address = listening(zmq.DEALER, self.host)
        with torch.inference_mode(False):  # of the engine, whose step this may be: a process would know nothing of it
            made = self.service = self.make()
        progress = Progress()
        self.line, other = Line(socket), Line(connected(zmq.DEALER, address))
        self.progress, self.hello = progress, Hello(Facts(), 0, self.host, made.listen(self.host))
        other.send(self.hello)  # nothing is sent to it before it is connected
        self.line.receive()
        self.starts += 1

        def live() -> None:
            try:
                serve(made, other, progress)
            except Exception as error:
                self.ended[other] = f"failed: {type(error).__name__}: {error}"

        self.other = other
        Thread(target=live, name=self.name, daemon=True).start()

    def failed(self, why: str) -> None:
        if self.line is not None:
            self.line.close()
            self.line, self.left = None, self.rest
            self.faults.append(f"worker {self.name} {why}")

    def stop(self) -> None:
        if self.line is not None:
            self.line.close()


def split(stages: int) -> list[tuple[int, int]]:
    bounds = even_cuts(LAYERS, stages)
    return [*zip(bounds[:-1], bounds[1:], strict=True)]


def pool_of(decoder: Decoder, tokens: int = TOKENS, block_size: int = 16) -> KVPool:
    return KVPool(*decoder.cache_shape, tokens, decoder.dtype, decoder.device, block_size)


def engine_over(
    workers: Sequence[Any],
    drafter: Any,
    decoder: Decoder,
    pool: KVPool,
    max_batch_rows: int = 64,
    host: str = "",
    **options: Any,
) -> tuple[Engine, StageWorkers, list[Tick]]:
    """An engine whose pipeline round runs over workers and, last, ``decoder``; ``host``: as of `listening`."""
    config = PipelineConfig(stages=len(workers) + 1, **options)
    last = Stage(decoder, 0, decoder.num_layers, pool.tensors)
    stage_line = StageWorkers(workers, last, LAYERS, host)
    if drafter is not None:
        drafter.bind(decoder.info("tiny"), 64, pool.num_tokens, decoder.device)
    round_ = config.over(RoundParts(target=decoder, pool=pool, drafter=drafter), stage_line)
    ticks = watch_ticks(round_)
    limits = EngineLimits(vocab_size=CONFIG.vocab_size, max_model_len=CONFIG.max_position, eos_ids=CONFIG.eos_ids)
    scheduler = SchedulerConfig(max_sequences=64, max_batch_rows=max_batch_rows)
    budget = FixedBudget(8 if drafter is not None else 0, why="" if drafter is not None else "no drafter")
    return Engine(round_, pool, limits, scheduler, budget, TOY_TEXTS, {}), stage_line, ticks


def over_threads(
    stages: int, drafter: Any, dtype: str = "float64", compiled: bool = False, **parts: Any
) -> tuple[Engine, StageWorkers, list[Tick]]:
    """The same with a thread a stage."""
    *others, own = split(stages)
    decoder = part(*own, dtype, compiled)
    sizes = {name: parts.pop(name) for name in ("tokens", "block_size") if name in parts}
    pool = pool_of(decoder, **sizes)
    given = {"slots": pool.tensors.all_k.shape[2], "dtype": dtype, "compiled": compiled}
    host = parts.get("host", "")
    stands = [Stand(f"stage {i}", partial(made, a, b, **given), host=host) for i, (a, b) in enumerate(others)]
    return engine_over(stands, drafter, decoder, pool, **parts)
