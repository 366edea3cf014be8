"""Drafters by name, and their options.

A drafter is named by a string (``"ngram"``, ``"draft_model:paceline-small-draft,depth=6"``) or by its
config object. The config class is the whole registration: its fields are the options, their types and
metadata are the help, ``build`` is the factory. Other packages add drafters through the entry-point
group ``paceline.drafters``, whose values point at config classes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from types import NoneType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from ..core.errors import CapabilityError, ConfigError
from ..core.options import MOST_TEXT, alternatives, check, read, remedy_of, shown, suggest, type_name, written
from ..core.options import option as option

if TYPE_CHECKING:
    from .base import Drafter

ENTRY_POINT_GROUP = "paceline.drafters"

# Named, not imported: listing the names must not load torch, and a drafter loads only when it is asked for.
_BUILTIN = {
    "none": "paceline.drafters.none:NoneConfig",
    "ngram": "paceline.drafters.ngram:NgramConfig",
    "suffix": "paceline.drafters.suffix:SuffixConfig",
    "draft_model": "paceline.drafters.draft_model:DraftModelConfig",
    "medusa": "paceline.drafters.medusa:MedusaConfig",
    "hybrid": "paceline.drafters.hybrid:HybridConfig",
    "streams": "paceline.drafters.streams:StreamsConfig",
    "lyanna": "paceline.drafters.lyanna:LyannaConfig",
    "eagle": "paceline.drafters.eagle:EagleConfig",
    "magicdec": "paceline.drafters.magicdec:MagicDecConfig",
    "spire": "paceline.drafters.spire:SpireConfig",
    "synthetic": "paceline.drafters.synthetic:SyntheticConfig",
}

_registered: dict[str, type[DrafterConfig]] = {}


@dataclass(frozen=True, kw_only=True)
class DrafterContext:
    """What a drafter may use while it is built: how to load models, and where the target runs."""

    load_model: Callable[..., Any] | None = None  # (name, dtype) -> a model of its own, for drafters that run one
    dtype: Any = None  # torch.dtype of the target
    device: Any = None  # torch.device of the target
    offline: bool = False  # nothing may be fetched
    revision: str | None = None  # hub revision of the target
    find: Callable[[str], Any] | None = None  # name of an embedded, local or hub folder -> its path
    target: str = ""  # name of the target
    target_folder: Any = None  # where its checkpoint lies; None: in memory alone
    streams: int = 0  # most streams a row of the applications beside it; 0: none has any


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """Base of every drafter's options: a frozen keyword-only dataclass beside the drafter.

    A subclass sets ``kind`` (its name on the command line), declares its options with `option`, checks combinations of
    options in `validate`, and makes the drafter in `build`. The first line of its docstring is the drafter's help text.
    The field that ``subject`` names takes what follows the colon in ``"name:model"``. ``refuses`` has options that
    other drafters have and this one cannot, each with why not and what to do. ``nests`` says that the subject is made
    of drafters' texts, whose options stand behind semicolons.
    """

    kind: ClassVar[str] = ""
    subject: ClassVar[str] = "model"
    nests: ClassVar[bool] = False
    refuses: ClassVar[Mapping[str, tuple[str, str]]] = {}

    def __post_init__(self) -> None:
        _hints(type(self))
        check(self, f"{self.kind},")
        self.validate()

    def validate(self) -> None:
        """Raise ConfigError (see `require`) where options do not fit together."""

    def require(self, name: str, holds: bool, rule: str) -> None:
        """Refuse option ``name`` with the sentence ``rule`` unless the condition holds."""
        if not holds:
            asked = f"{self.kind},{name}={shown(getattr(self, name))}"
            raise ConfigError(asked, f"{name} {rule}", remedy_of(type(self), name))

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
    """Register a config class under its ``kind``, for this process; usable as a decorator.

    Raises:
        ConfigError: no kind, a kind with odd characters, or a kind that another class has.
    """
    name = config_class.kind
    if not re.fullmatch(r"[A-Za-z][\w.-]*", name):
        asked = f"register {config_class.__name__}"
        raise ConfigError(asked, f"kind={name!r} is no name", "set kind to letters, digits, _ . or -")
    if name in _BUILTIN or _registered.get(name, config_class) is not config_class:
        raise ConfigError(f"register drafter {name!r}", "the name is taken", "choose another kind")
    _registered[name] = config_class
    return config_class


@cache
def _discovered() -> tuple[dict[str, EntryPoint], list[EntryPoint]]:
    """Entry points by name, our own first, looked up once on first need; and those whose name was taken already."""
    usable = {name: EntryPoint(name, place, ENTRY_POINT_GROUP) for name, place in _BUILTIN.items()}
    found = list(entry_points(group=ENTRY_POINT_GROUP))
    return usable, [point for point in found if usable.setdefault(point.name, point) is not point]


def names() -> list[str]:
    """All names that can be used: built in, registered, and from other packages."""
    return list(dict.fromkeys([*_BUILTIN, *_registered, *_discovered()[0]]))


def config_class(name: str) -> type[DrafterConfig]:
    """The config class of a drafter's name.

    Raises:
        ConfigError: an unknown name, or an entry point that does not load.
    """
    if name in _registered:
        return _registered[name]
    point = _discovered()[0].get(name)
    if point is None:
        raise ConfigError(f"drafter={name!r}", "there is no such drafter", suggest(name, names(), "drafter"))
    remedy = f"repair or uninstall the package {_package(point)}"
    try:
        loaded = point.load()
    except Exception as error:  # another package's import may raise anything at all
        wrong = f"{point.value} does not load ({type(error).__name__}: {error})"
        raise ConfigError(f"drafter={name!r}", wrong, remedy) from error
    if not (isinstance(loaded, type) and issubclass(loaded, DrafterConfig)):
        raise ConfigError(f"drafter={name!r}", f"{point.value} is not a subclass of DrafterConfig", remedy)
    return loaded


def nests(name: str) -> bool:
    """Whether a drafter of this name is made of other drafters' texts; an unknown one is not."""
    return name in names() and config_class(name).nests


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.module


