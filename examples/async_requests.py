"""Requests of many tasks share one engine: they are answered together as they arrive."""

from __future__ import annotations

import asyncio

from paceline import AsyncLLM, SamplingParams

PROMPTS = ["It was a dark night, and", "The best way to learn is", "def add(a, b):\n", "Once upon a time"]


async def ask(llm: AsyncLLM, prompt: str, delay_s: float) -> str:
    """One user: comes after ``delay_s`` seconds and reads the answer as it is written."""
    await asyncio.sleep(delay_s)
    text = ""
    async for chunk in llm.stream(prompt, SamplingParams(temperature=0.7, seed=3, max_tokens=32)):
        text += chunk.text
    return text


async def impatient(llm: AsyncLLM) -> None:
    """A user who leaves: the cancelled task's request ends, and the others go on."""
    task = asyncio.create_task(llm.generate("To be or not", SamplingParams(max_tokens=1500, ignore_eos=True)))
    await asyncio.sleep(0.05)
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        print("one left early")


async def main() -> None:
    async with AsyncLLM("paceline-small", drafter="draft_model:paceline-small-draft") as llm:
        users = [ask(llm, prompt, 0.02 * i) for i, prompt in enumerate(PROMPTS)]
        *answers, _ = await asyncio.gather(*users, impatient(llm))
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert answer
        print(f"{prompt!r} {answer!r}")


if __name__ == "__main__":
    asyncio.run(main())
