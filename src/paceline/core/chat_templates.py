"""The variables that a caller may set for a chat template."""

from __future__ import annotations

import re
from collections.abc import Iterable

from .errors import ConfigError

# Arguments of `apply_chat_template` itself, and what it gives every template.
_TAKEN = {"self", "conversation", "messages", "tools", "documents", "chat_template", "tokenize", "padding"}
_TAKEN |= {"add_generation_prompt", "continue_final_message", "truncation", "max_length", "return_tensors"}
_TAKEN |= {"return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "sanitize_control_tokens"}


def check_variables(names: Iterable[str], template: str) -> None:
    """Refuse variables that the template does not read, or that a caller may not set.

    Raises:
        ConfigError: the first of them.
    """
    for name in names:
        if not isinstance(name, str) or name in _TAKEN or not re.search(rf"\b{re.escape(name)}\b", template):
            wrong = "it is not a variable of the model's chat template"
            raise ConfigError(f"chat_template_kwargs={name!r}", wrong, "leave it out")
