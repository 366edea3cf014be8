"""The bodies of OpenAI's requests, with vLLM's additions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal, Self, get_type_hints

from pydantic import Field, create_model, model_validator

from ..core.errors import ConfigError
from ..core.grammar import Grammar
from ..core.params import SamplingParams
from .http import APIError, Strict


class StreamOptions(Strict):
    """The fields of a stream besides its text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class SpeculationChoice(Strict):
    """The choice of drafts for a request."""

    sources: Annotated[list[str], Field(min_length=1)] | None = None  # of those that the server was started with
    max_nodes: Annotated[int, Field(ge=1)] | None = None
    provenance: bool = False  # whether choices name the drafter of each token
    trace: bool = False  # whether they list what each step drafted and accepted


class JSONSchema(Strict):
    """The schema in OpenAI's ``response_format``."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | bool | None, Field(alias="schema")] = None
    strict: bool | None = None


def _with_values(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool call with its arguments parsed, as templates need them; clients send them back as text."""
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise APIError(400, "a tool call must name its function", "messages.tool_calls", "invalid_value")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            message = f"the arguments of {function['name'][:80]!r} are not valid JSON ({error})"
            raise APIError(400, message, "messages.tool_calls", "invalid_value") from None
    return {**call, "function": {**function, "arguments": arguments}}


class ResponseFormat(Strict):
    """OpenAI's."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None


class StructuredOutputs(Strict):
    """vLLM's; one of them."""

    json_: Annotated[str | dict[str, Any] | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: str | dict[str, Any] | None = None


_HINTS = get_type_hints(SamplingParams)
# Fields that mean what those of `SamplingParams` of the same names do; None: not given.
_FIELDS: dict[str, Any] = {
    spec.name: (
        Annotated[
            _HINTS[spec.name] | None,
            Field(ge=spec.metadata["minimum"] if _HINTS[spec.name] in (int, int | None) else None),
        ],
        None,
    )
    for spec in fields(SamplingParams)
    if spec.metadata.get("http", True)
}
SamplingFields: Any = create_model("SamplingFields", __base__=Strict, **_FIELDS)


class Ignored(Strict):
    """The fields of OpenAI's requests that change nothing here."""

    user: Any = None
    metadata: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None


class Sampling(SamplingFields, Ignored):
    """The options that all requests for generation share."""

    model: str | None = None
    return_token_ids: bool | None = None
    speculation: bool | SpeculationChoice | None = None  # false: nothing is drafted
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None  # false: a server that learns does not keep it

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise APIError(400, "stream_options needs stream: true", "stream_options", "invalid_value")
        if self.prompt_logprobs is not None and self.stream:
            message = "prompt_logprobs are not streamed: leave stream or them out"
            raise APIError(400, message, "prompt_logprobs", "invalid_value")
        return self

    def drafting(self) -> dict[str, Any]:
        """Return the fields of `Speculation` that were set."""
        if self.speculation is None or isinstance(self.speculation, bool):
            return {"enabled": False} if self.speculation is False else {}
        fields = self.speculation.model_dump(exclude_none=True, exclude={"provenance", "trace"})
        return fields | ({"trace": True} if self.shows() else {})

    def shows(self) -> Literal["", "origins", "steps"]:
        """Return the fields of `Submit.shows`."""
        if self.speculation is None or isinstance(self.speculation, bool):
            return ""
        return "steps" if self.speculation.trace else "origins" if self.speculation.provenance else ""

    def sampling(self) -> dict[str, Any]:
        """Return the fields of `SamplingParams` that were set."""
        options = {name: value for name in SamplingFields.model_fields if (value := getattr(self, name)) is not None}
        grammar = grammar_of(self.response_format, self.structured_outputs)
        return options | ({"grammar": grammar} if grammar is not None else {})


class MessagePart(Strict):
    """A part of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(Strict):
    """A message of a conversation; it may have the fields of an answer, which clients send back."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[MessagePart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None

    def plain(self) -> dict[str, Any]:
        """Return the message as templates read it, except for parts of its content: see `core.contents`."""
        content = [part.model_dump() for part in self.content] if isinstance(self.content, list) else self.content
        plain: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": content or ""}
        calls = None if self.tool_calls is None else [_with_values(call) for call in self.tool_calls]
        others = {"name": self.name, "tool_call_id": self.tool_call_id, "tool_calls": calls}
        others["reasoning_content"] = self.reasoning_content
        return plain | {name: value for name, value in others.items() if value is not None}


class Prediction(Strict):
    """OpenAI's predicted output: text that the answer is likely to repeat."""

    type: Literal["content"]
    content: str | list[MessagePart]

    @property
    def text(self) -> str:
        """Return the text."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class Function(Strict):
    """The description of a tool."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema; None: none
    strict: bool | None = None

    def schema_of_arguments(self) -> dict[str, Any]:
        """Return the schema of the object that holds the arguments."""
        return self.parameters or {"type": "object", "properties": {}, "additionalProperties": False}


class Tool(Strict):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


class FunctionName(Strict):
    """The name of a function."""

    name: str


class NamedTool(Strict):
    """The tool that the model must call."""

    type: Literal["function"]
    function: FunctionName


class ChatRequest(Sampling):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    prediction: Prediction | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None
    # These change nothing.
    reasoning_effort: Any = None
    verbosity: Any = None
    # These cannot be had.
    audio: None = None
    moderation: None = None
    web_search_options: None = None


class CompletionRequest(Sampling):
    """POST /v1/completions."""

    prompt: (
        str | list[int] | Annotated[list[str], Field(min_length=1)] | Annotated[list[list[int]], Field(min_length=1)]
    )
    echo: bool | None = None
    best_of: Literal[1] | None = None
    suffix: None = None
    logprobs: Annotated[int, Field(ge=0)] | None = None


def grammar_of(form: ResponseFormat | None, structured: StructuredOutputs | None) -> dict[str, str] | None:
    """Return the fields of the `Grammar` that a request names; None: it names none.

    Raises:
        APIError: none that can be read, or two at once.
    """
    sources: list[tuple[str, str, Any]] = []  # where it stands, its kind, its text
    if form is not None and form.type != "text":
        schema = None if form.json_schema is None else form.json_schema.schema_
        if form.type == "json_schema" and schema is None:
            message = "the format 'json_schema' needs a schema: give one"
            raise APIError(400, message, "response_format.json_schema", "invalid_value")
        sources.append(("response_format", form.type, "" if form.type == "json_object" else schema))
    if structured is not None:
        texts = {
            "json_schema": structured.json_,
            "regex": structured.regex,
            "choice": structured.choice,
            "lark": structured.grammar,
            "structural_tag": structured.structural_tag,
            "json_object": "" if structured.json_object else None,
        }
        sources += [("structured_outputs", kind, text) for kind, text in texts.items() if text is not None]
    if len(sources) > 1:
        both = " and ".join(f"{place} ({kind})" for place, kind, _ in sources)
        raise APIError(400, f"two grammars at once: {both}; give one", sources[1][0], "invalid_value")
    if not sources:
        return None
    [(place, kind, text)] = sources
    fields = {"kind": kind, "text": text if isinstance(text, str) else json.dumps(text)}
    try:
        Grammar.read(fields)
    except ConfigError as error:
        raise APIError(400, str(error), place, "invalid_value") from None
    return fields
