"""Anthropic's ``POST /v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

import json
import time
from itertools import chain
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from .chat import asked
from .generation import Answer, Delta, Server, begin
from .http import MESSAGES as PATH
from .http import APIError, EventStream, Strict, Write, json_response, read, refusing, unless_gone
from .schemas import ChatMessage, ChatRequest, Function, FunctionName, NamedTool, SpeculationChoice, Tool, ToolName
from .tools import CallReader, ToolUse, tool_use


class TextBlock(Strict):
    """Text."""

    type: Literal["text"]
    text: str
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
    """What a call brought."""

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
    """Whether it must, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class CountRequest(Strict):
    """POST /v1/messages/count_tokens."""

    model: str | None = None
    messages: Annotated[list[Turn], Field(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[ToolSpec] | None = None
    tool_choice: ToolChoice | None = None


class MessagesRequest(CountRequest):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: list[str] | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None
    seed: int | None = None
    speculation: bool | SpeculationChoice | None = None  # false: nothing is drafted
    # These change nothing.
    metadata: Any = None
    service_tier: Any = None


def router(server: Server) -> APIRouter:
    """The endpoints."""
    made = APIRouter()

    @made.post("/v1/messages")
    async def messages(request: Request) -> Response:
        """Answer a conversation, in Anthropic's form."""
        body = await read(request, MessagesRequest, server.config.body_s)
        return await unless_gone(request.receive, _answer(server, body))

    @made.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request) -> Response:
        """The tokens of a conversation."""
        body = await read(request, CountRequest, server.config.body_s)
        chat = _chat(body, {})
        return json_response({"input_tokens": len(asked(server, chat, _tools(server, chat)).ids)})

    return made


@refusing()
def _chat(body: CountRequest, fields: dict[str, Any]) -> ChatRequest:
    """The same request in OpenAI's form."""
    told: list[ChatMessage] = []
    if body.system:
        text = body.system if isinstance(body.system, str) else "\n".join(block.text for block in body.system)
        told.append(ChatMessage(role="system", content=text))
    for turn in body.messages:
        told += _turn(turn)
    if body.tools is not None:
        fields["tools"] = [
            Tool(
                type="function",
                function=Function(
                    name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
                ),
            )
            for tool in body.tools
        ]
    choice = body.tool_choice
    if choice is not None:
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        fields["tool_choice"] = {"any": "required"}.get(choice.type, choice.type)
        if choice.type == "tool":
            if choice.name is None:
                raise APIError(400, "tool_choice of type tool names one", "tool_choice")
            fields["tool_choice"] = NamedTool(type="function", function=FunctionName(name=choice.name))
    last = body.messages[-1]
    if last.role == "assistant" and not (told[-1].tool_calls or fields.get("tools")):
        fields["continue_final_message"] = True  # the beginning of the answer, as Anthropic has it
    return ChatRequest.model_validate({"model": body.model, "messages": told, **fields})


def _turn(turn: Turn) -> list[ChatMessage]:
    """A turn as messages: results of tools have their own."""
    if isinstance(turn.content, str):
        return [ChatMessage(role=turn.role, content=turn.content)]
    texts = [block.text for block in turn.content if isinstance(block, TextBlock)]
    calls = [
        {"id": b.id, "type": "function", "function": {"name": b.name, "arguments": json.dumps(b.input)}}
        for b in turn.content
        if isinstance(b, ToolUseBlock)
    ]
    results = [block for block in turn.content if isinstance(block, ToolResultBlock)]
    if (calls and turn.role == "user") or (results and turn.role == "assistant"):
        raise APIError(400, "tool_use is the assistant's, tool_result the user's", "messages")
    found = [ChatMessage(role="tool", tool_call_id=one.tool_use_id, content=_result(one)) for one in results]
    if texts or calls or not found:
        found.append(ChatMessage(role=turn.role, content="\n".join(texts), tool_calls=calls or None))
    return found


def _result(block: ToolResultBlock) -> str:
    if isinstance(block.content, list):
        return "\n".join(part.text for part in block.content)
    return block.content or ""


def _tools(server: Server, chat: ChatRequest) -> ToolUse | None:
    return tool_use(chat, server.texts, server.config.tool_parser)


async def _answer(server: Server, body: MessagesRequest) -> Response:
    names = ("temperature", "top_p", "top_k", "seed", "speculation")
    given: dict[str, Any] = {name: getattr(body, name) for name in names if getattr(body, name) is not None}
    fields = {**given, "max_tokens": body.max_tokens, "stop": body.stop_sequences or None}
    chat = _chat(body, fields)
    use = _tools(server, chat)
    reply = _MessageReply(await begin(server, asked(server, chat, use)), body.model or server.model, use)
    if body.stream:
        return EventStream(reply.events, reply.abort)
    return json_response(await reply.whole())


class _MessageReply:
    """An answer in the form of this endpoint."""

    def __init__(self, answer: Answer, model: str, use: ToolUse | None) -> None:
        self._answer, self._model = answer, model
        self._reader = None if use is None else CallReader(use)
        self._id = f"msg_{answer.seed:x}{time.time_ns():x}"
        self._stop: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}
        self._open = -1  # the block that is being written

    def abort(self) -> None:
        """End the request."""
        self._answer.abort()

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        usage = {"input_tokens": self._answer.prompt_tokens, "output_tokens": self._answer.completion_tokens}
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self._model}
        return {**head, "content": content, **self._stop, "usage": usage}

    async def whole(self) -> dict[str, Any]:
        """Not streamed."""
        texts: list[str] = []

        def take(delta: Delta) -> None:
            texts.append(delta.text)
            if self._reader is not None:
                self._reader.read(delta)
            self._ended(delta)

        async with self._answer as answer:
            await answer.into(lambda deltas: [*map(take, deltas)])
        content = [{"type": "text", "text": "".join(texts)}]
        if self._reader is not None and self._reader.calls:
            content = [{"type": "text", "text": self._reader.content}] if self._reader.content else []
            content += [_block(call) for call in self._reader.calls]
        return self._message(content) | {"stats": self._answer.stats}

    def _ended(self, delta: Delta) -> None:
        if delta.finish_reason is None:
            return
        called = self._reader is not None and bool(self._reader.calls)
        reasons = {"length": "max_tokens", "deadline": "max_tokens"}
        self._stop["stop_reason"] = reasons.get(delta.finish_reason, "tool_use" if called else "end_turn")
        if delta.finish_reason == "stop" and isinstance(delta.stop_reason, str):
            self._stop = {"stop_reason": "stop_sequence", "stop_sequence": delta.stop_reason}

    async def events(self, write: Write) -> None:
        """Streamed."""
        try:
            async with self._answer as answer:
                write(_event("message_start", {"message": self._message([])}) + _event("ping", {}))
                await answer.into(lambda deltas: write(b"".join(chain.from_iterable(map(self._delta, deltas)))))
        except APIError as error:
            write(_event("error", error.body(PATH)))
            return
        end = b"" if self._open < 0 else _event("content_block_stop", {"index": self._open})
        usage = {"input_tokens": self._answer.prompt_tokens, "output_tokens": self._answer.completion_tokens}
        last = _event("message_delta", {"delta": self._stop, "usage": usage, "stats": self._answer.stats})
        write(end + last + _event("message_stop", {}))

    def _delta(self, delta: Delta) -> list[bytes]:
        parts: list[dict[str, Any]] = [{"content": delta.text}] if delta.text else []
        if self._reader is not None:
            parts = self._reader.read(delta)
        self._ended(delta)
        said: list[bytes] = []
        for part in parts:
            if "content" in part:
                said += self._begin({"type": "text", "text": ""}, self._text)
                self._text = True
                said.append(self._more({"type": "text_delta", "text": part["content"]}))
                continue
            [call] = part["tool_calls"]
            if "id" in call:
                block = {"type": "tool_use", "id": _id(call), "name": call["function"]["name"], "input": {}}
                said += self._begin(block, False)
                self._text = False
            else:
                more = {"type": "input_json_delta", "partial_json": call["function"]["arguments"]}
                said.append(self._more(more))
        return said

    _text = False  # whether the open block is text

    def _begin(self, block: dict[str, Any], goes_on: bool) -> list[bytes]:
        """A new block, unless the open one goes on."""
        if goes_on:
            return []
        end = [] if self._open < 0 else [_event("content_block_stop", {"index": self._open})]
        self._open += 1
        return [*end, _event("content_block_start", {"index": self._open, "content_block": block})]

    def _more(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", {"index": self._open, "delta": delta})


def _block(call: dict[str, Any]) -> dict[str, Any]:
    """A whole call; arguments that broke off are what could be read of them: none."""
    try:
        given = json.loads(call["function"]["arguments"] or "{}")
    except ValueError:
        given = {}
    return {"type": "tool_use", "id": _id(call), "name": call["function"]["name"], "input": given}


def _id(call: dict[str, Any]) -> str:
    return str(call["id"]).replace("call_", "toolu_", 1)


def _event(name: str, fields: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), to_json({"type": name, **fields}, inf_nan_mode="null"))
