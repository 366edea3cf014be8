"""Answer prompts with the model, and let it draw prompts of its own.

A model that was trained on dialogues, given the beginning of a user's turn, continues as a user would (Magpie,
Xu et al. 2024); a model of texts, given nothing, begins a text. Such prompts cost only time, belong to nobody, and are
about what the model was trained for: they are learned from in addition to the user's prompts, and never judged on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..api.llm import LLM
from ..core.sampling import SamplingParams
from ..engine.tokens import chat_ids
from ..train.answers import Answer

PLACE = "\ue000"  # stands for a user's words in a template
DRAWN_TOKENS = 64  # most, of a prompt that the model draws
DRAWN_LEAST = 4


def answerer(llm: LLM, room: int, temperature: float, most: int | None = None) -> Answer:
    """Return a function that answers prompts for `train.answers.write`.

    Args:
        room: most tokens of prompt and answer together.
        temperature: 0 is greedy.
        most: tokens of an answer; None: as many as there is room for.
    """

    def answer(prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[list[int]]:
        rooms = [max(1, min(room - len(ids), most or room)) for ids in prompts]
        params = [
            SamplingParams(max_tokens=room_left, temperature=temperature, seed=prompt_seed if temperature else None)
            for room_left, prompt_seed in zip(rooms, seeds, strict=True)
        ]
        outputs = llm.generate([{"prompt_token_ids": list(ids)} for ids in prompts], params)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return answer


def tokens_in(file: Path) -> tuple[int, int]:
    """Return the tokens of the answers of a file, and of prompts and answers together."""
    lines = file.read_text("utf-8").split("\n")[:-1] if file.is_file() else []  # JSON strings may hold U+2028
    counts = [(len(record["prompt_tokens"]), len(record["completion_tokens"])) for record in map(json.loads, lines)]
    answered = sum(answer for _, answer in counts)
    return answered, answered + sum(prompt for prompt, _ in counts)


def draw_prompts(llm: LLM, count: int, seed: int) -> list[list[int]]:
    """Return ``count`` prompts that the model draws, fewer where some are empty or equal."""
    tokenizer, ends = llm.tokenizer, list(llm.engine.limits.eos_ids)
    if getattr(tokenizer, "chat_template", None):
        turn = [{"role": "user", "content": PLACE}]
        before, _, after = str(chat_ids(turn, tokenizer, "this model")[1]).partition(PLACE)
        begin, end = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (before, after))
        ends += [token for token in end[:1] if token not in ends]
    else:
        begin, end = [tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id], []
    how: dict[str, Any] = {"max_tokens": DRAWN_TOKENS, "temperature": 0.9, "top_p": 0.9, "stop_token_ids": ends}
    params = [SamplingParams(seed=seed + i, **how) for i in range(count)]
    outputs = llm.generate([{"prompt_token_ids": begin}] * count, params)
    drawn = dict.fromkeys(tuple(output.outputs[0].token_ids) for output in outputs)
    return [[*begin, *(i for i in ids if i not in ends), *end] for ids in drawn if len(ids) > DRAWN_LEAST]
