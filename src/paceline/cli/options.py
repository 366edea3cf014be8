"""Command-line options made from dataclasses, so that an option is written down once.

A command declares the dataclasses that it fills::

    @app.command()
    @takes(llm=LLMConfig, params=SamplingParams, defaults={"max_tokens": 128})
    def generate(prompt: ..., llm: dict[str, Any], params: dict[str, Any]) -> None: ...

and its parameters ``llm`` and ``params`` become one flag a field: ``max_tokens: int = 16`` is
``--max-tokens INTEGER``. Help comes from the field's ``metadata["help"]``; a field whose metadata has
``cli=False`` has no flag, ``flag="--word"`` gives it another, and a ``metavar`` such as ``N,N,..`` makes one text of
several numbers. The command gets dictionaries to pass on
to Python: values are checked there, once, for the command line and for everybody else.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, Field, fields
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from ..api.options import AUTO_DRAFTER
from ..core.errors import ConfigError
from ..core.options import alternatives, named_values
from ..core.options import read as read_text
from ..core.params import SamplingParams

DEFAULT_MODEL = "paceline-small"
DEFAULTS = {"model": DEFAULT_MODEL, "drafter": AUTO_DRAFTER}  # of the commands that answer
ModelArgument = Annotated[str | None, typer.Argument(metavar="MODEL", help="The same as --model.")]
PANELS = {  # of the help: fields by panel; those in none stand among the command's own options
    "Sampling": " ".join(spec.name for spec in fields(SamplingParams)),
    "Speculation": "round verifier budget applications learn",
    "Model": "dtype device exact kernels threads revision offline",
    "Memory and batches": "kv_memory kv_cache_dtype max_model_len max_sequences max_batch_rows max_prompt_rows",
    "Processes and hosts": "pipeline tensor_parallel cluster",
    "Limits": "max_open request_s drain_s",
}
_PANEL_OF = {name: panel for panel, names in PANELS.items() for name in names.split()}
Flag = tuple[inspect.Parameter, Callable[[Any], Any]]  # as typer reads it, and from that to what Python takes


def one_model(argument: str | None, flag: str | None, default: str | None = None) -> str:
    """Return the model that is named by position or by ``--model``.

    Raises:
        ConfigError: no model is named, or two are.
    """
    if argument and flag and argument != flag:
        raise ConfigError(f"{argument} and --model {flag}", "two models are named", "name one of them")
    if not (model := argument or flag or default):
        raise ConfigError("no model", "there is nothing to work on", f"name one: --model {DEFAULT_MODEL}")
    return model


def takes(
    *,
    defaults: Mapping[str, Any] | None = None,
    shown_defaults: Mapping[str, str] | None = None,
    without: Collection[str] = (),
    only: Collection[str] = (),
    **configs: type,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace each parameter named in ``configs`` by flags for the fields of its dataclass.

    Args:
        defaults: other defaults than the dataclass has, by field (the help shows them).
        shown_defaults: words for the help in place of a default, by field.
        without: fields for which the command has no use: they get no flag.
        only: the fields that get one; empty: all.
        configs: dataclasses by parameter; the command receives a dict of values in its place.
    """
    groups: dict[str, list[Flag]] = {}
    for parameter, config in configs.items():
        hints = get_type_hints(config)
        specs = [spec for spec in fields(config) if spec.metadata.get("cli", True) and spec.name not in without]
        specs = [spec for spec in specs if not only or spec.name in only]
        groups[parameter] = [_flag(spec, hints[spec.name], defaults or {}, shown_defaults or {}) for spec in specs]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**values: Any) -> None:
            filled = {p: {f.name: read(values.pop(f.name)) for f, read in flags} for p, flags in groups.items()}
            command(**values, **filled)

        parameters = inspect.signature(command, eval_str=True).parameters.values()
        plain = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters if p.name not in groups]
        signature = inspect.Signature([*plain, *(flag for flags in groups.values() for flag, _ in flags)])
        del run.__wrapped__  # else inspect looks through to the declared parameters
        run.__signature__ = signature  # type: ignore[attr-defined]
        run.__annotations__ = {name: p.annotation for name, p in signature.parameters.items()}
        return run

    return decorate


def _flag(spec: Field[Any], hint: Any, defaults: Mapping[str, Any], shown_defaults: Mapping[str, str]) -> Flag:
    flag = spec.metadata.get("flag", "--" + spec.name.replace("_", "-"))
    default = defaults.get(spec.name, ... if spec.default is MISSING else spec.default)
    parser, metavar = None, spec.metadata.get("metavar")
    kind: Any
    read: Callable[[Any], Any]
    if metavar and metavar.endswith(",.."):  # several numbers in one text
        kind, read, default = str, functools.partial(_numbers, flag, hint), ",".join(f"{value:g}" for value in default)
    else:
        kind, usual, read = _kind(hint, flag)
        metavar = metavar or usual
    if kind in (int, float) and default is not None and NoneType in alternatives(hint):
        metavar, parser = f"<{kind.__name__}|none>", (lambda text: read_text(str(text), kind | None))
    declared = typer.Option(
        *([flag] if "flag" in spec.metadata else ()),
        help=spec.metadata.get("help"),
        metavar=metavar,
        show_default=shown_defaults.get(spec.name) or default is not False,
        parser=parser,
        rich_help_panel=_PANEL_OF.get(spec.name),
    )
    annotation: Any = Annotated[kind | None if default is None else kind, declared]
    return inspect.Parameter(spec.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation), read


def _kind(hint: Any, flag: str) -> tuple[Any, str | None, Callable[[Any], Any]]:
    """Return what typer parses for a type hint, how to show it, and how to convert it to Python's value.

    Of a union the most general reading wins: a list (``str | list[str]`` is a flag that may be repeated), then text
    (``int | str`` is parsed in Python, ``1GiB``), then numbers.
    """
    choices = [choice for choice in alternatives(hint) if choice is not NoneType]
    for choice in choices:
        origin, inner = get_origin(choice), get_args(choice)
        if origin is dict and inner in _MAPPERS:
            return list[str], "KEY=VALUE", lambda pairs, mapper=_MAPPERS[inner]: mapper(flag, pairs) if pairs else None
        if origin in (list, tuple):
            return list[inner[0]], None, lambda parts, kind=origin: kind(parts) if parts else None  # type: ignore[valid-type]
    for kind in (str, Path, float, int, bool, *(choice for choice in choices if get_origin(choice) is Literal)):
        if kind in choices:
            return kind, None, lambda value: value
    raise TypeError(f"no command-line form for the type {hint!r}")


def _numbers(flag: str, hint: Any, text: str) -> Any:
    try:
        return read_text(text, hint)
    except ValueError as error:
        wrong = "it is not a list of numbers with commas between them"
        raise ConfigError(f"{flag} {text}", wrong, f"write {flag} 1,8") from error


def _biases(flag: str, pairs: list[str]) -> dict[int, float]:
    """Convert ``["7=-2.5"]`` to ``{7: -2.5}``: token ids and their values."""
    try:
        return {int(key): float(value) for key, value in (pair.split("=", 1) for pair in pairs)}
    except ValueError as error:
        remedy = f"write a token id and a number: {flag} 7=-2.5"
        raise ConfigError(f"{flag} {' '.join(pairs)}", "it does not have the form KEY=VALUE", remedy) from error


_MAPPERS: dict[tuple[Any, ...], Callable[[str, list[str]], Any]] = {(int, float): _biases, (str, str): named_values}
