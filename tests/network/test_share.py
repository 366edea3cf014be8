"""One target under several engines, each in a thread of its own: `LLM(share=...)`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from kits.native import needs_kernels
from kits.tiny import assemble, run, tiny_config, tiny_decoder

from paceline import SamplingParams
from paceline.engine.engine import Engine
from paceline.kernels import layers as compiled_layers
from paceline.kernels.linear import NativeAdapters
from paceline.model.adapters import AdapterConfig, LowRank, linear_shapes
from paceline.model.decoder import Decoder
from paceline.model.rope import RopeTable

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
CONFIG = tiny_config(head_dim=16, max_position=4096)
# Several growths of the table, which holds blocks of 1,024 positions; the middle one ends just behind a block.
LENGTHS = (1100, 2046, 3300)
KERNELS = [pytest.param(True, marks=needs_kernels, id="compiled"), pytest.param(False, id="torch")]


def together(*works: Callable[[], Any]) -> list[Any]:
    """What each of them returns; they run at once, in threads that start together."""
    gate = threading.Barrier(len(works))
    found: list[Any] = [None] * len(works)
    errors: list[BaseException] = []

    def work(index: int) -> None:
        try:
            gate.wait()
            found[index] = works[index]()
        except BaseException as error:  # shown by the caller: a thread's own would be lost
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return found


@pytest.fixture
def slow_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of the table takes a while: threads that grow it at once do so in each other's middle."""
    block = RopeTable._block

    def slow(table: RopeTable, start: int) -> Any:
        time.sleep(0.02)
        return block(table, start)

    monkeypatch.setattr(RopeTable, "_block", slow)


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(0, 80, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def new_decoder(compiled: bool) -> Decoder:
    return tiny_decoder(CONFIG, dtype=torch.float32, compiled=compiled)


def new_engine(decoder: Decoder, named: Sequence[Any] = ()) -> Engine:
    return assemble(decoder=decoder, kv_tokens=8192, max_model_len=4096, applications=named)


def answers(engine: Engine, seed: int, names: Sequence[str | None] | None = None) -> list[list[int]]:
    """Of one prompt of each length, one after the other."""
    return [
        run(engine, [(prompt(length, seed + i), GREEDY)], names)[0].outputs[0].token_ids
        for i, length in enumerate(LENGTHS)
    ]


@pytest.mark.usefixtures("slow_growth")
@pytest.mark.parametrize("compiled", KERNELS)
def test_engines_over_one_target_answer_as_one_alone(compiled: bool) -> None:
    wanted = [answers(new_engine(new_decoder(compiled)), seed) for seed in (10, 20)]
    assert wanted[0] != wanted[1]
    decoder = new_decoder(compiled)  # its table starts empty
    engines = [new_engine(decoder) for _ in range(2)]
    assert together(*(partial(answers, e, s) for e, s in zip(engines, (10, 20), strict=True))) == wanted
    assert [answers(e, s) for e, s in zip(engines, (10, 20), strict=True)] == wanted, "nothing is left behind"


@needs_kernels
def test_adapters_are_packed_once_however_many_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second set in place of the first would free what another thread's pass reads."""

    class Slow(NativeAdapters):
        def __init__(self, *args: Any) -> None:
            time.sleep(0.05)
            super().__init__(*args)

    monkeypatch.setattr(compiled_layers, "NativeAdapters", Slow)
    decoder = new_decoder(True)
    stack: Any = decoder.stack
    adapter = LowRank(AdapterConfig(layers=(0, 1)), linear_shapes(CONFIG)).start()
    found = together(*[lambda: stack.adapters(adapter)] * 4)
    assert all(packed is found[0] for packed in found) and stack.adapters(adapter) is found[0]
