"""Typed fields of a ``config.json``: every complaint names the field and its value."""

from __future__ import annotations

from typing import Any

from ..core.errors import ConfigError
from ..core.options import shown

Json = dict[str, Any]

MAX_INTEGER = 2**31 - 1  # of any size: products of several still fit a float
MAX_LAYERS = 10_000
NUMBERS = (1e-30, 1e30)  # of any factor: float32 holds it, and its inverse
RESTORE = "restore the file from where the checkpoint came"


class Fields:
    """Typed access to a config dictionary; every complaint names the field and its value."""

    def __init__(self, values: Json) -> None:
        self.values = values

    def integer(self, name: str, default: int | None = None, minimum: int = 1, maximum: int = MAX_INTEGER) -> int:
        return check_integer(name, self.get(name, default), minimum, maximum)

    def layers(self) -> int:
        return self.integer("num_hidden_layers", maximum=MAX_LAYERS)

    def number(self, name: str, default: float | None = None) -> float:
        return check_number(name, self.get(name, default))

    def flag(self, name: str, default: bool) -> bool:
        return self._typed(name, bool, "it must be true or false", default)

    def optional_integer(self, name: str, default: int | None, maximum: int = MAX_INTEGER) -> int | None:
        """Return a field; an absent one takes the default; an explicit null stays null."""
        return None if self.values.get(name, default) is None else self.integer(name, default, maximum=maximum)

    def text(self, name: str) -> str | None:
        return self._typed(name, str, "it must be text", None)

    def mapping(self, name: str) -> Json:
        return self._typed(name, dict, "it must be an object", {})

    def _typed(self, name: str, kind: type, rule: str, default: Any) -> Any:
        value = self.get(name, default) if default is not None else self.values.get(name)
        if value is not None and not isinstance(value, kind):
            raise bad(name, value, rule)
        return value

    def get(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is None and default is None:
            raise ConfigError(f"config.json of a {self.values['model_type']!r} model", f"{name!r} is missing", RESTORE)
        return default if value is None else value


def bad(name: str, value: object, rule: str, file: str = "config.json") -> ConfigError:
    return ConfigError(f"{file}: {name} = {shown(value)}", rule, RESTORE)


def check_integer(name: str, value: object, minimum: int = 1, maximum: int = MAX_INTEGER) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise bad(name, value, f"it must be an integer of at least {minimum}")
    if value > maximum:
        raise bad(name, value, f"it must be an integer of at most {maximum}")
    return value


def check_number(name: str, value: object) -> float:
    low, high = NUMBERS
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise bad(name, value, f"it must be a positive number, {low:g} to {high:g}")
    return float(value)


def token_ids(name: str, value: object, file: str = "config.json") -> tuple[int, ...]:
    """Return the ``value`` of a field of a file, an id, a list of ids or null, as a tuple; ids below 0 stand for none.

    Raises:
        ConfigError: something else, or an id that no vocabulary could have.
    """
    ids: list[Any] = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and abs(i) <= MAX_INTEGER for i in ids):
        raise bad(name, value, "it must be a token id or a list of them", file)
    return tuple(i for i in ids if i >= 0)
