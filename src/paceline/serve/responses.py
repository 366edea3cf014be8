"""``POST /v1/responses``, stateless: nothing of an answer is kept here."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.responses import Response

from .acceptance import add_shown
from .chat import begin_chat
from .generation import Answer, Delta, Server, usage
from .http import APIError, EventStream, Strict, Write, checked, event, json_response
from .schemas import ChatRequest, FunctionName, JSONSchema, SpeculationChoice, ToolName
from .tools import CallReader, ToolUse


class ResponsePart(Strict):
    """A part of a message: text."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Any = None
    logprobs: Any = None


class InputMessage(Strict):
    """A message, of a client or of an earlier answer."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[ResponsePart]
    id: str | None = None
    status: str | None = None
    phase: Any = None


class FunctionCall(Strict):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None


class FunctionOutput(Strict):
    """What a call brought."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[ResponsePart]
    id: str | None = None
    status: str | None = None


class FunctionTool(Strict):
    """A tool that the model may call."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(FunctionName):
    """The tool that it must call."""

    type: Literal["function"]


class TextFormat(JSONSchema):
    """What the text must be."""

    type: Literal["text", "json_object", "json_schema"]
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class TextOptions(Strict):
    """Of the text."""

    format: TextFormat | None = None
    verbosity: Any = None


class ResponsesRequest(Strict):
    """POST /v1/responses."""

    model: str | None = None
    input: str | Annotated[list[InputMessage | FunctionCall | FunctionOutput], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    text: TextOptions | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    seed: int | None = None
    priority: int = 0
    speculation: bool | SpeculationChoice | None = None  # false: nothing is drafted
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    truncation: Literal["disabled"] | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None  # there is no such reasoning
    # These change nothing.
    metadata: Any = None
    user: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
    max_tool_calls: Any = None  # of tools that OpenAI runs
    stream_options: Any = None
    reasoning: Any = None


FIELDS = {"messages": "input", "max_tokens": "max_output_tokens"}  # of chat, by their names here
FIELDS |= dict.fromkeys(("response_format", "structured_outputs"), "text.format")


async def responses(server: Server, body: ResponsesRequest) -> Response:
    """Answer a conversation, in the form of OpenAI's responses."""
    for name in ("store", "background", "previous_response_id", "conversation"):
        if getattr(body, name):
            message = f"{name}: this server keeps no answers; send the whole conversation"
            raise APIError(400, message, name, "unsupported")
    try:
        answer, use = await begin_chat(server, _chat(body))
    except APIError as error:
        name = (error.param or "").partition(".")[0]
        error.param = FIELDS.get(name, error.param)
        raise
    reply = _ResponseReply(answer, body, use)
    return EventStream(reply.events, answer.abort) if body.stream else json_response(await reply.whole())


def _chat(body: ResponsesRequest) -> ChatRequest:
    """The same request as a chat."""
    told: list[dict[str, Any]] = [] if body.instructions is None else [_message("system", body.instructions)]
    for item in [InputMessage(role="user", content=body.input)] if isinstance(body.input, str) else body.input:
        if isinstance(item, InputMessage):
            told.append(_message(item.role, item.content))
        elif isinstance(item, FunctionOutput):
            told.append(_message("tool", item.output) | {"tool_call_id": item.call_id})
        else:
            if not told or "tool_calls" not in told[-1]:
                told.append({"role": "assistant", "tool_calls": []})
            function = {"name": item.name, "arguments": item.arguments}
            told[-1]["tool_calls"].append({"id": item.call_id, "type": "function", "function": function})
    names = ("temperature", "top_p", "seed", "parallel_tool_calls", "speculation", "priority", "store", "stream")
    fields: dict[str, Any] = {name: given for name in names if (given := getattr(body, name)) is not None}
    if body.tools is not None:
        functions = [tool.model_dump(exclude={"type"}) for tool in body.tools]
        fields["tools"] = [{"type": "function", "function": function} for function in functions]
    choice = body.tool_choice
    if isinstance(choice, NamedFunction):
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    elif choice is not None:
        fields["tool_choice"] = choice
    if body.text is not None and (wanted := body.text.format) is not None:
        schema = {"name": wanted.name, "schema": wanted.schema_} if wanted.type == "json_schema" else None
        fields["response_format"] = {"type": wanted.type, "json_schema": schema}
    own = {"model": body.model, "messages": told, "max_tokens": body.max_output_tokens}
    return checked(ChatRequest, own | fields)


def _message(role: str, content: str | list[ResponsePart]) -> dict[str, Any]:
    parts = content if isinstance(content, str) else [{"type": "text", "text": part.text} for part in content]
    return {"role": role, "content": parts}