def parse(spec: str | DrafterConfig | None) -> DrafterConfig | None:
    """Read what a user gives as ``drafter``.

    Args:
        spec: a config object (returned as it is), None (no drafter), or
            ``name[:model][,option=value]...``; a tuple is written ``<1,1,3>``, an absent value ``none``.

    Raises:
        ConfigError: an unknown drafter or option, a value of the wrong type or out of bounds.
        CapabilityError: an option that the drafter cannot have, see `DrafterConfig.refuses`.
    """
    if spec is None or isinstance(spec, DrafterConfig):
        return spec
    asked = f"drafter={shown(spec)}"
    if not isinstance(spec, str):
        raise ConfigError(asked, "neither a name nor a config object", "write drafter='ngram' or NgramConfig(...)")
    if len(spec) > MOST_TEXT:
        raise ConfigError(asked, f"it has {len(spec):,} characters, {MOST_TEXT:,} are the most", "shorten it")
    match = re.fullmatch(r"\s*([^:,=\s]+)\s*(?::([^,]*))?(?:,(.*))?", spec, re.DOTALL)
    if match is None:
        raise ConfigError(asked, "no drafter's name", "write name, name:model or name:model,option=value")
    name, subject, rest = match.groups()
    chosen = config_class(name)
    given = [] if subject is None else [_subject(asked, chosen, subject.strip())]
    given += [_pair(asked, chosen, item) for item in re.split(r",(?![^<]*>)", rest)] if rest is not None else []
    values = _read_options(asked, chosen, given)
    for field in fields(chosen):
        if _default(field) is MISSING and field.name not in values:
            form = ":MODEL" if field.name == "model" else f",{field.name}=..."
            raise ConfigError(asked, f"{chosen.kind} needs {field.name}", f"write {chosen.kind}{form}")
    return chosen(**values)


def _subject(asked: str, chosen: type[DrafterConfig], text: str) -> tuple[str, str]:
    """What follows the colon, as an option."""
    name = chosen.subject
    if name not in _hints(chosen):
        raise ConfigError(asked, f"{chosen.kind} runs no model of its own", f"write {chosen.kind!r}")
    if not text:
        raise ConfigError(asked, f"no {name} after the colon", f"write {chosen.kind}:{name.upper()}")
    return name, text


