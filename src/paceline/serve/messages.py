"""Anthropic's ``POST /v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.responses import Response

from ..core.outputs import Chunk
from .answers import Event, Reply, add_shown
from .chat import begin_chat, prompt_of
from .generation import Answer, Server
from .http import MESSAGES as PATH
from .http import APIError, Strict, checked, json_response
from .schemas import ChatRequest, MessagePart, SpeculationChoice, ToolName
from .tools import CallReader, ToolUse


class TextBlock(MessagePart):
    """Text."""

    cache_control: Any = None
    citations: Any = None


class ToolUseBlock(Strict):
    """A call that the model made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: Any = None
    caller: Any = None


class ToolResultBlock(Strict):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None
    cache_control: Any = None


Block = Annotated[TextBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]


class Turn(Strict):
    """A message of a conversation."""

    role: Literal["user", "assistant"]
    content: str | list[Block]


class ToolSpec(Strict):
    """A tool that the model may call."""

    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: Any = None


class ToolChoice(Strict):
    """The choice of a tool: whether the model must call one, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Strict):
    """There is none."""

    type: Literal["disabled"]


class ThinkingEdit(Strict):
    """An edit that removes earlier thinking, which this server never has."""

    type: Literal["clear_thinking_20251015"]
    keep: Any = None


class ContextManagement(Strict):
    """The edits of a conversation that change nothing here."""

    edits: list[ThinkingEdit] | None = None


class OutputConfig(Strict):
    """The options of an answer's form that change nothing here."""

    effort: Any = None  # it changes nothing
    format: None = None


