"""The Python entry on the embedded model: prompts in, text out, and every refusal."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kits.tiny import ids

from paceline import LLM, AsyncLLM, CapabilityError, ConfigError, SamplingParams, Speculation
from paceline.weights.source import resolve_folder

pytestmark = pytest.mark.timeout(120)

MODEL, DRAFT = "paceline-small", "paceline-small-draft"
PROMPT = "Once upon a time there was a little"
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
WARM = SamplingParams(temperature=1, seed=11, max_tokens=16, ignore_eos=True)
SMALL = {"max_model_len": 256, "max_sequences": 8}


@pytest.fixture(scope="module")
def llm() -> LLM:
    """Drafting and exact, so that answers may be compared with `==` however they were batched."""
    return LLM(MODEL, drafter=f"draft_model:{DRAFT},depth=3", budget=3, exact=True, **SMALL)


@pytest.fixture(scope="module")
def wide() -> LLM:
    """Plain, in float32, for log-probabilities."""
    return LLM(MODEL, dtype="float32", **SMALL)


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    for name in ("llm", "wide"):
        if name in request.fixturenames:
            engine = request.getfixturevalue(name).engine
            assert not engine.busy
            engine.pool.check_idle()
            engine.pool.check_integrity()


def test_text_ids_and_dicts_are_the_same_prompt(llm: LLM):
    token_ids = llm.tokenizer.encode(PROMPT)
    outputs = llm.generate([PROMPT, {"prompt": PROMPT}, {"prompt_token_ids": token_ids}], GREEDY)
    assert ids(outputs)[0] == ids(outputs)[1] == ids(outputs)[2]
    assert [output.prompt for output in outputs] == [PROMPT, PROMPT, None]
    first = outputs[0]
    assert first.finished and first.prompt_token_ids == token_ids
    assert first.outputs[0].finish_reason == "length" and len(first.outputs[0].token_ids) == 16
    assert (
        first.outputs[0].text
        == llm.tokenizer.decode([*token_ids, *first.outputs[0].token_ids])[len(llm.tokenizer.decode(token_ids)) :]
    )
    assert ids(llm.generate(PROMPT, GREEDY)) == [ids(outputs)[0]]


def test_parameters_are_one_for_all_or_one_a_prompt(llm: LLM):
    done: list[int] = []
    each = [replace(GREEDY, max_tokens=n) for n in (2, 5, 3)]
    outputs = llm.generate([PROMPT] * 3, each, progress=done.append)
    assert [len(i) for i in ids(outputs)] == [2, 5, 3] and done == [1, 2, 3]
    assert len(llm.generate(PROMPT)[0].outputs[0].token_ids) <= 16
    assert llm.generate([]) == []
    with pytest.raises(ConfigError, match="2 SamplingParams for 1 prompts"):
        llm.generate(PROMPT, [GREEDY, GREEDY])


def test_a_stream_is_the_answer_in_pieces(llm: LLM):
    params = replace(WARM, n=2)
    (whole,) = llm.generate(PROMPT, params)
    chunks = list(llm.stream(PROMPT, params))
    assert len(chunks) > params.n
    for sample in whole.outputs:
        own = [chunk for chunk in chunks if chunk.index == sample.index]
        assert "".join(chunk.text for chunk in own) == sample.text
        assert [t for chunk in own for t in chunk.token_ids] == sample.token_ids
        assert [o for chunk in own for o in chunk.origins] == chunks[-1].output.outputs[sample.index].origins
        assert [chunk.finished for chunk in own] == [False] * (len(own) - 1) + [True]
    assert chunks[-1].output.finished and chunks[-1].output.stats.emitted == 16 * params.n


def test_generate_amid_a_stream_takes_nothing_from_it(llm: LLM):
    (whole,) = llm.generate(PROMPT, GREEDY)
    stream = llm.stream(PROMPT, GREEDY)
    got = [next(stream)]
    llm.generate("The capital of", replace(GREEDY, max_tokens=40))  # its steps carry the stream to its end
    got += stream
    assert [t for chunk in got for t in chunk.token_ids] == whole.outputs[0].token_ids
    assert got[-1].finished and "".join(chunk.text for chunk in got) == whole.outputs[0].text


def test_an_abort_ends_a_stream_with_a_last_chunk(llm: LLM):
    stream = llm.stream(PROMPT, replace(GREEDY, max_tokens=200))
    first = next(stream)
    aborted = llm.abort(first.request_id)
    assert aborted is not None and aborted.outputs[0].finish_reason == "abort"
    rest = list(stream)
    assert [chunk.finished for chunk in rest] == [True]
    assert rest[0].output.outputs[0].finish_reason == "abort"
    assert llm.abort(first.request_id) is None


def test_stop_strings_cut_the_text_and_are_held_back(llm: LLM):
    (free,) = llm.generate(PROMPT, replace(GREEDY, max_tokens=32))
    text = free.outputs[0].text
    stop = text[20:29]  # begins and ends inside words
    params = replace(GREEDY, max_tokens=32, stop=[stop, "never said"])
    (output,) = llm.generate(PROMPT, params)
    assert output.outputs[0].text == text[: text.index(stop)]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)
    shown = ""
    for chunk in llm.stream(PROMPT, params):
        shown += chunk.text
        assert output.outputs[0].text.startswith(shown)  # never a character that has to be taken back
    assert shown == output.outputs[0].text
    (kept,) = llm.generate(PROMPT, replace(params, include_stop_str_in_output=True))
    assert kept.outputs[0].text == text[: text.index(stop) + len(stop)]


def test_chat_follows_the_template(llm: LLM):
    messages = [{"role": "user", "content": "Tell me a story."}]
    (output,) = llm.chat(messages, GREEDY)
    text = llm.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert output.prompt == text
    assert output.prompt_token_ids == llm.tokenizer.encode(text, add_special_tokens=False)
    assert output.prompt_token_ids.count(llm.tokenizer.bos_token_id) == 1
    chunks = list(llm.chat(messages, GREEDY, stream=True))
    assert "".join(chunk.text for chunk in chunks) == output.outputs[0].text


@pytest.fixture(scope="module")
def peer() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(resolve_folder(MODEL), dtype=torch.float32).eval()


@torch.no_grad()
def test_logprobs_are_those_of_transformers(wide: LLM, peer: Any):
    (output,) = wide.generate(PROMPT, replace(GREEDY, logprobs=3, prompt_logprobs=2))
    sample = output.outputs[0]
    sequence = [*output.prompt_token_ids, *sample.token_ids]
    expected = peer(torch.tensor([sequence])).logits[0].log_softmax(-1)  # [T, V]; row t is about token t + 1
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    assert sample.logprobs is not None and len(sample.logprobs) == 16
    rows = [*output.prompt_logprobs[1:], *sample.logprobs]
    assert len(rows) == len(sequence) - 1
    for place, row in enumerate(rows):
        wanted = 2 if place < len(output.prompt_token_ids) - 1 else 3
        assert row is not None and list(row)[0] == sequence[place + 1]
        assert {*row} >= {*expected[place].topk(wanted).indices.tolist()} and len(row) in (wanted, wanted + 1)
        for token, entry in row.items():
            assert entry.logprob == pytest.approx(expected[place, token].item(), abs=2e-4)
            assert entry.rank == 1 + int((expected[place] > expected[place, token]).sum())
    total = sum(row[token].logprob for row, token in zip(sample.logprobs, sample.token_ids, strict=True))
    assert sample.cumulative_logprob == pytest.approx(total)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("word " * 400, "prompt and output together have room for 256"),
        ({"prompt_token_ids": [8192]}, "prompt token id 8192"),
        ({"text": "x"}, "a prompt of type dict"),
    ],
    ids=["long", "big id", "wrong key"],
)
def test_one_bad_prompt_and_nothing_is_begun(llm: LLM, prompt: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        llm.generate([PROMPT, prompt], GREEDY)
    assert not llm.engine.busy


def test_parameters_that_do_not_fit_are_refused_for_all(llm: LLM):
    with pytest.raises(ConfigError, match="logit_bias"):
        llm.generate([PROMPT] * 2, [GREEDY, replace(GREEDY, logit_bias={9000: 1.0})])
    assert not llm.engine.busy


def swapped_draft(folder: Path, change: Callable[[dict[str, int]], None]) -> Path:
    """A copy of the embedded draft whose tokenizer numbers its pieces otherwise."""
    shutil.copytree(resolve_folder(DRAFT), folder)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    change(tokenizer["model"]["vocab"])
    file.write_text(json.dumps(tokenizer))
    return folder


def test_a_draft_with_another_tokenizer_is_refused_by_piece(tmp_path: Path):
    names: list[str] = []

    def swap(vocab: dict[str, int]) -> None:
        by_id = {i: piece for piece, i in vocab.items()}
        names.extend(by_id[i] for i in (300, 301))
        vocab[by_id[300]], vocab[by_id[301]] = 301, 300

    folder = swapped_draft(tmp_path / "swapped", swap)
    with pytest.raises(CapabilityError) as caught:
        LLM(MODEL, drafter=f"draft_model:{folder}", **SMALL)
    text = str(caught.value)
    assert "2 token ids mean different pieces" in text
    for name in names:
        assert repr(name) in text
    assert "id 300" in text and "id 301" in text


@pytest.fixture(scope="module")
def served() -> Iterator[AsyncLLM]:
    server = AsyncLLM(MODEL, drafter=f"draft_model:{DRAFT},depth=3", exact=True, **SMALL)
    yield server
    server.close()
    server.close()  # twice is once


PROMPTS = [PROMPT, "def add(a, b):", "The capital of", "1 2 3 4", "Dear friend", "Q:", "In the morning", "She said"]


def settled(server: AsyncLLM) -> bool:
    """Whether the engine's thread has nothing in flight any more, after all that was ordered."""
    server._thread.submit(server._llm.engine.settle).result()
    return not server._llm.engine.busy


