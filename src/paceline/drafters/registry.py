"""Drafters by name: what can be asked for, with which options.

A drafter is named by a string (``"ngram"``, ``"draft_model:paceline-small-draft,depth=6"``) or by its
config object. The config class is the whole registration: its fields are the options, their types and
metadata are the help, ``build`` is the factory. Other packages add drafters through the entry-point
group ``paceline.drafters``, whose values point at config classes.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache
from importlib import import_module, metadata
from types import NoneType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from ..core.errors import CapabilityError, ConfigError
from ..core.options import MOST_TEXT, SHOWN, alternatives, check_value, shown, type_name

if TYPE_CHECKING:
    from .base import Drafter

ENTRY_POINT_GROUP = "paceline.drafters"

# Named, not imported: listing the names must not load torch, and a drafter loads only when it is asked for.
_BUILTIN = {
    "none": "paceline.drafters.none:NoneConfig",
    "ngram": "paceline.drafters.ngram:NgramConfig",
    "suffix": "paceline.drafters.suffix:SuffixConfig",
    "draft_model": "paceline.drafters.draft_model:DraftModelConfig",
    "hybrid": "paceline.drafters.hybrid:HybridConfig",
    "streams": "paceline.drafters.streams:StreamsConfig",
    "synthetic": "paceline.drafters.synthetic:SyntheticConfig",
}

_registered: dict[str, type[DrafterConfig]] = {}


@dataclass(frozen=True, kw_only=True)
class DrafterContext:
    """What a drafter may use while it is being built: the surroundings of the target."""

    load_model: Callable[..., Any] | None = None  # (name, dtype) -> a model of its own, for drafters that run one
    dtype: Any = None  # torch.dtype of the target
    device: Any = None  # torch.device of the target
    offline: bool = False  # nothing may be fetched
    revision: str | None = None  # hub revision of the target
    find: Callable[[str], Any] | None = None  # name of an embedded, local or hub folder -> its path
    target: str = ""  # name of the target
    target_folder: Any = None  # where its checkpoint lies; None: in memory alone
    streams: int = 0  # most streams a row of the applications beside it; 0: none has any


def option(default: Any = MISSING, *, help: str, minimum: float | None = None, maximum: float | None = None) -> Any:
    """A config field with its help text and, for numbers, its inclusive bounds."""
    return field(default=default, metadata={"help": help, "minimum": minimum, "maximum": maximum})


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """Base of every drafter's options: a frozen keyword-only dataclass beside the drafter.

    A subclass sets ``kind`` (its name on the command line), declares its options with `option`, checks
    what bounds cannot say in `validate`, and makes the drafter in `build`. The first line of its
    docstring is the drafter's help text. The field that ``subject`` names takes what follows the colon in
    ``"name:model"``.
    """

    kind: ClassVar[str] = ""
    subject: ClassVar[str] = "model"

    def __post_init__(self) -> None:
        hints = _hints(type(self))
        for spec in fields(self):
            _check_value(self, spec, hints[spec.name])
        self.validate()

    def validate(self) -> None:
        """Raise ConfigError (see `require`) where options do not fit together."""

    def require(self, name: str, holds: bool, rule: str) -> None:
        """Refuse option ``name`` with the sentence ``rule`` unless the condition holds."""
        if not holds:
            asked = f"{self.kind},{name}={str(getattr(self, name))[:SHOWN]}"
            raise ConfigError(asked, f"{name} {rule}", _help_of(type(self), name))

    def build(self, context: DrafterContext) -> Drafter:
        """Make the drafter. Weights and caches come later, in its `bind`."""
        raise NotImplementedError(f"{type(self).__name__}.build")


@dataclass(frozen=True, kw_only=True)
class OptionRow:
    """One option, as `paceline drafters` shows it."""

    name: str
    type: str
    default: str  # "required" where there is none
    help: str


@dataclass(frozen=True, kw_only=True)
class DrafterRow:
    """One drafter, as `paceline drafters` shows it."""

    name: str
    help: str
    origin: str  # "built in", "registered" or the distribution that brings it
    options: tuple[OptionRow, ...] = ()
    error: str | None = None  # why it cannot be used


def register(config_class: type[DrafterConfig]) -> type[DrafterConfig]:
    """Make a config class known under its ``kind``, for this process; usable as a decorator.

    Raises:
        ConfigError: no kind, a kind with odd characters, or a kind that another class has.
    """
    name = _checked_kind(config_class)
    if name in _BUILTIN or _registered.get(name, config_class) is not config_class:
        raise ConfigError(f"register drafter {name!r}", "the name is taken", "choose another kind")
    _registered[name] = config_class
    return config_class


def names() -> list[str]:
    """All names that can be asked for: built in, registered, and brought by other packages."""
    return list(dict.fromkeys([*_BUILTIN, *_registered, *_entry_points()]))


def config_class(name: str) -> type[DrafterConfig]:
    """The config class of a drafter's name.

    Raises:
        ConfigError: an unknown name, or an entry point that does not load.
    """
    if name in _BUILTIN:
        module, _, attribute = _BUILTIN[name].partition(":")
        loaded: type[DrafterConfig] = getattr(import_module(module), attribute)
        return loaded
    if name in _registered:
        return _registered[name]
    if name in _entry_points():
        return _load_entry_point(_entry_points()[name])
    raise ConfigError(f"drafter={name!r}", "there is no such drafter", _suggest(name, names()))


def parse(spec: str | DrafterConfig | None) -> DrafterConfig | None:
    """Read what a user gives as ``drafter``.

    Args:
        spec: a config object (returned as it is), None (no drafter), or
            ``name[:model][,option=value]...``; a tuple is written ``<1,1,3>``, an absent value ``none``.

    Raises:
        ConfigError: an unknown drafter or option, a value of the wrong type or out of bounds.
    """
    if spec is None or isinstance(spec, DrafterConfig):
        return spec
    if not isinstance(spec, str):
        raise ConfigError(
            f"drafter={shown(spec)}", "neither a name nor a config object", "write drafter='ngram' or NgramConfig(...)"
        )
    if len(spec) > MOST_TEXT:
        raise ConfigError(
            f"drafter={shown(spec)}", f"it has {len(spec):,} characters, {MOST_TEXT:,} are the most", "shorten it"
        )
    match = re.fullmatch(r"\s*([^:,=\s]+)\s*(?::([^,]*))?(?:,(.*))?", spec, re.DOTALL)
    if match is None:
        raise ConfigError(f"drafter={spec!r}", "no drafter's name", "write name, name:model or name:model,option=value")
    name, model, rest = match.groups()
    chosen = config_class(name)
    values = _read_options(chosen, spec, rest)
    if model is not None:
        values = _with_model(chosen, spec, model.strip(), values)
    _refuse_missing(chosen, spec, values)
    return chosen(**values)


def build(config: DrafterConfig, context: DrafterContext | None = None) -> Drafter:
    """Make the drafter of a config and check that it keeps to the contract.

    Raises:
        CapabilityError: what ``build`` returned is no drafter.
    """
    from .base import DrafterSpec  # here, since base needs torch

    drafter = config.build(context or DrafterContext())
    lacks = [name for name in ("bind", "observe", "propose", "release") if not callable(getattr(drafter, name, None))]
    if not isinstance(getattr(drafter, "spec", None), DrafterSpec):
        lacks.append("spec (a DrafterSpec)")
    if lacks:
        raise CapabilityError(
            f"drafter {config.kind!r}",
            f"{type(config).__name__}.build returned a {type(drafter).__name__} without {', '.join(lacks)}",
            "see paceline.drafters.base.Drafter",
        )
    return drafter


def describe() -> list[DrafterRow]:
    """All drafters with their options; those that cannot be loaded say why."""
    return [*(_describe(name) for name in names()), *map(_describe_clash, _discovered()[1])]


def _describe(name: str) -> DrafterRow:
    origin = _origin(name)
    try:
        chosen = config_class(name)
    except (ConfigError, ImportError, AttributeError) as error:
        return DrafterRow(name=name, help="", origin=origin, error=str(error))
    return DrafterRow(name=name, help=_summary(chosen), origin=origin, options=tuple(_option_rows(chosen)))


def _describe_clash(point: metadata.EntryPoint) -> DrafterRow:
    error = f"{point.value} is not used: another drafter has the name"
    return DrafterRow(name=point.name, help="", origin=_package(point), error=error)


def _origin(name: str) -> str:
    if name in _BUILTIN:
        return "built in"
    if name in _registered:
        return "registered"
    return _package(_entry_points()[name])


def _summary(config_class: type[DrafterConfig]) -> str:
    return (config_class.__doc__ or "").strip().partition("\n")[0]


def _option_rows(config_class: type[DrafterConfig]) -> Iterator[OptionRow]:
    hints = _hints(config_class)
    for spec in fields(config_class):
        default = "required" if _is_required(spec) else _show(_default(spec))
        yield OptionRow(
            name=spec.name, type=type_name(hints[spec.name]), default=default, help=_help_of(config_class, spec.name)
        )


# Entry points


@cache
def _discovered() -> tuple[dict[str, metadata.EntryPoint], list[metadata.EntryPoint]]:
    """Entry points by name, looked up once on first need, and those whose name was taken already."""
    usable: dict[str, metadata.EntryPoint] = {}
    clashing = []
    for point in metadata.entry_points(group=ENTRY_POINT_GROUP):
        if point.name in _BUILTIN or point.name in usable:
            clashing.append(point)
        else:
            usable[point.name] = point
    return usable, clashing


def _entry_points() -> dict[str, metadata.EntryPoint]:
    return _discovered()[0]


def _load_entry_point(point: metadata.EntryPoint) -> type[DrafterConfig]:
    asked = f"drafter={point.name!r}"
    remedy = f"repair or uninstall the package {_package(point)}"
    try:
        loaded = point.load()
    except Exception as error:  # another package's import may raise anything at all
        raise ConfigError(asked, f"{point.value} does not load ({type(error).__name__}: {error})", remedy) from error
    if not (isinstance(loaded, type) and issubclass(loaded, DrafterConfig)):
        raise ConfigError(asked, f"{point.value} is not a subclass of DrafterConfig", remedy)
    return loaded


def _package(point: metadata.EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.module


def _checked_kind(config_class: type[DrafterConfig]) -> str:
    kind = config_class.kind
    if not re.fullmatch(r"[A-Za-z][\w.-]*", kind):
        raise ConfigError(
            f"register {config_class.__name__}", f"kind={kind!r} is no name", "set kind to letters, digits, _ . or -"
        )
    return kind


# Options


def _read_options(config_class: type[DrafterConfig], spec: str, text: str | None) -> dict[str, Any]:
    hints = _hints(config_class)
    known = [f.name for f in fields(config_class)]
    values: dict[str, Any] = {}
    for item in _split(text) if text is not None else ():
        key, equals, value = (part.strip() for part in item.partition("="))
        if not key or not equals:
            raise ConfigError(f"drafter={spec!r}", f"{item!r} is not option=value", _known_options(config_class))
        if key not in known:
            raise ConfigError(
                f"drafter={spec!r}", f"{config_class.kind} has no option {key!r}", _suggest(key, known, "option")
            )
        if key in values:
            raise ConfigError(f"drafter={spec!r}", f"{key} is given twice", "give it once")
        values[key] = _convert(value, hints[key], f"drafter={spec!r}", key, config_class)
    return values


def _with_model(config_class: type[DrafterConfig], spec: str, model: str, values: dict[str, Any]) -> dict[str, Any]:
    subject = config_class.subject
    if subject not in {f.name for f in fields(config_class)}:
        raise ConfigError(
            f"drafter={spec!r}", f"{config_class.kind} runs no model of its own", f"write {config_class.kind!r}"
        )
    if not model:
        wrong, remedy = f"no {subject} after the colon", f"write {config_class.kind}:{subject.upper()}"
        raise ConfigError(f"drafter={spec!r}", wrong, remedy)
    if subject in values:
        raise ConfigError(f"drafter={spec!r}", f"{subject} is given twice", "give it once")
    return {subject: model, **values}


def _refuse_missing(config_class: type[DrafterConfig], spec: str, values: dict[str, Any]) -> None:
    for option_field in fields(config_class):
        if _is_required(option_field) and option_field.name not in values:
            form = "{}:MODEL" if option_field.name == "model" else "{}," + f"{option_field.name}=..."
            raise ConfigError(
                f"drafter={spec!r}",
                f"{config_class.kind} needs {option_field.name}",
                f"write {form.format(config_class.kind)}",
            )


def _split(text: str) -> list[str]:
    """Cut at commas, but not inside ``<...>``."""
    return re.split(r",(?![^<]*>)", text)


_FLAGS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def _convert(text: str, hint: Any, asked: str, name: str, config_class: type[DrafterConfig]) -> Any:
    """A value as written -> the type of its field."""
    for kind in alternatives(hint):
        try:
            return _read_as(text, kind)
        except ValueError:
            continue
    wanted = f"{name} takes {type_name(hint)}, not {shown(text)}"
    raise ConfigError(asked, wanted, _help_of(config_class, name))


def _read_as(text: str, kind: Any) -> Any:
    """One type of `_alternatives`; ValueError where the text does not fit it."""
    if kind is NoneType:
        return _one_of(text.lower(), {"none": None})
    if kind is bool:
        return _one_of(text.lower(), _FLAGS)
    if get_origin(kind) is Literal:
        return _one_of(text, {str(choice): choice for choice in get_args(kind)})
    if get_origin(kind) is tuple:
        inner = text[1:-1] if text.startswith("<") and text.endswith(">") else text
        return tuple(_read_as(part.strip(), get_args(kind)[0]) for part in inner.split(",") if part.strip())
    return kind(text)  # int, float, str


def _one_of(text: str, table: dict[str, Any]) -> Any:
    if text not in table:
        raise ValueError(text)
    return table[text]


def _check_value(config: DrafterConfig, spec: Field[Any], hint: Any) -> None:
    """Configs made in Python get the checks that text gets."""
    value = getattr(config, spec.name)
    rules = {**spec.metadata, "help": _help_of(type(config), spec.name)}
    check_value(f"{config.kind},{spec.name}={shown(value)}", spec.name, value, hint, rules)


def _hints(config_class: type[DrafterConfig]) -> dict[str, Any]:
    """The options' types; those that a spec cannot spell are refused."""
    hints = get_type_hints(config_class)
    options = {f.name: hints[f.name] for f in fields(config_class)}
    for name, hint in options.items():
        if not all(_is_spellable(kind) for kind in alternatives(hint)):
            raise ConfigError(
                f"{config_class.__name__}.{name}: {type_name(hint)}",
                "an option of this type cannot be written in a drafter's name",
                "use int, float, bool, str, Literal, tuple[..., ...] or a union of these with None",
            )
    return options


