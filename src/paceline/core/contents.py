"""The content of a message as a chat template reads it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

_PROBE = "whether-parts-are-read"


def as_read(messages: Sequence[dict[str, Any]], render: Callable[[list[dict[str, Any]]], str]) -> list[dict[str, Any]]:
    """Join the parts of contents, line by line, unless the template goes through them itself.

    Args:
        messages: contents are texts, or lists of ``{"type": "text", "text": ..}``.
        render: what the template makes of messages.
    """
    if not any(isinstance(message["content"], list) for message in messages):
        return [*messages]
    try:
        text = render([{"role": "user", "content": [{"type": "text", "text": _PROBE}]}])
    except Exception:  # it joins the list to a text, for one
        text = ""
    if re.search(f"(?<!['\"]){_PROBE}", text):  # and not as Python or JSON writes a list
        return [*messages]
    return [message | {"content": _joined(message["content"])} for message in messages]


def _joined(content: str | list[dict[str, str]]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)
