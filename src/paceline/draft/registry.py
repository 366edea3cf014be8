"""Drafters by name, and their options.

A drafter is named by a string (``"ngram"``, ``"draft_model:paceline-small-draft,depth=6"``) or by its
config object. The config class is the whole registration: its fields are the options, their types and
metadata are the help, ``build`` is the factory. Other packages add drafters through the entry-point
group ``paceline.drafters``, whose values point at config classes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, ClassVar

from ..core.errors import CapabilityError, ConfigError
from ..core.named import NamedConfig, hints, option_rows, pairs, read_config
from ..core.named import OptionRow as OptionRow
from ..core.options import MOST_TEXT, shown, suggest
from ..core.options import option as option
from ..core.registry import DRAFTERS
from . import adapted

if TYPE_CHECKING:
    from .base import Drafter

ENTRY_POINT_GROUP = "paceline.drafters"
NONE = "none"  # plain decoding

_registered: dict[str, type[DrafterConfig]] = {}


@dataclass(frozen=True, kw_only=True)
class DrafterContext:
    """Describe what a drafter may use while it is built: how to load models, and where the target runs."""

    # (name, dtype) -> a model of its own, for drafters that run one
    load_model: Callable[..., Any] | None = None
    dtype: Any = None  # torch.dtype of the target
    device: Any = None  # torch.device of the target
    find: Callable[[str], Any] | None = None  # name of an embedded, local or hub folder -> its path
    target: str = ""  # name of the target
    target_folder: Any = None  # where its checkpoint lies; None: in memory alone
    rows_beside: int = 0  # most rows that applications have next to each of theirs; 0: none has any


@dataclass(frozen=True, kw_only=True)
class DrafterConfig(NamedConfig):
    """Base of every drafter's options: a frozen keyword-only dataclass next to the drafter.

    A subclass sets ``kind`` (its name on the command line), declares its options with `option`, checks combinations of
    options in `validate`, and makes the drafter in `build`. The first line of its docstring is the drafter's help text.
    The field that ``subject`` names takes what follows the colon in ``"name:model"``. ``nests`` means that the
    subject is made of drafters' texts, whose options stand after semicolons. ``weights`` names the option that holds
    what was trained for the target; where it is empty the zoo's is meant, or with ``of_applications`` the applications'
    where there are any.
    """

    subject: ClassVar[str] = "model"
    nests: ClassVar[bool] = False
    weights: ClassVar[str] = ""
    of_applications: ClassVar[bool] = False

    def with_weights(self, find: Callable[[str], str], applied: bool = False) -> DrafterConfig:
        """Return the same, with the name of the weights that it means.

        Args:
            find: what the zoo has for the target, by the drafter's kind; raises where it has none.
            applied: whether applications bring weights for it.
        """
        if not self.weights or getattr(self, self.weights) or (applied and self.of_applications):
            return self
        return replace(self, **{self.weights: find(self.kind)})

    def build(self, context: DrafterContext) -> Drafter:
        """Make the drafter. Weights and caches come later, in its `bind`."""
        raise NotImplementedError(f"{type(self).__name__}.build")


def proposes_option(sampled: bool = False) -> Any:
    """Return the field ``proposes`` of a drafter with a distribution: how its tokens are chosen.

    Args:
        sampled: whether they may be drawn from it, too.
    """
    drawn = "; sampled: drawn from q (rejection)" if sampled else ""
    return option("coupled", help=f"point: likeliest tokens; coupled: with the target's noise{drawn}")


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
        subject = f"register {config_class.__name__}"
        raise ConfigError(subject, f"kind={name!r} is not a name", "set kind to letters, digits, _ . or -")
    if name in DRAFTERS or _registered.get(name, config_class) is not config_class:
        raise ConfigError(f"register drafter {name!r}", "the name is taken", "choose another kind")
    _registered[name] = config_class
    return config_class


@cache
def _discovered() -> tuple[dict[str, EntryPoint], list[EntryPoint]]:
    """Entry points by name, our own first, looked up once on first need; and those whose name was taken already."""
    usable = {name: EntryPoint(name, place, ENTRY_POINT_GROUP) for name, place in DRAFTERS.items()}
    points = list(entry_points(group=ENTRY_POINT_GROUP))
    return usable, [point for point in points if usable.setdefault(point.name, point) is not point]


def names() -> list[str]:
    """All names that can be used: built in, registered, and from other packages."""
    return list(dict.fromkeys([*DRAFTERS, *_registered, *_discovered()[0]]))


def without_weights() -> list[str]:
    """Those that draft for any target as they are: their names alone can be given, and they read nothing trained."""
    configs = {name: config_class(name) for name in names() if name != NONE}
    free = {name: chosen for name, chosen in configs.items() if not chosen.weights}
    return [name for name, chosen in free.items() if all(spec.default is not MISSING for spec in fields(chosen))]


def config_class(name: str) -> type[DrafterConfig]:
    """Return the config class of a drafter's name.

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
    """Return whether a drafter of this name is made of other drafters' texts; an unknown one is not."""
    return name in names() and config_class(name).nests


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.module


