"""The fields of a config dataclass: what each may hold, declared once for text, files and Python.

A field comes from `option`. Its type hint states which values fit, strictly: no number is taken for a truth value, no
text for a number. pydantic checks hints and bounds; `check` turns what it finds into a `ConfigError`.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, field, fields
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import AfterValidator, ConfigDict, Field, GetCoreSchemaHandler, InstanceOf, TypeAdapter, ValidationError
from pydantic_core import CoreSchema, PydanticCustomError, core_schema
from typing_extensions import TypedDict

from .errors import ConfigError

HIGHEST = 2**63 - 1  # of whole numbers that name no bound of their own: beyond it tensors and floats overflow
MOST_TEXT = 4096  # characters of a name, path or drafter
SHOWN = 120  # characters of a value in a message


class IsNumber:
    """Annotates a float: an int or a float, where pydantic takes whatever can be made one, such as a tensor."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the check, followed by pydantic's own."""
        plain = handler(source)
        checked = core_schema.chain_schema([core_schema.is_instance_schema((int, float)), plain])
        return core_schema.json_or_python_schema(plain, checked)


_LIMITS = {  # pydantic's name of a broken bound -> the bound in its context, and our words
    "greater_than": ("gt", "above {}"),
    "greater_than_equal": ("ge", "{} or more"),
    "less_than": ("lt", "below {}"),
    "less_than_equal": ("le", "{} or less"),
}


def option(
    default: Any = MISSING, *, help: str, minimum: float | None = None, maximum: float | None = None, **rules: Any
) -> Any:
    """Declare a config field.

    Args:
        default: its value if none is given; left out: the field is required.
        help: its meaning and what it may hold: the remedy of its errors, and its help on the command line.
        minimum, maximum: inclusive bounds of a number.
        rules: ``above``, ``below``: exclusive bounds. ``choices``: the texts it may be, with ``unknown``, the words for
            another. ``takes``: words for the type. ``unbounded=True``: whole numbers of any size, any text. For the
            command line ``cli=False`` (no flag), ``flag`` and ``metavar``. ``http=False``: requests have no such field.
    """
    return field(default=default, metadata={"help": help, "minimum": minimum, "maximum": maximum, **rules})


def check(config: Any, prefix: str = "") -> None:
    """Check the fields of a dataclass instance against their types and bounds.

    Args:
        config: the instance.
        prefix: how a message begins, before ``name=value``.

    Raises:
        ConfigError: the first field with a value that does not fit.
    """
    config_class: Any = type(config)
    try:
        _validator(config_class).validate_python(vars(config))
    except ValidationError as error:
        faults = error.errors(include_url=False, include_input=False)
        name = str(faults[0]["loc"][0])
        faults_of_field = [fault for fault in faults if fault["loc"][0] == name]
        raise _refusal(config, prefix, name, faults_of_field) from None


@cache
def _validator(config_class: type[Any]) -> TypeAdapter[Any]:
    """Return a validator of a dataclass's fields, given as a dict."""
    hints = get_type_hints(config_class, include_extras=True)
    held = {spec.name: _held(hints[spec.name], spec.metadata) for spec in fields(config_class)}
    make: Any = TypedDict
    shape = make(config_class.__name__, held)
    shape.__pydantic_config__ = ConfigDict(strict=True)
    return TypeAdapter(shape)


def _held(hint: Any, rules: Mapping[str, Any]) -> Any:
    """Return a type hint with the bounds of its field, for pydantic."""
    if rules.get("choices"):
        return Literal[tuple(rules["choices"])]
    return Union[tuple(_bounded(kind, rules) for kind in alternatives(hint))]  # noqa: UP007  (made of values)


def _bounded(kind: Any, rules: Mapping[str, Any]) -> Any:
    names = {"ge": "minimum", "gt": "above", "le": "maximum", "lt": "below"}
    limits = {bound: rules[name] for bound, name in names.items() if rules.get(name) is not None}
    if kind is int:
        widest = {} if "unbounded" in rules else {"ge": -HIGHEST, "le": HIGHEST}
        return Annotated[int, Field(**(widest | limits))]
    if kind is float:
        return Annotated[float, Field(**limits), IsNumber()]
    if kind is str:
        return str if "unbounded" in rules else Annotated[str, AfterValidator(_plain_text)]
    builtin = kind is NoneType or kind is bool or get_origin(kind) is not None
    return kind if builtin else InstanceOf[kind]  # type: ignore[misc]


def _plain_text(value: str) -> str:
    if "\0" in value:
        raise PydanticCustomError("text", "text without a NUL character")
    if len(value) > MOST_TEXT:
        raise PydanticCustomError("text", "{most} characters or fewer", {"most": f"{MOST_TEXT:,}"})
    return value


def _refusal(config: Any, prefix: str, name: str, faults: list[Any]) -> ConfigError:
    """Return the error of one field's faults."""
    value = getattr(config, name)
    rules = type(config).__dataclass_fields__[name].metadata
    subject, remedy = f"{prefix}{name}={shown(value)}", remedy_of(type(config), name)
    limit = next(filter(None, map(_limit, faults)), None)
    if "takes" not in rules and limit:
        return ConfigError(subject, f"{name} must be {limit}", remedy)
    if rules.get("choices") and isinstance(value, str):
        unknown = rules.get("unknown", f"there is no such {name}")
        return ConfigError(subject, unknown, f"use one of: {', '.join(filter(None, rules['choices']))}")
    kind = type_name(get_type_hints(type(config))[name])
    return ConfigError(subject, rules.get("takes") or f"{name} takes {kind}", remedy)


