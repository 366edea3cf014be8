"""Text to ids and back in a process without torch.

The tokenizer is the engine's own, as the text of its ``tokenizer.json``, so ids cannot differ. Templates are rendered
by transformers' function, which needs no torch; it is imported where the first template is rendered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from ..core.errors import ConfigError
from ..distributed.requests import Description


class Texts:
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
        self.special: dict[str, int] = {}  # by their text, the tokens that are no text
        if described.tokenizer is not None:
            self._tokenizer = Tokenizer.from_str(described.tokenizer)
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            added = self._tokenizer.get_added_tokens_decoder()
            self.special = {token.content: number for number, token in added.items() if token.special}

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Ids of a text.

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
        """The text of ids.

        Raises:
            ConfigError: no tokenizer, or an id that is none.
        """
        if self._tokenizer is None:
            raise ConfigError("the text of token ids", "this model has no tokenizer", "read the ids")
        try:
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special))
        except OverflowError as error:
            raise ConfigError("the text of token ids", "an id is out of range", "give ids of this model") from error

    def piece(self, token: int) -> str:
        """A token as the vocabulary has it; empty: there is no such token."""
        return "" if self._tokenizer is None else self._tokenizer.id_to_token(token) or ""

    def template(self, tools: bool = False) -> str:
        """The chat template in use; empty: there is none."""
        return self._templates.get("tool_use" if tools and "tool_use" in self._templates else "default", "")

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        add_generation_prompt: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """A conversation in the model's chat template.

        Args:
            options: further names for the template, such as ``enable_thinking``.

        Raises:
            ConfigError: no template, or one that refuses the messages.
        """
        template = self.template(bool(tools))
        if not template or self._tokenizer is None:
            raise ConfigError("a chat", "the model has no chat template", "use /v1/completions with a plain prompt")
        from transformers.utils.chat_template_utils import render_jinja_template

        given = {**self._special, **(options or {})}
        try:
            made: Any = render_jinja_template(
                conversations=[[dict(message) for message in messages]],
                tools=None if tools is None else [dict(tool) for tool in tools],
                chat_template=template,
                continue_final_message=continue_final_message,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                **given,
            )
        except Exception as error:  # templates are programs of the checkpoint and raise what they like
            raise ConfigError(
                "these messages", f"the model's template refuses them ({error})", "check roles"
            ) from error
        return str(made[0][0])
