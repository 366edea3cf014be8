"""`AsyncLLM` and `LLM` hand a request's own options through to the engine, under the automatic budget."""

from __future__ import annotations

import asyncio

from paceline import LLM, AsyncLLM, SamplingParams, Speculation
from paceline.core.outputs import Chunk

PROMPT = {"prompt_token_ids": [0, 70, 300, 4000, 5, 6]}
WARM = SamplingParams(temperature=1, seed=3, max_tokens=24, ignore_eos=True)
OPTIONS = {"drafter": "hybrid:prediction+suffix", "kv_memory": "64MiB", "max_prompt_rows": "auto"}


def test_options_of_a_request_reach_the_engine():
    llm = LLM("paceline-small", kv_memory="64MiB")
    whole = llm.generate([PROMPT], WARM)[0].outputs[0].token_ids

    async def ask(engine: AsyncLLM, **options: object) -> list[Chunk]:
        return [chunk async for chunk in engine.stream(PROMPT, WARM, priority=-1, deadline_s=60.0, **options)]

    async def play() -> None:
        async with AsyncLLM("paceline-small", **OPTIONS) as engine:
            chunks = await ask(engine, resume_tokens=[whole[:9]])
            assert [token for chunk in chunks for token in chunk.token_ids] == whole[9:]
            for wish in (Speculation(prediction=whole), Speculation(enabled=False)):
                last = (await ask(engine, speculation=wish))[-1].output
                assert last is not None and last.outputs[0].token_ids == whole
                assert wish.enabled or not last.stats.drafted

    asyncio.run(play())