def _pair(asked: str, chosen: type[DrafterConfig], item: str) -> tuple[str, str]:
    """``option=value``."""
    key, equals, text = (part.strip() for part in item.partition("="))
    if not key or not equals:
        known = list(_hints(chosen))
        remedy = f"its options are {', '.join(known)}" if known else f"{chosen.kind} has no options"
        raise ConfigError(asked, f"{item!r} is not option=value", remedy)
    return key, text


def _read_options(asked: str, chosen: type[DrafterConfig], given: Sequence[tuple[str, str]]) -> dict[str, Any]:
    hints = _hints(chosen)
    values: dict[str, Any] = {}
    for key, text in given:
        if key in chosen.refuses:
            why, remedy = chosen.refuses[key]
            raise CapabilityError(asked, f"{chosen.kind} {why}", remedy)
        if key not in hints:
            raise ConfigError(asked, f"{chosen.kind} has no option {key!r}", suggest(key, list(hints), "option"))
        if key in values:
            raise ConfigError(asked, f"{key} is given twice", "give it once")
        try:
            values[key] = read(text, hints[key])
        except ValueError as error:
            wrong = f"{key} takes {type_name(hints[key])}, not {shown(text)}"
            raise ConfigError(asked, wrong, remedy_of(chosen, key)) from error
    return values


def build(config: DrafterConfig, context: DrafterContext | None = None) -> Drafter:
    """Make the drafter of a config and check that it implements the contract.

    Raises:
        CapabilityError: the object that ``build`` returned is not a drafter, or it is to re-sample and cannot.
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
    form = getattr(config, "resample", "off")
    if form in ("top", "equal", "alone") and not drafter.spec.level_logits:
        why = "its spec has no level_logits: what it says of a level depends on the tokens drafted in front of it"
        raise CapabilityError(f"{config.kind},resample={form}", why, "leave resample out, or use another drafter")
    return drafter


def describe() -> list[DrafterRow]:
    """All drafters with their options; for those that cannot be loaded, the reason."""
    return [*map(_describe, names()), *map(_describe_clash, _discovered()[1])]


def _describe(name: str) -> DrafterRow:
    origin = (
        "built in" if name in _BUILTIN else "registered" if name in _registered else _package(_discovered()[0][name])
    )
    try:
        chosen = config_class(name)
    except ConfigError as error:
        return DrafterRow(name=name, help="", origin=origin, error=str(error))
    summary = (chosen.__doc__ or "").strip().partition("\n")[0]
    return DrafterRow(name=name, help=summary, origin=origin, options=tuple(_option_rows(chosen)))


def _describe_clash(point: EntryPoint) -> DrafterRow:
    error = f"{point.value} is not used: another drafter has the name"
    return DrafterRow(name=point.name, help="", origin=_package(point), error=error)


def _option_rows(chosen: type[DrafterConfig]) -> Iterator[OptionRow]:
    hints = _hints(chosen)
    for spec in fields(chosen):
        default = "required" if _default(spec) is MISSING else written(_default(spec))
        about = spec.metadata.get("help", "")
        yield OptionRow(name=spec.name, type=type_name(hints[spec.name]), default=default, help=about)


def _hints(chosen: type[DrafterConfig]) -> dict[str, Any]:
    """The options' types; those that a spec cannot spell are refused."""
    hints = get_type_hints(chosen)
    options = {spec.name: hints[spec.name] for spec in fields(chosen)}
    for name, hint in options.items():
        if not all(map(_is_spellable, alternatives(hint))):
            raise ConfigError(
                f"{chosen.__name__}.{name}: {type_name(hint)}",
                "an option of this type cannot be written in a drafter's name",
                "use int, float, bool, str, Literal, tuple[..., ...] or a union of these with None",
            )
    return options


def _is_spellable(kind: Any) -> bool:
    if get_origin(kind) is tuple:
        return len(get_args(kind)) == 2 and get_args(kind)[1] is Ellipsis and get_args(kind)[0] in (int, float, str)
    return kind in (NoneType, bool, int, float, str) or get_origin(kind) is Literal


def _default(spec: Field[Any]) -> Any:
    """MISSING where one must be given."""
    return spec.default if spec.default_factory is MISSING else spec.default_factory()
