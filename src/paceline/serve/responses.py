"""``POST /v1/responses``, stateless: nothing of an answer is kept here."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.responses import Response

from ..core.outputs import Chunk
from .answers import Event, Reply, add_shown
from .chat import begin_chat
from .generation import Answer, Server, usage
from .http import APIError, Strict, checked
from .schemas import ChatRequest, FunctionName, Ignored, JSONSchema, SpeculationChoice, ToolName
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
    """The result of a call."""

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
    """The form that the text must have."""

    type: Literal["text", "json_object", "json_schema"]
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class TextOptions(Strict):
    """Options of the text."""

    format: TextFormat | None = None
    verbosity: Any = None


class ResponsesRequest(Ignored):
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
        reply = _ResponseReply(*await begin_chat(server, _chat(body)), body)
    except APIError as error:
        name = (error.param or "").partition(".")[0]
        error.param = FIELDS.get(name, error.param)
        raise
    return await reply.respond(body.stream)


def _chat(body: ResponsesRequest) -> ChatRequest:
    """Return the same request as a chat."""
    turns: list[dict[str, Any]] = [] if body.instructions is None else [_message("system", body.instructions)]
    for item in [InputMessage(role="user", content=body.input)] if isinstance(body.input, str) else body.input:
        if isinstance(item, InputMessage):
            turns.append(_message(item.role, item.content))
        elif isinstance(item, FunctionOutput):
            turns.append(_message("tool", item.output) | {"tool_call_id": item.call_id})
        else:
            if not turns or "tool_calls" not in turns[-1]:
                turns.append({"role": "assistant", "tool_calls": []})
            function = {"name": item.name, "arguments": item.arguments}
            turns[-1]["tool_calls"].append({"id": item.call_id, "type": "function", "function": function})
    names = ("temperature", "top_p", "seed", "parallel_tool_calls", "speculation", "priority", "store", "stream")
    fields: dict[str, Any] = {name: value for name in names if (value := getattr(body, name)) is not None}
    if body.tools is not None:
        functions = [tool.model_dump(exclude={"type"}) for tool in body.tools]
        fields["tools"] = [{"type": "function", "function": function} for function in functions]
    choice = body.tool_choice
    if isinstance(choice, NamedFunction):
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    elif choice is not None:
        fields["tool_choice"] = choice
    if body.text is not None and (form := body.text.format) is not None:
        schema = {"name": form.name, "schema": form.schema_} if form.type == "json_schema" else None
        fields["response_format"] = {"type": form.type, "json_schema": schema}
    named = {"model": body.model, "messages": turns, "max_tokens": body.max_output_tokens}
    return checked(ChatRequest, named | fields)


def _message(role: str, content: str | list[ResponsePart]) -> dict[str, Any]:
    parts = content if isinstance(content, str) else [{"type": "text", "text": part.text} for part in content]
    return {"role": role, "content": parts}


class _ResponseReply(Reply):
    """An answer in the form of OpenAI's responses: items of output, which are written one after the other."""

    def __init__(self, answer: Answer, use: ToolUse | None, body: ResponsesRequest) -> None:
        super().__init__([answer])
        self._body, self._reader, self._created = body, CallReader(use), int(time.time())
        self._shown: dict[str, Any] = {}  # where its tokens come from, see `add_shown`
        self._items: list[dict[str, Any]] = []  # of output; the last one may be open
        self._status, self._number = "in_progress", -1  # of the last event

    def whole(self) -> dict[str, Any]:
        """Return the response as it is now."""
        body, counts = self._body, None
        choice, names = body.tool_choice or "auto", "instructions max_output_tokens metadata temperature top_p"
        if ended := self._status != "in_progress":
            used = usage([self.answer])
            counts = {
                "input_tokens": used["prompt_tokens"],
                "input_tokens_details": used["prompt_tokens_details"] | {"cache_write_tokens": 0},
                "output_tokens": used["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": used["total_tokens"],
            }
        return {
            **body.model_dump(by_alias=True, include={*names.split(), "truncation", "user"}),
            "id": f"resp_{self.answer.name}",
            "object": "response",
            "created_at": self._created,
            "status": self._status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if self._status == "incomplete" else None,
            "model": self.answer.model,
            "output": self._items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "text": {"format": {"type": "text"}} if body.text is None else body.text.model_dump(by_alias=True),
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.model_dump() for tool in body.tools or []],
            "usage": counts,
            **({"stats": self.answer.stats} | self._shown if ended else {}),
        }

    def _event(self, kind: str, **fields: Any) -> Event:
        self._number += 1
        return {"type": kind, "sequence_number": self._number, **fields}

    def _of_item(self, kind: str, **fields: Any) -> Event:
        """Return an event of the last item, or of its only part, which is text."""
        place: dict[str, Any] = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        if self._items[-1]["type"] == "message":
            place["content_index"] = 0
        return self._event(f"response.{kind}", **place, **fields)

    def begin(self) -> Iterator[Event]:
        """Yield the response without output, see `Reply`."""
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=self.whole())

    def take(self, place: int, chunk: Chunk) -> Iterator[Event]:
        """Add a piece, see `Reply`."""
        add_shown(self._shown, self._body.speculation, chunk)
        for text in self._reader.read(chunk):
            if text is not None:
                yield from self._write(text)
                continue
            call = self._reader.calls[-1]
            yield from self._open("function_call", "fc", {"call_id": call["id"], "name": call["name"], "arguments": ""})
            self._items[-1]["arguments"] = call["arguments"]
            yield self._of_item("function_call_arguments.delta", delta=call["arguments"])
        if chunk.finish_reason is not None:
            if not self._items:
                yield from self._write("")
            yield from self._close()
            self._status = "incomplete" if chunk.finish_reason in ("length", "deadline") else "completed"

    def _open(self, kind: str, prefix: str, fields: dict[str, Any]) -> Iterator[Event]:
        """Begin an item."""
        yield from self._close()
        name = f"{prefix}_{self.answer.name}_{len(self._items)}"
        self._items.append({"type": kind, "id": name, "status": "in_progress", **fields})
        yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=self._items[-1])

    def _write(self, text: str) -> Iterator[Event]:
        if not self._items or self._items[-1]["type"] != "message":
            yield from self._open("message", "msg", {"role": "assistant", "content": []})
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            self._items[-1]["content"] = [part]
            yield self._of_item("content_part.added", part=part)
        if text:
            self._items[-1]["content"][0]["text"] += text
            yield self._of_item("output_text.delta", delta=text, logprobs=[])

    def _close(self) -> Iterator[Event]:
        """End the open item."""
        if not self._items or self._items[-1]["status"] != "in_progress":
            return
        item = self._items[-1]
        item["status"] = "completed"
        if item["type"] == "message":
            [part] = item["content"]
            yield self._of_item("output_text.done", text=part["text"], logprobs=[])
            yield self._of_item("content_part.done", part=part)
        else:
            yield self._of_item("function_call_arguments.done", arguments=item["arguments"], name=item["name"])
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def end(self) -> Iterator[Event]:
        """Yield the whole response, see `Reply`."""
        yield self._event(f"response.{self._status}", response=self.whole())

    def failed(self, error: APIError) -> Event:
        """Return the error in the form of responses."""
        return self._event("error", code=error.code, message=error.message, param=error.param)
