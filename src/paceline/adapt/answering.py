"""Answer prompts with the model, and let it draw prompts of its own.

A model that was trained on dialogues, given the beginning of a user's turn, continues as a user would (Magpie,
Xu et al. 2024); a model of texts, given nothing, begins a text. Such prompts cost only time, belong to nobody, and are
about what the model was trained for: they are learned from in addition to the user's prompts, and never judged on.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..api.llm import LLM
from ..core.sampling import SamplingParams
from ..engine.tokens import chat_ids
from ..train.files import writing

# ids of prompts, and a seed of each -> ids of their answers
Answer = Callable[[Sequence[Sequence[int]], Sequence[int]], Sequence[Sequence[int]]]
PLACE = "\ue000"  # stands for a user's words in a template
DRAWN_TOKENS = 64  # most, of a prompt that the model draws
DRAWN_LEAST = 4


def answerer(llm: LLM, room: int, temperature: float, most: int | None = None) -> Answer:
    """Return a function that answers prompts for `write`.

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


def write(
    path: Path,
    prompts: Sequence[Sequence[int]],
    tokenizer: Any,
    answer: Answer,
    seed: int,
    batch: int,
    going: Callable[[], bool] = lambda: True,
) -> int:
    """Answer prompts into a JSONL file, and return how many it holds; those that it holds already are kept.

    Whole lines are written batch by batch, so that it can be continued after any stop.

    Args:
        prompts: token ids of each.
        answer: the target. A prompt's seed depends on the run's ``seed`` and its place in the file alone.
        batch: prompts handed over together: many more than are answered at a time, since the last ones wait for the
            longest answer.
        going: whether to answer another batch.

    Raises:
        ConfigError: the file cannot be written.
    """
    data = path.read_bytes() if path.is_file() else b""
    if rest := len(data) - data.rfind(b"\n") - 1:  # half a line, of a killed process
        os.truncate(path, len(data) - rest)
    done = data.count(b"\n")
    while done < len(prompts) and going():
        part = prompts[done : done + batch]
        marks = (f"{seed} {done + i}".encode() for i in range(len(part)))  # no two prompts share their noise
        seeds = [int.from_bytes(hashlib.sha256(one).digest()[:6], "little") for one in marks]
        lines = [answer_line(tokenizer, *pair) for pair in zip(part, answer(part, seeds), strict=True)]
        with writing(f"answers {path}", "free space there"), path.open("a", encoding="utf-8") as handle:
            handle.write("".join(lines))
        done += len(part)
    return done


def answer_line(tokenizer: Any, ids: Sequence[int], answer: Sequence[int]) -> str:
    """Return the line of one ``answer`` to the prompt ``ids``."""
    record = {
        "prompt": tokenizer.decode(list(ids)),
        "completion": tokenizer.decode(list(answer), skip_special_tokens=True),
        "prompt_tokens": list(ids),
        "completion_tokens": list(answer),
    }
    return json.dumps(record, ensure_ascii=False) + "\n"


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