def test_many_tasks_at_once_get_what_generate_gives(llm: LLM, served: AsyncLLM):
    async def ask() -> list[Any]:
        return await asyncio.gather(*(served.generate(p, WARM) for p in PROMPTS for _ in range(2)))

    outputs = asyncio.run(ask())
    assert ids(outputs) == ids(llm.generate([p for p in PROMPTS for _ in range(2)], WARM))
    assert all(output.finished for output in outputs)


def test_one_bad_request_fails_alone(llm: LLM, served: AsyncLLM):
    async def ask() -> list[Any]:
        bad = replace(GREEDY, logit_bias={9000: 1.0})
        jobs = [served.generate(PROMPT, GREEDY), served.generate(PROMPT, bad), served.generate("Q:", GREEDY)]
        return await asyncio.gather(*jobs, return_exceptions=True)

    first, error, third = asyncio.run(ask())
    assert isinstance(error, ConfigError) and "logit_bias" in str(error)
    assert ids([first, third]) == ids(llm.generate([PROMPT, "Q:"], GREEDY))


def test_cancelled_tasks_and_left_streams_free_the_engine(llm: LLM, served: AsyncLLM):
    endless = replace(GREEDY, max_tokens=None)

    async def ask() -> Any:
        task = asyncio.create_task(served.generate(PROMPT, endless))
        stream = served.stream("Q:", endless)
        await anext(stream)
        other = asyncio.create_task(served.generate("Dear friend", GREEDY))
        task.cancel()
        await stream.aclose()  # type: ignore[attr-defined]
        await asyncio.gather(task, return_exceptions=True)
        return await other

    assert ids([asyncio.run(ask())]) == ids(llm.generate("Dear friend", GREEDY))
    assert settled(served)


