"""Requests from many threads, from callbacks, from collectors and at the end of the program."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from kits.tiny import ids

from paceline import LLM, AsyncLLM, SamplingParams
from paceline.core.errors import RequestError
from paceline.engine.lock import FairLock

pytestmark = pytest.mark.timeout(120)  # what these tests guard against is waiting for ever
GREEDY = SamplingParams(temperature=0, max_tokens=16)
PROMPTS = ["The capital of France", "It was a dark", "def main(", "Question: Which team"]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("paceline-small", drafter="ngram", budget=4, max_model_len=512)


@pytest.fixture(autouse=True)
def idle(llm: LLM) -> Iterator[None]:
    yield
    assert not llm.engine.busy
    llm.engine.pool.check_integrity()
    llm.engine.pool.check_idle()


def test_a_callback_may_generate(llm: LLM):
    expected = ids(llm.generate(PROMPTS, GREEDY))
    inner: list[list[int]] = []
    outer = llm.generate(
        PROMPTS,
        [replace(GREEDY, max_tokens=4 + 4 * i) for i in range(4)],
        progress=lambda done: inner.extend(ids(llm.generate(PROMPTS[0], replace(GREEDY, max_tokens=40)))),
    )
    assert ids(outer) == [ids[: 4 + 4 * i] for i, ids in enumerate(expected)]
    assert len(inner) == 4 and all(ids[:16] == expected[0] for ids in inner)


def test_a_callback_that_fails_ends_its_own_call_alone(llm: LLM):
    stream = llm.stream(PROMPTS[1], GREEDY)
    first = next(stream)

    def fail(done: int) -> None:
        raise ValueError("from the callback")

    with pytest.raises(ValueError, match="from the callback"):
        llm.generate(PROMPTS, [GREEDY, *[replace(GREEDY, max_tokens=100)] * 3], progress=fail)
    rest = list(stream)
    assert [*first.token_ids, *(t for c in rest for t in c.token_ids)] == ids(llm.generate(PROMPTS[1], GREEDY))[0]


def test_threads_share_one_model(llm: LLM):
    wanted = [replace(GREEDY, max_tokens=10 + 7 * i) for i in range(4)]
    expected = ids(llm.generate(PROMPTS, wanted))

    def ask(index: int) -> list[int]:
        if index % 2:
            return [t for chunk in llm.stream(PROMPTS[index % 4], wanted[index % 4]) for t in chunk.token_ids]
        return ids(llm.generate([PROMPTS[index % 4]], wanted[index % 4]))[0]

    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(ask, range(24))) == [expected[i % 4] for i in range(24)]


def test_a_thread_may_abort_what_another_waits_for(llm: LLM):
    long = replace(GREEDY, max_tokens=400, ignore_eos=True)
    found: list[Any] = []
    worker = threading.Thread(target=lambda: found.extend(llm.generate(PROMPTS[:2], long)))
    worker.start()
    while len(llm.engine.live) < 2:
        time.sleep(0.001)
    for request_id in list(llm.engine.live):
        assert llm.abort(request_id) is not None
    worker.join(timeout=30)
    assert [output.outputs[0].finish_reason for output in found] == ["abort", "abort"]


def test_a_stream_may_be_collected_in_the_middle_of_a_step(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    step = llm.engine.round.step
    forgotten: list[Any] = [llm.stream(PROMPTS[0], replace(GREEDY, max_tokens=100))]
    next(forgotten[0])

    def collects(works: Any, rule: Any) -> Any:
        forgotten.clear()  # the generator is closed here
        gc.collect()
        return step(works, rule)

    monkeypatch.setattr(llm.engine.round, "step", collects)
    (output,) = llm.generate(PROMPTS[1], GREEDY)
    monkeypatch.undo()
    assert ids([output]) == ids(llm.generate(PROMPTS[1], GREEDY))


def test_the_lock_serves_in_order():
    lock, order, ready = FairLock(), [], []

    def wait(name: int) -> None:
        ready.append(name)
        with lock:
            order.append(name)

    with lock:
        threads = []
        for name in range(5):
            threads.append(threading.Thread(target=wait, args=(name,)))
            threads[-1].start()
            while len(lock._waiting) <= name:
                time.sleep(0.001)
        assert not lock.take_if_free()
    for thread in threads:
        thread.join()
    assert order == [0, 1, 2, 3, 4]
    assert lock.take_if_free()
    with pytest.raises(RuntimeError, match="within a step"), lock:
        pass
    lock.free_mine()
    lock.free_mine()  # nothing is held any more
    with lock:
        assert not lock.take_if_free()


class Signals:
    """Raises KeyboardInterrupt at the n-th place in the lock where the interpreter looks for signals: behind calls."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, frame: Any, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename != FairLock.__enter__.__code__.co_filename:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and frame.f_lasti >= 2 and _behind_a_call(frame.f_code, frame.f_lasti):
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt
        return self


