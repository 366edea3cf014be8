"""What the fields of a config dataclass may hold: one check for values from text, from files and from Python.

A field's type hint says which values fit; its metadata may add ``minimum``, ``maximum``, ``choices``,
``unknown`` (the words for a value that is none of the choices), ``takes`` (words for the type) and ``help``
(what to do instead).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from itertools import islice
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from .errors import ConfigError

HIGHEST = 2**63 - 1  # of whole numbers that name no bound of their own: beyond it tensors and floats overflow
MOST_TEXT = 4096  # characters of a name, path or drafter
SHOWN = 120  # characters of a value in a message
_SHOWN_LEVELS, _SHOWN_ITEMS = 4, 6


def check_fields(config: Any, hints: Mapping[str, Any]) -> None:
    """Check every field of a dataclass instance; see `check_value`.

    Args:
        config: the instance.
        hints: the type of each field, as `typing.get_type_hints` gives it.

    Raises:
        ConfigError: the first field with a value that does not fit.
    """
    for spec in fields(config):
        value, rules = getattr(config, spec.name), dict(spec.metadata)
        if "help" in rules:
            rules["help"] = f"{spec.name}: {rules['help']}"
        check_value(f"{spec.name}={shown(value)}", spec.name, value, hints[spec.name], rules)


def check_value(asked: str, name: str, value: Any, hint: Any, rules: Mapping[str, Any]) -> None:
    """Refuse a value of another type, out of bounds or none of the choices.

    Args:
        asked: how the message begins.
        name: of the field.
        value: what it holds.
        hint: its type.
        rules: its metadata; see the module.

    Raises:
        ConfigError: the value does not fit.
    """
    help_text = rules.get("help") or f"correct {name}"
    if not fits(value, hint):
        raise ConfigError(asked, rules.get("takes") or f"{name} takes {type_name(hint)}", help_text)
    wrong = _number_fault(value, rules) or _text_fault(value)
    if wrong:
        raise ConfigError(asked, f"{name} must be {wrong}", help_text)
    choices = rules.get("choices")
    if choices is not None and value not in choices:
        raise ConfigError(asked, rules.get("unknown", f"there is no such {name}"), f"use one of: {', '.join(choices)}")


def _number_fault(value: Any, rules: Mapping[str, Any]) -> str | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    lowest, highest = rules.get("minimum"), rules.get("maximum")
    if lowest is not None and not value >= lowest:  # not >=: refuses NaN too
        return f"{lowest} or more"
    if highest is not None and not value <= highest:
        return f"{highest} or less"
    return f"between {-HIGHEST} and {HIGHEST}" if isinstance(value, int) and abs(value) > HIGHEST else None


def _text_fault(value: Any) -> str | None:
    if not isinstance(value, str):
        return None
    if "\0" in value:
        return "text without a NUL character"
    return None if len(value) <= MOST_TEXT else f"{MOST_TEXT:,} characters or fewer"


def alternatives(hint: Any) -> list[Any]:
    """The members of a union, None first and text last, since text takes anything."""
    if get_origin(hint) not in (Union, UnionType):
        return [hint]
    return sorted(get_args(hint), key=lambda kind: 0 if kind is NoneType else 2 if kind is str else 1)


def fits(value: Any, kind: Any) -> bool:
    """Whether a value is of a type, members included; no number stands for a truth value, nor the reverse."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(fits(value, part) for part in inner)
    if origin is Literal:
        return any(type(value) is type(choice) and value == choice for choice in inner)
    if origin is tuple:
        return isinstance(value, tuple) and all(fits(item, inner[0]) for item in value)
    if origin in (dict, Mapping):
        return isinstance(value, Mapping) and all(fits(k, inner[0]) and fits(v, inner[1]) for k, v in value.items())
    if kind in (int, float):
        return not isinstance(value, bool) and isinstance(value, (int, float) if kind is float else int)
    return isinstance(value, kind)


def type_name(hint: Any) -> str:
    """A type in words."""
    return " or ".join(plain_name(kind) for kind in reversed(alternatives(hint)))


def plain_name(kind: Any) -> str:
    """One of `alternatives` in words."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is NoneType:
        return "none"
    if kind is bool:
        return "true or false"
    if origin is Literal:
        return " or ".join(map(str, inner))
    if origin is tuple:
        return f"<{plain_name(inner[0])},...>"
    if origin in (dict, Mapping):
        return f"a mapping from {type_name(inner[0])} to {type_name(inner[1])}"
    return {int: "integer", float: "number", str: "text"}.get(kind, getattr(kind, "__name__", str(kind)))


def shown(value: Any) -> str:
    """A value in a message: its repr, cut short; for any value whatever, however long, deep or broken."""
    text = _repr(value, _SHOWN_LEVELS)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 20]} ... {text[-15:]}"


def _repr(value: Any, levels: int) -> str:
    """A repr that asks no more of a value than the message can show."""
    if isinstance(value, int) and abs(value) > 10**40:  # more digits than Python may be willing to write
        return f"{'-' if value < 0 else ''}about 2**{value.bit_length()}"
    if isinstance(value, str | bytes):
        return repr(value if len(value) <= SHOWN else value[:SHOWN])
    if type(value) in (list, tuple, dict):
        return _repr_of_many(value, levels)
    try:
        return repr(value)
    except Exception as error:  # the value's own code, which may raise anything
        return f"<{type(value).__name__}, whose repr raises {type(error).__name__}>"


def _repr_of_many(value: Any, levels: int) -> str:
    left, right = ("{", "}") if isinstance(value, dict) else ("[", "]") if isinstance(value, list) else ("(", ")")
    if levels == 0 and value:
        return f"{left}...{right}"
    items = list(islice(value, _SHOWN_ITEMS))
    parts = [_repr(i, levels - 1) + (f": {_repr(value[i], levels - 1)}" if left == "{" else "") for i in items]
    more = [f"... {len(value)} in all"] if len(value) > _SHOWN_ITEMS else []
    comma = "," if left == "(" and len(value) == 1 else ""
    return left + ", ".join(parts + more) + comma + right