def test_a_loop_that_is_gone_does_not_stop_the_engine(llm: LLM, served: AsyncLLM):
    loop = asyncio.new_event_loop()
    stream = served.stream(PROMPT, replace(GREEDY, max_tokens=60))
    loop.run_until_complete(anext(stream))
    loop.close()  # without a word to the stream
    longer = replace(GREEDY, max_tokens=80)
    plain = Speculation(enabled=False)  # a pass a token, and so enough of them for the other request
    assert ids([asyncio.run(served.generate("Q:", longer, speculation=plain))]) == ids(llm.generate("Q:", longer))
    assert settled(served)


def test_closing_ends_what_is_in_flight_and_refuses_the_rest():
    async def ask() -> None:
        async with AsyncLLM(MODEL, **SMALL) as server:
            task = asyncio.create_task(server.generate(PROMPT, replace(GREEDY, max_tokens=None)))
            stream = server.stream("Q:", replace(GREEDY, max_tokens=None))
            await anext(stream)
        for answer in (task, anext(stream)):
            with pytest.raises(ConfigError, match="the AsyncLLM was closed"):
                while True:
                    await answer
                    answer = anext(stream)
        with pytest.raises(ConfigError, match="a request to a closed AsyncLLM"):
            await server.generate(PROMPT, GREEDY)
        assert not server._llm.engine.busy
        server._llm.engine.pool.check_idle()

    asyncio.run(ask())


