"""Text to ids and back in a process without torch.

The tokenizer is the engine's own, as the text of its ``tokenizer.json``, so ids cannot differ. Templates are rendered
by transformers' function, which needs no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from tokenizers import Tokenizer

from ..core.contents import as_read
from ..core.errors import ConfigError
from ..runtime.requests import Description
from .schemas import ChatRequest

# Arguments of `apply_chat_template` itself, and what it gives every template.
_TAKEN = {"self", "conversation", "messages", "tools", "documents", "chat_template", "tokenize", "padding"}
_TAKEN |= {"add_generation_prompt", "continue_final_message", "truncation", "max_length", "return_tensors"}
_TAKEN |= {"return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "sanitize_control_tokens"}


class ServedTexts:
    """The texts of what an engine serves.

    Args:
        described: what it serves.
        template: a chat template in place of the model's own.
    """

    def __init__(self, described: Description, template: str | None = None) -> None:
        self._templates, self._special = described.chat_templates, described.special_tokens
        if template is not None:
            self._templates = {"default": template}
        self._tokenizer: Any = None
        self.special: dict[str, int] = {}  # by their text, the special tokens
        if described.tokenizer is not None:
            self._tokenizer = Tokenizer.from_str(described.tokenizer)
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            added = self._tokenizer.get_added_tokens_decoder()
            self.special = {token.content: number for number, token in added.items() if token.special}

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Return the ids of a text.

        Raises:
            ConfigError: no tokenizer, or text that none can encode.
        """
        if self._tokenizer is None:
            raise ConfigError("a text prompt", "this model has no tokenizer", "give token ids")
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=special).ids)
        except Exception as error:  # tokenizers raise plain Exception
            raise ConfigError(
                "a text prompt", f"the tokenizer cannot encode it ({error})", "give other text"
            ) from error

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        """Return the text of ids; raises ConfigError without a tokenizer."""
        if self._tokenizer is None:
            raise ConfigError("the text of token ids", "this model has no tokenizer", "read the ids")
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special))

    def template(self, tools: bool = False) -> str:
        """Return the chat template in use; empty: there is none."""
        return self._templates.get("tool_use" if tools and "tool_use" in self._templates else "default", "")

    def conversation(self, body: ChatRequest, tools: Sequence[Mapping[str, Any]] | None = None) -> list[int]:
        """Return the ids of a conversation in the model's chat template.

        Raises:
            ConfigError: no template, one that refuses the messages, or variables that it does not read.
        """
        messages, template = [message.plain() for message in body.messages], self.template(bool(tools))
        if not template or self._tokenizer is None:
            raise ConfigError("a chat", "the model has no chat template", "use /v1/completions with a plain prompt")
        variables = body.chat_template_kwargs or {}
        for name in variables:
            if name in _TAKEN or not re.search(rf"\b{re.escape(name)}\b", template):
                wrong = "it is not a variable of the model's chat template"
                raise ConfigError(f"chat_template_kwargs={name!r}", wrong, "leave it out")
        render = partial(renderer(), chat_template=template)
        try:
            rendered: Any = render(
                conversations=[as_read(messages, lambda probe: render(conversations=[probe], **self._special)[0][0])],
                tools=tools,
                continue_final_message=body.continue_final_message,
                add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
                **{**self._special, **variables},
            )
        except Exception as error:  # templates are programs of the checkpoint and raise what they like
            wrong = f"the model's template refuses them ({error})"
            raise ConfigError("these messages", wrong, "check roles") from error
        return self.encode(str(rendered[0][0]), special=False)


def renderer() -> Callable[..., Any]:
    """Import transformers' ``render_jinja_template``, which takes half a second."""
    from transformers.utils.chat_template_utils import render_jinja_template

    return render_jinja_template