def remedy_of(config_class: type[Any], name: str) -> str:
    """Return what to do about a value that a field cannot hold: what the field means and may hold."""
    text = config_class.__dataclass_fields__[name].metadata.get("help")
    return f"give a valid {name}: {text.rstrip('.')}" if text else f"correct {name}"


def _limit(fault: Any) -> str | None:
    """Return the bound that a value breaks, in words; None: it is of another type."""
    if fault["type"] == "text":
        return str(fault["msg"])
    if fault["type"] not in _LIMITS:
        return None
    key, words = _LIMITS[fault["type"]]
    limit = fault["ctx"][key]
    if limit in (HIGHEST, -HIGHEST):
        return f"between {-HIGHEST} and {HIGHEST}"
    return words.format(f"{limit:g}" if isinstance(limit, float) else limit)


def read(text: str, hint: Any) -> Any:
    """Convert text to the type of a field: ``none``, ``yes``, ``3``, ``<1,1,3>``, text with a comma too.

    Raises:
        ValueError: the text fits no alternative of the type.
    """
    for kind in alternatives(hint):
        try:
            return _read_as(text, kind)
        except ValueError:
            continue
    raise ValueError(text)


def _read_as(text: str, kind: Any) -> Any:
    """Convert text to one of `alternatives`; raise ValueError (pydantic's is one) where it does not fit."""
    if kind is str:
        return text[1:-1] if _enclosed(text) else text
    if kind in (int, float):
        return kind(text)
    value: Any = text
    if kind is NoneType:
        value = None if text.lower() == "none" else text
    elif get_origin(kind) is Literal:
        value = next((choice for choice in get_args(kind) if str(choice) == text), text)
    elif get_origin(kind) is tuple:
        inner = text[1:-1] if _enclosed(text) else text
        value = tuple(part.strip() for part in inner.split(",") if part.strip())
    return TypeAdapter(kind).validate_python(value)


def _enclosed(text: str) -> bool:
    return text.startswith("<") and text.endswith(">")


def named_values(flag: str, pairs: Iterable[str]) -> dict[str, str]:
    """Convert ``["sql=a/folder"]`` to ``{"sql": "a/folder"}``; a name stands for one thing.

    Raises:
        ConfigError: text of another form, or a name twice; ``flag`` is what the text was given for.
    """
    values: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = (part.strip() for part in pair.partition("="))
        if not (name and equals and value) or name in values:
            wrong = "the name is there twice" if name in values else "not a name and a value"
            raise ConfigError(f"{flag} {pair}", wrong, f"write {flag} NAME=VALUE, each name once")
        values[name] = value
    return values


def written(value: Any) -> str:
    """Return a value as text: the inverse of `read`."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple) or (isinstance(value, str) and "," in value):
        return f"<{value if isinstance(value, str) else ','.join(map(str, value))}>"
    return str(value)


def alternatives(hint: Any) -> list[Any]:
    """Return the members of a union, None first and text last, since text takes anything."""
    if get_origin(hint) not in (Union, UnionType):
        return [hint]
    return sorted(get_args(hint), key=lambda kind: 0 if kind is NoneType else 2 if kind is str else 1)


def type_name(hint: Any) -> str:
    """Return a type in words."""
    return " or ".join(_plain_name(kind) for kind in reversed(alternatives(hint)))


def _plain_name(kind: Any) -> str:
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return " or ".join(map(str, inner))
    if origin in (tuple, list, Sequence):
        return f"<{_plain_name(inner[0])},...>"
    if origin in (dict, Mapping):
        return f"a mapping from {type_name(inner[0])} to {type_name(inner[1])}"
    plain_names = {NoneType: "none", bool: "true or false", int: "integer", float: "number", str: "text"}
    return plain_names.get(kind) or str(getattr(kind, "__name__", kind))


class _ShortRepr(reprlib.Repr):
    """A repr limited to what a message can show."""

    def repr_int(self, value: int, level: int) -> str:
        if abs(value) > 10**40:  # more digits than Python may be willing to write
            return f"{'-' if value < 0 else ''}about 2**{value.bit_length()}"
        return repr(value)

    def repr_instance(self, value: Any, level: int) -> str:
        try:
            return repr(value)
        except Exception as error:  # the value's own code, which may raise anything
            return f"<{type(value).__name__}, whose repr raises {type(error).__name__}>"


_SHOWN = _ShortRepr()
_SHOWN.maxlevel, _SHOWN.maxstring = 4, SHOWN


def suggest(word: str, candidates: Iterable[str], what: str) -> str:
    """Return what to write in place of a word that is not known, of those that are."""
    listed = list(candidates)
    return f"{did_you_mean(word, listed)}Known {what}s: {', '.join(listed) or 'none'}"


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """Return a question that names the known word closest to ``word``, or nothing where none is close."""
    close = difflib.get_close_matches(word, candidates, n=1)
    return f"Did you mean {close[0]!r}? " if close else ""


def shown(value: Any) -> str:
    """Return the repr of a value for a message, cut short; any value works, however long, deep or broken."""
    text = _SHOWN.repr(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 20]} ... {text[-15:]}"
