"""A chat template with tools, and arguments that are bounded."""

from __future__ import annotations

from typing import Any

TEMPLATE = """{{ bos_token }}{% if tools %}Tools, called as <tool_call>..</tool_call>:
{% for tool in tools %}{{ tool.function | tojson }}
{% endfor %}{% endif %}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}
<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