def parse(spec: str | DrafterConfig | None) -> DrafterConfig | None:
    """Read what a user gives as ``drafter``.

    Args:
        spec: a config object (returned as it is), None (no drafter), or
            ``name[:model][,option=value]...``; a tuple is written ``<1,1,3>``, text with a comma in it
            ``<folder, one>``, an absent value ``none``.

    Raises:
        ConfigError: an unknown drafter or option, a value of the wrong type or out of bounds.
    """
    if spec is None or isinstance(spec, DrafterConfig):
        return spec
    what = f"drafter={shown(spec)}"
    if not isinstance(spec, str):
        raise ConfigError(what, "neither a name nor a config object", "write drafter='ngram' or NgramConfig(...)")
    if len(spec) > MOST_TEXT:
        raise ConfigError(what, f"it has {len(spec):,} characters, {MOST_TEXT:,} are the most", "shorten it")
    if spec not in names() and adapted.is_adapted(spec):
        return parse(adapted.named(spec))
    match = re.fullmatch(r"\s*([^:,=\s]+)\s*(?::(<[^<>]*>|[^,]*))?(?:,(.*))?", spec, re.DOTALL)
    if match is None:
        raise ConfigError(what, "no drafter's name", "write name, name:model or name:model,option=value")
    name, subject, rest = match.groups()
    chosen = config_class(name)
    key, equals, _ = (subject or "").partition("=")
    if equals and key.strip() in hints(chosen):
        comma = spec.replace(":", ",", 1)
        within = comma.replace(",", ";")
        raise ConfigError(what, "options follow a comma", f"write {comma!r}, or within a hybrid {within!r}")
    named = [] if subject is None else [_subject(what, chosen, subject.strip())]
    return read_config(what, chosen, [*named, *pairs(what, chosen, rest)])


def _subject(subject: str, chosen: type[DrafterConfig], text: str) -> tuple[str, str]:
    """Return what follows the colon, as an option."""
    name = chosen.subject
    if name not in hints(chosen):
        raise ConfigError(subject, f"{chosen.kind} runs no model of its own", f"write {chosen.kind!r}")
    if not text:
        raise ConfigError(subject, f"no {name} after the colon", f"write {chosen.kind}:{name.upper()}")
    return name, text


def build(config: DrafterConfig, context: DrafterContext | None = None) -> Drafter:
    """Make the drafter of a config and check that it implements the contract.

    Raises:
        CapabilityError: the object that ``build`` returned is not a drafter.
    """
    from .base import Drafter, DrafterSpec  # here, since base needs torch

    drafter = config.build(context or DrafterContext())
    if not isinstance(drafter, Drafter) or not isinstance(getattr(drafter, "spec", None), DrafterSpec):
        wrong = f"{type(config).__name__}.build returned a {type(drafter).__name__}, which is not a Drafter with a spec"
        remedy = "derive it from paceline.draft.Drafter, and set spec to a DrafterSpec"
        raise CapabilityError(f"drafter {config.kind!r}", wrong, remedy)
    return drafter


def describe() -> list[DrafterRow]:
    """All drafters with their options; for those that cannot be loaded, the reason."""
    rows, wrong = [*map(_describe, names())], "is not used: another drafter has the name"
    for point in _discovered()[1]:
        rows.append(DrafterRow(name=point.name, help="", origin=_package(point), error=f"{point.value} {wrong}"))
    return rows


def _describe(name: str) -> DrafterRow:
    origin = (
        "built in" if name in DRAFTERS else "registered" if name in _registered else _package(_discovered()[0][name])
    )
    try:
        chosen = config_class(name)
    except ConfigError as error:
        return DrafterRow(name=name, help="", origin=origin, error=str(error))
    summary = (chosen.__doc__ or "").strip().partition("\n")[0]
    return DrafterRow(name=name, help=summary, origin=origin, options=tuple(option_rows(chosen)))
