"""The chunks of a streamed answer."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.errors import RequestError
from ..core.request import FinishReason, Logprob, Origin, RequestOutput
from ..core.sequence import Sequence
from ..engine.engine import Engine, LiveRequest


@dataclass(frozen=True, slots=True)
class Chunk:
    """What is new in a streamed answer."""

    index: int  # sample index
    text: str
    token_ids: list[int]
    origins: list[Origin]  # of each new token: drafted or target
    logprobs: list[dict[int, Logprob]] | None  # of each new token; None unless asked for
    finish_reason: FinishReason | None  # of this sample; None: it goes on
    request_id: str
    prompt_token_ids: tuple[int, ...]
    output: RequestOutput | None  # the whole answer, with the last chunk of all; None before

    @property
    def finished(self) -> bool:
        """Whether this is the sample's last chunk."""
        return self.finish_reason is not None


def raise_failed(output: RequestOutput | None) -> None:
    """Raises RequestError where a sample was ended by an error."""
    if output is not None and output.error is not None:
        raise RequestError(output.request_id, output.error, output)


class StreamedChunks:
    """How much of each sample was streamed already."""

    def __init__(self) -> None:
        self.output: RequestOutput | None = None  # once all was sent
        self._tokens: list[int] = []  # of each sample
        self._chars: list[int] = []
        self._open: set[int] = set()

    def new_chunks(self, engine: Engine, live: LiveRequest) -> list[Chunk]:
        """One chunk for every sample with something new; its cost does not depend on what was streamed before."""
        if not self._tokens:
            samples = len(live.sequences)
            self._tokens, self._chars = ([*part] for part in zip(*(live.said or [(0, 0)] * samples), strict=True))
            self._open = set(range(samples))
        fresh = [(i, live.sequences[i]) for i in sorted(self._open)]
        fresh = [(i, s) for i, s in fresh if s.finished or s.checker.num_tokens > self._tokens[i]]
        self._open -= {i for i, s in fresh if s.finished}
        if fresh and not self._open:
            self.output = engine.output(live)
        last = len(fresh) - 1
        return [self._chunk(live, i, s, self.output if at == last else None) for at, (i, s) in enumerate(fresh)]

    def _chunk(self, live: LiveRequest, index: int, sequence: Sequence, output: RequestOutput | None) -> Chunk:
        tokens, chars = self._tokens[index], self._chars[index]
        text = sequence.checker.stable_text(chars)
        self._tokens[index], self._chars[index] = sequence.checker.num_tokens, chars + len(text)
        return Chunk(
            index=index,
            text=text if tokens else live.text_prefix + text,
            token_ids=sequence.tokens[sequence.prompt_len + tokens :],
            origins=sequence.origins[tokens:],
            logprobs=sequence.logprobs[tokens:] if live.params.logprobs is not None else None,
            finish_reason=sequence.checker.finish_reason,
            request_id=live.id,
            prompt_token_ids=live.prompt_ids,
            output=output,
        )