class _ResponseReply:
    """An answer in the form of this endpoint: items of output, which are written one after the other."""

    def __init__(self, answer: Answer, body: ResponsesRequest, use: ToolUse | None) -> None:
        self._answer, self._body, self._reader = answer, body, CallReader(use)
        self._created = int(time.time())
        self._shown: dict[str, Any] = {}  # where its tokens come from, see `add_shown`
        self._items: list[dict[str, Any]] = []  # of output; the last one may be open
        self._status = "in_progress"
        self._events: list[bytes] = []  # that are not written yet
        self._number = 0

    def _response(self) -> dict[str, Any]:
        body, ended = self._body, self._status != "in_progress"
        choice = body.tool_choice or "auto"
        fields = body.model_dump(
            by_alias=True,
            include={"instructions", "max_output_tokens", "metadata", "temperature", "top_p", "truncation", "user"},
        )
        counts = None
        if ended:
            said = usage([self._answer])
            counts = {
                "input_tokens": said["prompt_tokens"],
                "input_tokens_details": said["prompt_tokens_details"] | {"cache_write_tokens": 0},
                "output_tokens": said["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": said["total_tokens"],
            }
        return {
            **fields,
            "id": f"resp_{self._answer.name}",
            "object": "response",
            "created_at": self._created,
            "status": self._status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if self._status == "incomplete" else None,
            "model": self._answer.model,
            "output": self._items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "text": {"format": {"type": "text"}} if body.text is None else body.text.model_dump(by_alias=True),
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.model_dump() for tool in body.tools or []],
            "usage": counts,
            **(self._answer.ends() | self._shown if ended else {}),
        }

    async def whole(self) -> dict[str, Any]:
        """Not streamed."""
        async with self._answer as answer:
            await answer.into(lambda deltas: [*map(self._take, deltas)])
        return self._response()

    async def events(self, write: Write) -> None:
        """Streamed."""
        self._say("response.created", response=self._response())
        self._say("response.in_progress", response=self._response())

        def take(deltas: list[Delta]) -> None:
            for delta in deltas:
                self._take(delta)
            write(self._said())

        try:
            async with self._answer as answer:
                write(self._said())
                await answer.into(take)
        except APIError as error:
            self._say("error", code=error.code, message=error.message, param=error.param)
        else:
            self._say(f"response.{self._status}", response=self._response())
        write(self._said())

    def _said(self) -> bytes:
        events, self._events = b"".join(self._events), []
        return events

    def _say(self, kind: str, **fields: Any) -> None:
        told = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        self._events.append(event(told, kind))

    def _take(self, delta: Delta) -> None:
        add_shown(self._shown, self._body.speculation, delta)
        for part in self._reader.read(delta):
            if "content" in part:
                self._write(part["content"])
            else:
                self._call(part["tool_calls"][0])
        if delta.finish_reason is not None:
            if not self._items:
                self._write("")
            self._close()
            self._status = "incomplete" if delta.finish_reason in ("length", "deadline") else "completed"

    def _open(self, kind: str, prefix: str, **fields: Any) -> None:
        """Begin an item."""
        self._close()
        name = f"{prefix}_{self._answer.name}_{len(self._items)}"
        item = {"type": kind, "id": name, "status": "in_progress", **fields}
        self._items.append(item)
        self._say("response.output_item.added", output_index=len(self._items) - 1, item=item)

    def _at(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _write(self, text: str) -> None:
        if not self._items or self._items[-1]["type"] != "message":
            self._open("message", "msg", role="assistant", content=[])
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            self._items[-1]["content"] = [part]
            self._say("response.content_part.added", **self._at(), content_index=0, part=part)
        if text:
            self._items[-1]["content"][0]["text"] += text
            self._say("response.output_text.delta", **self._at(), content_index=0, delta=text, logprobs=[])

    def _call(self, call: dict[str, Any]) -> None:
        """A call begins, or its arguments go on."""
        function = call["function"]
        if "id" in call:
            self._open("function_call", "fc", call_id=call["id"], name=function["name"], arguments="")
        else:
            self._items[-1]["arguments"] += function["arguments"]
            self._say("response.function_call_arguments.delta", **self._at(), delta=function["arguments"])

    def _close(self) -> None:
        """End the open item."""
        if not self._items or self._items[-1]["status"] != "in_progress":
            return
        item = self._items[-1]
        item["status"] = "completed"
        if item["type"] == "message":
            [part] = item["content"]
            at = {**self._at(), "content_index": 0}
            self._say("response.output_text.done", **at, text=part["text"], logprobs=[])
            self._say("response.content_part.done", **at, part=part)
        else:
            fields = {"arguments": item["arguments"], "name": item["name"]}
            self._say("response.function_call_arguments.done", **self._at(), **fields)
        self._say("response.output_item.done", output_index=len(self._items) - 1, item=item)