@cache
def _behind_a_call(code: Any, offset: int) -> bool:
    import dis

    before = [i for i in dis.get_instructions(code) if i.offset < offset]
    return bool(before) and before[-1].opname in ("CALL", "RESUME", "CACHE")


@pytest.mark.parametrize("contended", [False, True])
def test_an_interrupt_in_the_lock_loses_nobody(contended: bool):
    """A thread is interrupted while it takes or gives the lock; another one that waits, or comes later, gets it."""
    for at in range(1, 40):
        lock, others = FairLock(), []

        def other(lock: FairLock = lock) -> None:
            with lock:
                time.sleep(0.0005)

        if contended:
            others = [threading.Thread(target=other, daemon=True) for _ in range(2)]
            for thread in others:
                thread.start()
        sys.settrace(Signals(at))
        try:
            with lock:
                pass
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        lock.free_mine()
        late = threading.Thread(target=other, daemon=True)
        late.start()
        for thread in (*others, late):
            thread.join(timeout=10)
            assert not thread.is_alive(), at
        with lock:
            pass


def failing(llm: LLM, monkeypatch: pytest.MonkeyPatch, prompt: str, after: int = 5) -> None:
    """Let the text of the answer to one prompt fail at a token."""
    texts = llm.engine._texts
    assert texts is not None
    make, bad = texts.stream, tuple(llm.tokenizer.encode(prompt))

    class Failing:
        sure = False

        def __init__(self, stream: Any) -> None:
            self.stream, self.left, self.end = stream, after, stream.end

        def push(self, token: int) -> str:
            self.left -= 1
            if self.left < 0:
                raise LookupError("no text for it")
            return str(self.stream.push(token))

    def stream(ids: Any, skip: bool) -> Any:
        return Failing(make(ids, skip)) if tuple(ids) == bad else make(ids, skip)

    monkeypatch.setattr(texts, "stream", stream)


def test_a_stream_raises_behind_its_last_chunk(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    failing(llm, monkeypatch, PROMPTS[2])
    got: list[int] = []
    with pytest.raises(RequestError, match="LookupError: no text for it") as raised:
        for chunk in llm.stream(PROMPTS[2], GREEDY):
            got += chunk.token_ids
    assert len(got) == 5 and raised.value.output.outputs[0].token_ids == got


def test_async_requests_hear_of_their_own_errors_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    expected = ids(llm.generate(PROMPTS, GREEDY))

    async def main() -> list[Any]:
        async with AsyncLLM("paceline-small", max_model_len=512) as model:
            failing(model._llm, monkeypatch, PROMPTS[2])
            return await asyncio.gather(*(model.generate(p, GREEDY) for p in PROMPTS), return_exceptions=True)

    outputs = asyncio.run(main())
    assert isinstance(outputs[2], RequestError) and "no text for it" in str(outputs[2])
    rest = [0, 1, 3]
    assert ids([outputs[i] for i in rest]) == [expected[i] for i in rest]


UNCLOSED = """
import asyncio, sys, threading
from paceline import AsyncLLM, SamplingParams

model = AsyncLLM("paceline-small", drafter="ngram", max_model_len=2048)
loop = asyncio.new_event_loop()

async def begin():
    stream = model.stream("It was a dark", SamplingParams(temperature=0, max_tokens=1900, ignore_eos=True))
    return stream, await stream.__anext__()

streams = [loop.run_until_complete(begin()) for _ in range(3)]
assert len(model._llm.engine.live) == 3
print("leaving", flush=True)
sys.exit(3)
"""


def test_the_program_may_end_with_requests_in_flight():
    done = subprocess.run([sys.executable, "-c", UNCLOSED], capture_output=True, text=True, timeout=100)
    assert done.stdout.strip() == "leaving" and done.returncode == 3, done.stderr
    assert "Fatal" not in done.stderr and "terminate" not in done.stderr
