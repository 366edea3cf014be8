"""A schema whose texts are short, and bounded."""

from __future__ import annotations

from typing import Any

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city": {"enum": ["Paris", "Berlin"]},
    },
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}