def _is_spellable(kind: Any) -> bool:
    if get_origin(kind) is tuple:
        return len(get_args(kind)) == 2 and get_args(kind)[1] is Ellipsis and get_args(kind)[0] in (int, float, str)
    return kind in (NoneType, bool, int, float, str) or get_origin(kind) is Literal


def _is_required(spec: Field[Any]) -> bool:
    return spec.default is MISSING and spec.default_factory is MISSING


def _default(spec: Field[Any]) -> Any:
    return spec.default_factory() if spec.default_factory is not MISSING else spec.default


def _show(value: Any) -> str:
    """A default, as it would be written in a spec."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return f"<{','.join(map(str, value))}>" if isinstance(value, tuple) else str(value)


def _help_of(config_class: type[DrafterConfig], name: str) -> str:
    spec = next(f for f in fields(config_class) if f.name == name)
    return str(spec.metadata.get("help", "")) or f"see {config_class.__name__}.{name}"


def _known_options(config_class: type[DrafterConfig]) -> str:
    known = [f.name for f in fields(config_class)]
    return f"its options are {', '.join(known)}" if known else f"{config_class.kind} has no options"


def _suggest(word: str, known: list[str], what: str = "drafter") -> str:
    close = difflib.get_close_matches(word, known, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    listed = ", ".join(known) if known else "none"
    return f"{hint}known {what}s: {listed}"
