"""What the model answers, to given prompts and to prompts that it draws itself.

A model that was trained on dialogues, given the beginning of a user's turn, continues as a user would (Magpie,
Xu et al. 2024); a model of texts, given nothing, begins a text. Such prompts cost only time, belong to nobody, and are
about what the model was trained for: they are learned from in addition to the user's prompts, and never judged on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..api.llm import LLM
from ..core.sampling import SamplingParams
from ..engine.tokens import chat_ids
from ..train.answers import Answer, AnswerConfig, count_answers, write
from ..train.data import Encoder, SourceSpec
from .prompts import write_prompts

PLACE = "\ue000"  # stands for a user's words in a template
DRAWN_TOKENS = 64  # most, of a prompt that the model draws
DRAWN_LEAST = 4


class TimeUp(Exception):  # noqa: N818  (no error: an end)
    """No further answers are generated."""


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


def answer_file(
    llm: LLM,
    prompts: Path,
    out: Path,
    config: AnswerConfig,
    most: int,
    mark: str,
    going: Callable[[], bool],
    report: Callable[[int], None],
    batch: int = 64,
) -> int:
    """Answer the prompts of a file while there is time; existing answers are kept.

    Args:
        most: tokens of an answer.
        mark: fingerprint of the model.
        going: whether to generate more.
        report: called with the tokens of each batch.
        batch: prompts answered together.

    Returns:
        Answers in the file.
    """
    encoder, ask = Encoder(llm.tokenizer, config.piece), answerer(llm, config.piece, config.temperature, most)

    def answer(prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> Sequence[Sequence[int]]:
        if not going():
            raise TimeUp
        answers = ask(prompts, seeds)
        report(sum(map(len, answers)))
        return answers

    source = SourceSpec(file=str(prompts))
    try:
        return write(out, source, encoder, config, answer, mark, batch)
    except TimeUp:
        return count_answers(out, []) if out.is_file() else 0


def tokens_in(file: Path) -> tuple[int, int]:
    """Return the tokens of the answers of a file, and of prompts and answers together."""
    answered = both = 0
    if file.is_file():
        with file.open(encoding="utf-8") as lines:  # not splitlines: JSON strings may hold U+2028
            for line in lines:
                record = json.loads(line)
                answered += len(record["completion_tokens"])
                both += len(record["prompt_tokens"]) + len(record["completion_tokens"])
    return answered, both


# -- prompts that the model draws


def draw_prompts(llm: LLM, out: Path, count: int, seed: int, going: Callable[[], bool], batch: int = 64) -> int:
    """Write ``count`` prompts that the model draws, fewer where time is up, none twice. Existing prompts are kept.

    Returns:
        Prompts in the file; none is written before all are there.
    """
    if out.is_file():
        return sum(1 for _ in out.open(encoding="utf-8"))
    begin, ends, whole = _opening(llm)
    prompts: dict[tuple[int, ...], None] = {}
    drawn = 0
    how: dict[str, Any] = {"max_tokens": DRAWN_TOKENS, "temperature": 0.9, "top_p": 0.9, "stop_token_ids": ends}
    while len(prompts) < count and drawn < 3 * count and going():
        params = [SamplingParams(seed=seed + drawn + i, **how) for i in range(min(batch, count))]
        drawn += len(params)
        for output in llm.generate([{"prompt_token_ids": begin}] * len(params), params):
            ids = whole([i for i in output.outputs[0].token_ids if i not in ends])
            if len(output.outputs[0].token_ids) > DRAWN_LEAST:
                prompts.setdefault(tuple(ids))
    if prompts:
        write_prompts(out, list(prompts)[:count], llm.tokenizer)
    return min(len(prompts), count)


def _opening(llm: LLM) -> tuple[list[int], list[int], Callable[[list[int]], list[int]]]:
    """Return ids that precede a drawn prompt, ids that end it, and a function from its ids to a prompt."""
    tokenizer = llm.tokenizer
    eos = list(llm.engine.limits.eos_ids)
    if not getattr(tokenizer, "chat_template", None):
        start = [tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id]
        return start, eos, lambda ids: [*start, *ids]
    turn = [{"role": "user", "content": PLACE}]
    before, _, after = str(chat_ids(turn, tokenizer, "this model")[1]).partition(PLACE)
    begin = tokenizer(before, add_special_tokens=False)["input_ids"]
    behind = tokenizer(after, add_special_tokens=False)["input_ids"]
    return begin, [*dict.fromkeys([*behind[:1], *eos])], lambda ids: [*begin, *ids, *behind]
