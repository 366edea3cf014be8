"""What `LLM` and `AsyncLLM` share: a request before submission, and the chunks of its answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .core.errors import RequestError
from .core.request import FinishReason, Logprob, Origin, RequestOutput, SequenceState
from .core.sampling import SamplingParams
from .core.speculation import Speculation
from .engine.engine import Engine, LiveRequest


@dataclass(frozen=True, slots=True)
class Job:
    """One request that is about to be submitted."""

    ids: list[int]
    text: str | None  # of the prompt, where text was given
    params: SamplingParams
    application: str | None
    said: Sequence[Sequence[int]] = ()  # this and what follows: see `Engine.submit`
    priority: int = 0
    deadline_s: float | None = None
    speculation: Speculation | None = None

    def submit(self, engine: Engine, on_end: Callable[[LiveRequest], None] | None = None) -> LiveRequest:
        """Queue it."""
        request_id = engine.submit(
            self.ids,
            self.params,
            prompt=self.text,
            application=self.application,
            on_end=on_end,
            said=self.said,
            priority=self.priority,
            deadline_s=self.deadline_s,
            speculation=self.speculation,
        )
        return engine.live[request_id]


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


class Sent:
    """How much of each sample was streamed already."""

    def __init__(self, samples: int) -> None:
        self.output: RequestOutput | None = None  # once all was sent
        self._tokens = [0] * samples
        self._chars = [0] * samples
        self._open = set(range(samples))
        self._begun = False

    def news(self, engine: Engine, live: LiveRequest) -> list[Chunk]:
        """One chunk for every sample with something new; its cost does not depend on what was streamed before."""
        if live.said and not self._begun:
            self._tokens, self._chars = ([*part] for part in zip(*live.said, strict=True))
        self._begun = True
        fresh = [(i, live.sequences[i].state) for i in sorted(self._open)]
        fresh = [(i, state) for i, state in fresh if state.finished or len(state.token_ids) > self._tokens[i]]
        self._open -= {i for i, state in fresh if state.finished}
        if fresh and not self._open:
            self.output = engine.output(live)
        last = len(fresh) - 1
        return [self._chunk(live, i, state, self.output if at == last else None) for at, (i, state) in enumerate(fresh)]

    def _chunk(self, live: LiveRequest, index: int, state: SequenceState, output: RequestOutput | None) -> Chunk:
        tokens, chars = self._tokens[index], self._chars[index]
        text = state.checker.stable_text(chars)
        self._tokens[index], self._chars[index] = len(state.token_ids), chars + len(text)
        return Chunk(
            index=index,
            text=text if tokens else live.text_prefix + text,
            token_ids=state.token_ids[tokens:],
            origins=state.origins[tokens:],
            logprobs=state.logprobs[tokens:] if live.request.params.logprobs is not None else None,
            finish_reason=state.checker.finish_reason,
            request_id=live.request.id,
            prompt_token_ids=live.request.prompt_ids,
            output=output,
        )
