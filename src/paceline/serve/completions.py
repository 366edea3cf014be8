"""``POST /v1/completions``."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from starlette.responses import Response

from ..core.errors import ConfigError
from ..core.outputs import Chunk, Logprob
from .answers import LEAST_LOGPROB, Choice, Choices
from .generation import MOST_SAMPLES, Answer, Server, begin
from .http import APIError
from .schemas import CompletionRequest

DEFAULT_TOKENS = 16  # as OpenAI has it


async def completions(server: Server, body: CompletionRequest) -> Response:
    """Continue one prompt or several."""
    prompt: Any = body.prompt
    many = prompt if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list) else [prompt]
    if len(many) > MOST_SAMPLES:
        raise APIError(400, f"at most {MOST_SAMPLES} prompts", "prompt", "invalid_value")
    try:
        prompts = [server.texts.encode(one) if isinstance(one, str) else one for one in many]
    except ConfigError as error:
        raise APIError(400, str(error), "prompt", "invalid_value") from error
    params = {"max_tokens": DEFAULT_TOKENS, **body.sampling()}
    if body.logprobs is not None:
        params["logprobs"] = body.logprobs
        if body.echo:
            if body.stream:
                message = "echo with logprobs is not streamed: leave one of the three out"
                raise APIError(400, message, "logprobs", "unsupported_value")
            params["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    answers: list[Answer] = []
    with ExitStack() as refused:  # one that is refused ends those before it
        for ids in prompts:
            answers.append(await begin(server, body, ids, params))
            refused.callback(answers[-1].abort)
        reply = _CompletionReply(server, answers, body)
        refused.pop_all()
    return await reply.respond(body.stream)


class _CompletionReply(Choices):
    """The answers to all prompts."""

    def __init__(self, server: Server, answers: list[Answer], body: CompletionRequest) -> None:
        super().__init__(answers, body, "cmpl", ("text_completion", "text_completion"))
        texts = [server.texts.decode(a.submission.ids, skip_special=True) if body.echo else "" for a in answers]
        self._echoes = [text for text in texts for _ in range(self.samples)]  # of each choice
        self._logprobs, self._echo, self._texts = body.logprobs, body.echo, server.texts
        self._special = {*server.texts.special.values()}  # tokens without text
        # Characters so far, for ``text_offset``: with log-probabilities an echo's tokens come at the end.
        self._offsets = [*map(len, self._echoes)]
        self._begun: set[int] = set()  # choices of which something has come

    def _parts(self, place: int, chunk: Chunk) -> list[Choice]:
        """Return the choice of a piece, see `Choices`."""
        index = place * self.samples + chunk.index
        first = index not in self._begun
        self._begun.add(index)
        choice: Choice = {"index": index, "text": chunk.text, "logprobs": None, "finish_reason": None}
        choice["stop_reason"] = None
        if first:
            choice["text"] = self._echoes[index] + chunk.text
            choice |= self._prompt(place) if self.streams else {}
        self._add(choice, chunk)
        if self._logprobs is not None:
            rows = zip(chunk.logprobs or (), chunk.token_ids if chunk.logprobs else (), strict=True)
            choice["logprobs"] = self._columns(index, [(token, row) for row, token in rows])
        return [choice]

    def whole(self) -> dict[str, Any]:
        """Return the answer, with log-probabilities of an echo; nothing precedes its first token, which has none."""
        for index, choice in enumerate(self.choices):
            answer = self.answers[index // self.samples]
            choice |= self._prompt(index // self.samples)
            if self._echo and self._logprobs is not None:
                self._offsets[index] = 0
                rows = zip(answer.submission.ids, answer.prompt_logprobs or (), strict=True)
                texts = self._texts
                entries = [(token, row or {token: Logprob(0.0, 0, texts.decode([token]))}) for token, row in rows]
                columns = self._columns(index, entries)
                columns["token_logprobs"][0] = columns["top_logprobs"][0] = None
                choice["logprobs"] = {name: values + choice["logprobs"][name] for name, values in columns.items()}
        return super().whole()

    def _columns(self, index: int, rows: list[tuple[int, dict[int, Logprob]]]) -> dict[str, list[Any]]:
        """Return tokens with their log-probabilities and those of the likeliest."""
        columns: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for token, row in rows:
            entry = row[token]
            others = [one for one in row.values() if one is entry or one.rank <= (self._logprobs or 0)]
            columns["tokens"].append(entry.decoded or "")
            columns["token_logprobs"].append(max(entry.logprob, LEAST_LOGPROB))
            columns["top_logprobs"].append({one.decoded or "": max(one.logprob, LEAST_LOGPROB) for one in others})
            columns["text_offset"].append(self._offsets[index])
            if token not in self._special:
                self._offsets[index] += len(entry.decoded or "")
        return columns