def test_a_task_that_is_cancelled_while_it_submits_leaves_nothing():
    async def ask() -> None:
        async with AsyncLLM(MODEL, **SMALL) as server:
            for turns in range(4):
                task = asyncio.create_task(server.generate(PROMPT, replace(GREEDY, max_tokens=None)))
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            await server.generate(PROMPT, GREEDY)
            assert not server._llm.engine.live

    asyncio.run(ask())


def test_a_context_that_does_not_fit_is_refused_by_default(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("paceline.api.assembly.memory.free_bytes", lambda device: 2**24)
    with pytest.raises(ConfigError, match="the default kv_memory.*give max_model_len|Give max_model_len"):
        LLM("paceline-small")
    assert LLM("paceline-small", max_model_len=64, max_sequences=2).engine.pool.num_tokens >= 65


def test_echo_of_ids_is_their_text(llm: LLM):
    prompt = llm.tokenizer.encode(PROMPT)
    (plain,) = llm.generate({"prompt_token_ids": prompt}, GREEDY)
    (echoed,) = llm.generate({"prompt_token_ids": prompt}, replace(GREEDY, echo=True))
    assert echoed.outputs[0].text == PROMPT + plain.outputs[0].text
    chunks = [*llm.stream({"prompt_token_ids": prompt}, replace(GREEDY, echo=True, n=2))]
    assert ["".join(c.text for c in chunks if c.index == i) for i in (0, 1)] == [echoed.outputs[0].text] * 2
    (raw,) = llm.generate({"prompt_token_ids": prompt}, replace(GREEDY, echo=True, skip_special_tokens=False))
    assert raw.outputs[0].text.startswith("<|bos|>" + PROMPT)


def test_log_probabilities_carry_the_text_of_their_tokens(llm: LLM):
    (output,) = llm.generate(PROMPT, replace(GREEDY, logprobs=3, prompt_logprobs=1))
    (sample,) = output.outputs
    assert sample.logprobs is not None and output.prompt_logprobs is not None
    for token, row in zip(sample.token_ids, sample.logprobs, strict=True):
        assert row[token].decoded == llm.tokenizer.decode([token])
        assert all(entry.decoded for entry in row.values())
    prompt = output.prompt_token_ids
    pieces = [row[token].decoded or "" for token, row in zip(prompt, output.prompt_logprobs, strict=True) if row]
    assert "".join(pieces) == PROMPT
    chunks = [*llm.stream(PROMPT, replace(GREEDY, logprobs=3))]
    assert [row for chunk in chunks for row in chunk.logprobs or ()] == sample.logprobs


def test_a_stream_copies_nothing_that_it_has_sent(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    from paceline.core.request import GrowingText
    from paceline.engine.engine import Engine

    copies: list[str] = []
    for owner, name in ((Engine, "output"), (GrowingText, "whole")):
        original = getattr(owner, name)

        def counted(self: Any, *given: Any, name: str = name, original: Any = original) -> Any:
            copies.append(name)
            return original(self, *given)

        monkeypatch.setattr(owner, name, counted)
    chunks = [*llm.stream(PROMPT, replace(GREEDY, max_tokens=100, stop="never said"))]
    assert len(chunks) > 20 and sum(len(chunk.token_ids) for chunk in chunks) == 100
    assert copies.count("output") == 1 and copies.count("whole") <= 1  # for the last chunk
    assert [chunk.output is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
