"""Command-line options made from dataclasses, so that an option is written down once.

A command declares the dataclasses that it fills::

    @app.command()
    @takes(llm=LLMConfig, params=SamplingParams, defaults={"max_tokens": 128})
    def generate(prompt: ..., llm: dict[str, Any], params: dict[str, Any]) -> None: ...

and its parameters ``llm`` and ``params`` become one flag a field: ``max_tokens: int = 16`` is
``--max-tokens INTEGER``. Help comes from the field's ``metadata["help"]``; a field whose metadata says
``cli=False`` has no flag, and ``flag="--word"`` gives it another. The command gets dictionaries to pass on
to Python: values are checked there, once, for the command line and for everybody else.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer

from ..core.errors import ConfigError

PAIR = "KEY=VALUE"
Mapper = Callable[[str, list[str]], Mapping[Any, Any]]  # (flag, pairs) -> the mapping


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flag:
    """One field of a dataclass as a command-line option."""

    name: str
    kind: Any  # what typer parses: str, int, float, bool, a Literal, or a list of one of these
    default: Any
    help: str
    metavar: str | None  # the shape of the value, where typer's own word for it is too vague
    pairs: Mapper | None  # makes a mapping of repeated KEY=VALUE
    flag: str  # as it is written
    parser: Callable[[Any], Any] | None = None  # where typer has no type for it
    shown: str | None = None  # how the help describes the default, where its value does not say it

    def parameter(self) -> inspect.Parameter:
        option = typer.Option(
            *([self.flag] if self.flag != _flag_of(self.name) else ()),
            help=self.help or None,
            metavar=self.metavar,
            show_default=self.shown or True,
            parser=self.parser,
        )
        return inspect.Parameter(
            self.name, inspect.Parameter.KEYWORD_ONLY, default=self.default, annotation=Annotated[self.kind, option]
        )

    def value(self, given: Any) -> Any:
        """What Python is handed for what typer parsed."""
        if self.pairs:
            return self.pairs(self.flag, given) if given else None
        if isinstance(given, list | tuple):
            return list(given) or None
        return given


def takes(
    *,
    defaults: Mapping[str, Any] | None = None,
    shown: Mapping[str, str] | None = None,
    without: Collection[str] = (),
    **configs: type,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace each parameter named in ``configs`` by flags for the fields of its dataclass.

    Args:
        defaults: other defaults than the dataclass has, by field (the help shows them).
        shown: words for the help in place of a default, by field.
        without: fields for which the command has no use: they get no flag.
        configs: dataclasses by parameter; the command receives a dict of values in its place.
    """
    groups = {
        parameter: flags_of(config, defaults or {}, shown or {}, without) for parameter, config in configs.items()
    }

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**given: Any) -> None:
            filled = {p: {f.name: f.value(given.pop(f.name)) for f in flags} for p, flags in groups.items()}
            command(**given, **filled)

        own = inspect.signature(command, eval_str=True).parameters.values()
        kept = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own if p.name not in groups]
        made = [flag.parameter() for flags in groups.values() for flag in flags]
        signature = inspect.Signature([*kept, *made])
        del run.__wrapped__  # else inspect looks through to the declared parameters
        run.__signature__ = signature  # type: ignore[attr-defined]
        run.__annotations__ = {name: p.annotation for name, p in signature.parameters.items()}
        return run

    return decorate


def flags_of(
    config: type, defaults: Mapping[str, Any], shown: Mapping[str, str], without: Collection[str] = ()
) -> list[Flag]:
    """The flags of a dataclass, in the order of its fields."""
    hints = get_type_hints(config)
    given = [field for field in dataclasses.fields(config) if field.metadata.get("cli", True)]
    fields = [field for field in given if field.name not in without]
    flags = [_flag(field, hints[field.name], defaults) for field in fields]
    return [dataclasses.replace(flag, shown=shown.get(flag.name)) for flag in flags]


def _flag(field: dataclasses.Field[Any], hint: Any, defaults: Mapping[str, Any]) -> Flag:
    kind, metavar = _kind(hint)
    default = defaults.get(field.name, _default(field))
    optional = default is None and get_origin(kind) is not list
    # An optional number with a default: None needs a word of its own.
    word_for_none = kind in (int, float) and default is not None and type(None) in _alternatives(hint)
    if word_for_none:
        metavar = f"<{kind.__name__}|none>"
    return Flag(
        name=field.name,
        kind=kind | None if optional else kind,
        default=[] if default is None and not optional else default,
        help=field.metadata.get("help", ""),
        metavar=field.metadata.get("metavar", metavar),
        pairs=_mapper(hint) if metavar == PAIR else None,
        flag=field.metadata.get("flag", _flag_of(field.name)),
        parser=functools.partial(_number_or_none, kind) if word_for_none else None,
    )


def _number_or_none(kind: type, text: Any) -> Any:
    return None if str(text).lower() == "none" else kind(text)


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else ...


def _kind(hint: Any) -> tuple[Any, str | None]:
    """What typer is to parse for a type hint, and how to show a mapping.

    Of a union the most general reading wins: a list (``str | list[str]`` is a flag that may be
    repeated), then text (``int | str`` is parsed in Python, ``1GiB``), then numbers.
    """
    choices = [a for a in _alternatives(hint) if a is not type(None)]
    for choice in choices:
        if get_origin(choice) is dict and get_args(choice) in _MAPPERS:
            return list[str], PAIR
        if get_origin(choice) in (list, tuple):
            return list[get_args(choice)[0]], None  # type: ignore[misc]
    for scalar in (str, float, int, bool):
        if scalar in choices:
            return scalar, None
    literals = [choice for choice in choices if get_origin(choice) is Literal]
    if literals:
        return literals[0], None
    raise TypeError(f"no command-line form for the type {hint!r}")


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def _mapper(hint: Any) -> Mapper:
    return next(_MAPPERS[get_args(a)] for a in _alternatives(hint) if get_origin(a) is dict)


def _numbers(flag: str, pairs: list[str]) -> dict[int, float]:
    """``["7=-2.5"]`` -> ``{7: -2.5}``: token ids and what belongs to them."""
    try:
        return {int(key): float(value) for key, value in (pair.split("=", 1) for pair in pairs)}
    except ValueError as error:
        raise ConfigError(
            f"{flag} {' '.join(pairs)}", "not of the form KEY=VALUE", f"write a token id and a number: {flag} 7=-2.5"
        ) from error


def _names(flag: str, pairs: list[str]) -> dict[str, str]:
    """``["sql=a/folder"]`` -> ``{"sql": "a/folder"}``; a name stands for one thing."""
    found: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = (part.strip() for part in pair.partition("="))
        if not (name and equals and value):
            raise ConfigError(f"{flag} {pair}", "not of the form NAME=FOLDER", f"write {flag} sql=path/to/folder")
        if name in found:
            raise ConfigError(f"{flag} {pair}", f"{name} stands for {found[name]} already", "choose another name")
        found[name] = value
    return found


_MAPPERS: dict[tuple[Any, ...], Mapper] = {(int, float): _numbers, (str, str): _names}