class CountRequest(Strict):
    """POST /v1/messages/count_tokens."""

    model: str | None = None
    messages: Annotated[list[Turn], Field(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[ToolSpec] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    context_management: ContextManagement | None = None
    output_config: OutputConfig | None = None
    speed: Literal["standard"] | None = None
    container: None = None
    # These change nothing.
    cache_control: Any = None
    inference_geo: Any = None
    diagnostics: Any = None
    user_profile_id: Any = None
    workspace_id: Any = None


class MessagesRequest(CountRequest):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: list[Annotated[str, Field(min_length=1)]] | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None
    seed: int | None = None
    speculation: bool | SpeculationChoice | None = None  # false: nothing is drafted
    # These change nothing.
    metadata: Any = None
    service_tier: Any = None


async def messages(server: Server, body: MessagesRequest) -> Response:
    """Answer a conversation, in Anthropic's form."""
    names = ("temperature", "top_p", "top_k", "seed", "speculation", "stream")
    options: dict[str, Any] = {name: getattr(body, name) for name in names if getattr(body, name) is not None}
    chat = _chat(body, {**options, "max_tokens": body.max_tokens, "stop": body.stop_sequences or None})
    return await MessageReply(*await begin_chat(server, chat), body).respond(body.stream)


async def count_tokens(server: Server, body: CountRequest) -> Response:
    """Return the number of tokens of a conversation."""
    return json_response({"input_tokens": len(prompt_of(server, _chat(body, {}))[0])})


def _chat(body: CountRequest, fields: dict[str, Any]) -> ChatRequest:
    """Return the same request in OpenAI's form."""
    chat_messages: list[dict[str, Any]] = []
    if body.system:
        chat_messages.append({"role": "system", "content": _text(body.system)})
    for turn in body.messages:
        chat_messages += _turn(turn)
    if body.tools is not None:
        names = {"name": "name", "description": "description", "parameters": "input_schema", "strict": "strict"}
        functions = [{name: getattr(tool, source_name) for name, source_name in names.items()} for tool in body.tools]
        fields["tools"] = [{"type": "function", "function": function} for function in functions]
    choice = body.tool_choice
    if choice is not None:
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        fields["tool_choice"] = {"any": "required"}.get(choice.type, choice.type)
        if choice.type == "tool":
            if choice.name is None:
                raise APIError(400, "tool_choice of type 'tool' must name a tool", "tool_choice")
            fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    last = body.messages[-1]
    if last.role == "assistant" and not (chat_messages[-1].get("tool_calls") or fields.get("tools")):
        fields["continue_final_message"] = True  # the beginning of the answer, as Anthropic has it
    return checked(ChatRequest, {"model": body.model, "messages": chat_messages, **fields})


def _turn(turn: Turn) -> list[dict[str, Any]]:
    """Return a turn as messages: results of tools become messages of their own."""
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    texts = [block for block in turn.content if isinstance(block, TextBlock)]
    calls = [
        {"id": b.id, "type": "function", "function": {"name": b.name, "arguments": json.dumps(b.input)}}
        for b in turn.content
        if isinstance(b, ToolUseBlock)
    ]
    results = [block for block in turn.content if isinstance(block, ToolResultBlock)]
    if (calls and turn.role == "user") or (results and turn.role == "assistant"):
        raise APIError(400, "tool_use is for the assistant, tool_result for the user", "messages")
    entries: list[dict[str, Any]] = [
        {"role": "tool", "tool_call_id": one.tool_use_id, "content": _text(one.content or "")} for one in results
    ]
    if texts or calls or not entries:
        entries.append({"role": turn.role, "content": _text(texts), "tool_calls": calls or None})
    return entries


def _text(content: str | list[TextBlock]) -> str | list[dict[str, str]]:
    return content if isinstance(content, str) else [{"type": "text", "text": block.text} for block in content]


class MessageReply(Reply):
    """An answer in Anthropic's form: blocks of text and of calls, which are written one after the other."""

    def __init__(self, answer: Answer, use: ToolUse | None, body: MessagesRequest) -> None:
        super().__init__([answer])
        self._reader, self._speculation = CallReader(use), body.speculation
        self._shown: dict[str, Any] = {}  # where its tokens come from, see `add_shown`
        self._stop: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}
        self._blocks: list[dict[str, Any]] = []  # the last one may be open

    def _usage(self) -> dict[str, int]:
        return {"input_tokens": self.answer.prompt_tokens, "output_tokens": self.answer.completion_tokens}

    def _message(self) -> dict[str, Any]:
        head = {"id": f"msg_{self.answer.name}", "type": "message", "role": "assistant", "model": self.answer.model}
        return {**head, "content": self._blocks, **self._stop, "usage": self._usage()}

    def begin(self) -> Iterator[Event]:
        """Yield the message without its content, see `Reply`."""
        yield {"type": "message_start", "message": self._message()}
        yield {"type": "ping"}

    def take(self, place: int, chunk: Chunk) -> Iterator[Event]:
        """Add a piece, see `Reply`."""
        for text in self._reader.read(chunk):
            if text is None:
                call = self._reader.calls[-1]
                name = call["id"].replace("call_", "toolu_", 1)
                yield from self._open({"type": "tool_use", "id": name, "name": call["name"], "input": {}})
                more = {"type": "input_json_delta", "partial_json": call["arguments"]}
            else:
                if not self._blocks or self._blocks[-1]["type"] != "text":
                    yield from self._open({"type": "text", "text": ""})
                self._blocks[-1]["text"] += text
                more = {"type": "text_delta", "text": text}
            yield {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": more}
        add_shown(self._shown, self._speculation, chunk)
        if chunk.finish_reason == "stop" and isinstance(chunk.stop_reason, str):
            self._stop = {"stop_reason": "stop_sequence", "stop_sequence": chunk.stop_reason}
        elif chunk.finish_reason is not None:
            short = chunk.finish_reason in ("length", "deadline")
            self._stop["stop_reason"] = "max_tokens" if short else "tool_use" if self._reader.calls else "end_turn"

    def _open(self, block: dict[str, Any]) -> Iterator[Event]:
        """Begin a block."""
        yield from self._close()
        self._blocks.append(block)
        yield {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": block}

    def _close(self) -> Iterator[Event]:
        """End the last block, if there is one."""
        if self._blocks:
            yield {"type": "content_block_stop", "index": len(self._blocks) - 1}

    def end(self) -> Iterator[Event]:
        """Yield the end of the message, see `Reply`."""
        yield from self._close()
        rest = {"stats": self.answer.stats} | self._shown
        yield {"type": "message_delta", "delta": self._stop, "usage": self._usage(), **rest}
        yield {"type": "message_stop"}

    def failed(self, error: APIError) -> Event:
        """Return the error in Anthropic's form."""
        return error.body(PATH)

    def whole(self) -> dict[str, Any]:
        """Return the message, see `Reply`."""
        uses = [block for block in self._blocks if block["type"] == "tool_use"]
        for block, call in zip(uses, self._reader.calls, strict=True):
            block["input"] = json.loads(call["arguments"])
        self._blocks = self._blocks or [{"type": "text", "text": ""}]
        return self._message() | {"stats": self.answer.stats} | self._shown
