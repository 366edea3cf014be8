"""Things that a user names in text with options, such as drafters and rounds: ``name,option=value,..``.

The config class is the whole registration: its fields are the options, their types and metadata are the help.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, get_type_hints

from .errors import ConfigError
from .options import check, read, remedy_of, shown, suggest, type_name, written


@dataclass(frozen=True, kw_only=True)
class NamedConfig:
    """Base of such options: a frozen keyword-only dataclass next to what it configures.

    A subclass sets ``kind`` (its name), declares its options with `option` and checks combinations of options in
    `validate`. The first line of its docstring is its help text.
    """

    kind: ClassVar[str] = ""

    def __post_init__(self) -> None:
        check(self, f"{self.kind},")
        self.validate()

    def validate(self) -> None:
        """Raise ConfigError (see `require`) where options do not fit together."""

    def require(self, name: str, holds: bool, rule: str) -> None:
        """Refuse option ``name`` with the sentence ``rule`` unless the condition holds."""
        if not holds:
            value = getattr(self, name)
            subject = f"{self.kind},{name}={written(value) if isinstance(value, tuple) else shown(value)}"
            raise ConfigError(subject, f"{name} {rule}", remedy_of(type(self), name))


@dataclass(frozen=True, kw_only=True)
class OptionRow:
    """One option, as a listing shows it."""

    name: str
    type: str
    default: str  # "required" where there is none
    help: str


def read_config(subject: str, chosen: type[NamedConfig], options: Sequence[tuple[str, str]]) -> Any:
    """Return a config from options as they are written.

    Args:
        subject: what the user gave, for messages.
        chosen: its class.
        options: names and values of options.

    Raises:
        ConfigError: an unknown option, one that lacks, a value of the wrong type or out of bounds.
    """
    values = _read_options(subject, chosen, options)
    for field in fields(chosen):
        if field.default is MISSING and field.name not in values:
            form = ":MODEL" if field.name == "model" else f",{field.name}=..."
            raise ConfigError(subject, f"{chosen.kind} needs {field.name}", f"write {chosen.kind}{form}")
    return chosen(**values)


def pairs(subject: str, chosen: type[NamedConfig], rest: str | None) -> list[tuple[str, str]]:
    """Return ``option=value,option=value``; a tuple is written ``<1,1,3>``; None: there are none."""
    options = []
    for item in [] if rest is None else re.split(r",(?![^<]*>)", rest):
        key, equals, text = (part.strip() for part in item.partition("="))
        if not key or not equals:
            known_names = list(hints(chosen))
            remedy = f"its options are {', '.join(known_names)}" if known_names else f"{chosen.kind} has no options"
            raise ConfigError(subject, f"{item!r} is not option=value", remedy)
        options.append((key, text))
    return options


def _read_options(subject: str, chosen: type[NamedConfig], options: Sequence[tuple[str, str]]) -> dict[str, Any]:
    types = hints(chosen)
    values: dict[str, Any] = {}
    for key, text in options:
        if key not in types:
            raise ConfigError(subject, f"{chosen.kind} has no option {key!r}", suggest(key, list(types), "option"))
        if key in values:
            raise ConfigError(subject, f"{key} is given twice", "give it once")
        try:
            values[key] = read(text, types[key])
        except ValueError as error:
            wrong = f"{key} takes {type_name(types[key])}, not {shown(text)}"
            raise ConfigError(subject, wrong, remedy_of(chosen, key)) from error
    return values


def option_rows(chosen: type[NamedConfig]) -> Iterator[OptionRow]:
    """Yield the options of a config class."""
    types = hints(chosen)
    for spec in fields(chosen):
        value = "required" if spec.default is MISSING else written(spec.default)
        about = spec.metadata.get("help", "")
        yield OptionRow(name=spec.name, type=type_name(types[spec.name]), default=value, help=about)


def hints(chosen: type[NamedConfig]) -> dict[str, Any]:
    """Return the options' types."""
    all_hints = get_type_hints(chosen)
    return {spec.name: all_hints[spec.name] for spec in fields(chosen)}
