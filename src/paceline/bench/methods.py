"""Methods as a user writes them.

A method is written ``[NAME=]DRAFTER[;OPTION=VALUE]...``: a drafter as the registry reads it, then ``round``,
``dtype`` and options of `LLM`:

    ngram
    fast=ngram,depth=4;budget=8
    hybrid:paceline-small-draft,dtype=int8
    hybrid:suffix;depth=14+streams:paceline-small-streams;budget=16
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import Any, get_type_hints

from ..api.config import LLMConfig
from ..core.errors import ConfigError
from ..core.options import named_values, read, suggest, type_name
from ..draft import registry
from ..engine.rounds import AUTO
from ..weights import zoo
from .records import PLAIN, PLAIN_MODES, Method

NONE = "none"  # the drafter of plain decoding
# What a run decides for all its methods, or what has a place of its own in a `Method`.
_SHARED = {"model", "drafter", "round", "dtype", "device", "threads", "kv_memory", "max_model_len", "max_sequences"}
_SHARED |= {"revision", "offline", "applications"}
_SHARED |= {"pipeline", "tensor_parallel"}  # their processes serve one engine, and a run's engines share their target
_SHARED.add("learn")  # measured code stays as it is
SETTINGS = tuple(f.name for f in fields(LLMConfig) if f.name not in _SHARED)
_COMMA = re.compile(r",(?![^<]*>)")  # as the registry cuts: not inside <...>
_FORM = "write [NAME=]DRAFTER[;OPTION=VALUE]..., such as 'fast=ngram,depth=4;budget=8'"


def parse_method(text: str, dtype: str = "auto") -> Method:
    """Read one method, of this dtype where the text names none.

    Raises:
        ConfigError: no such drafter or option, or a value that does not fit.
    """
    subject = f"--method {text!r}"
    head, rest = _cut(text)
    name, drafter = _named(head)
    if not drafter:
        raise ConfigError(subject, "it names no drafter", _FORM)
    if "/" in re.split(r"[,:=]", drafter, maxsplit=1)[0]:
        raise ConfigError(subject, "bench runs this engine alone", "python studies/peers.py runs them")
    settings = named_values("--method", rest)
    drafter = NONE if drafter == PLAIN else drafter
    round_, dtype = settings.get("round", AUTO), settings.get("dtype", dtype)
    values = {key: _value(key, value, subject) for key, value in settings.items() if key not in ("round", "dtype")}
    first, *options = _COMMA.split(drafter)  # a name has no model
    parts = [PLAIN if drafter == NONE else _kind(first), *options]
    method = Method(
        name=name or ";".join([",".join(parts), *(f"{key}={value}" for key, value in settings.items())]),
        drafter=drafter,
        round=round_,
        settings=values,
        dtype=dtype,
    )
    # What cannot be is refused without loading a model.
    LLMConfig(model="any", drafter=drafter_of(method), round=round_, dtype=dtype, **values)
    return method


def parse_methods(texts: Iterable[str], dtype: str = "auto") -> list[Method]:
    """Read several. Names that clash become the texts themselves.

    Raises:
        ConfigError: see `parse_method`, or the same method twice.
    """
    texts = list(texts)
    methods = [parse_method(text, dtype) for text in texts]
    names = [m.name for m in methods]
    renamed = [replace(m, name=t) if names.count(m.name) > 1 else m for m, t in zip(methods, texts, strict=True)]
    if twins := [name for name, many in Counter(m.name for m in renamed).items() if many > 1]:
        raise ConfigError(f"two methods called {twins[0]!r}", "results go by the name", "give one a name: NAME=DRAFTER")
    return renamed


def _cut(text: str) -> tuple[str, list[str]]:
    """Split a method's text into its drafter and its settings.

    Options of drafters inside of a drafter may follow ``;`` as well: everything before the first setting that is an
    option of some drafter belongs to that drafter.
    """
    head, *rest = (part.strip() for part in text.split(";"))
    if registry.nests(_kind(_named(head)[1])):
        options = {option.name for row in registry.describe() for option in row.options} - {*SETTINGS, "round", "dtype"}
        while rest and rest[0].partition("=")[0].strip() in options:
            head += ";" + rest.pop(0)
    return head, rest


def _named(head: str) -> tuple[str | None, str]:
    """Return a name, where the first ``=`` precedes anything that a drafter's text could hold."""
    match = re.match(r"([^=,:;/<]+)=(.*)", head, re.DOTALL)
    return (match[1].strip(), match[2].strip()) if match else (None, head)


def _value(name: str, text: str, subject: str) -> Any:
    """Return a setting's value, of the type that `LLM` takes."""
    if name not in SETTINGS:
        setting_names = [*SETTINGS, "round", "dtype"]
        raise ConfigError(subject, f"there is no setting {name!r}", suggest(name, setting_names, "setting"))
    hint = get_type_hints(LLMConfig)[name]
    try:
        return read(text, hint)
    except ValueError as error:
        raise ConfigError(subject, f"{text!r} is not a value of {name}", f"{name} is {type_name(hint)}") from error


def drafter_of(method: Method) -> str | None:
    """Return the drafter of one of our own methods, as `LLM` takes it; None where there is none."""
    return None if method.drafter in PLAIN_MODES else method.drafter


def _kind(drafter: str) -> str:
    return _COMMA.split(drafter)[0].partition(":")[0].strip()


# -- which methods


def default_methods(model: str, dtype: str = "auto") -> list[Method]:
    """List plain decoding, look-ups, and every drafter that the zoo has for the model."""
    preferred, drafters = zoo.default_drafter(model, dtype), set(registry.names())
    # The draft in the form in which the zoo uses it.
    form = getattr(registry.parse(preferred), "dtype", "auto") if preferred else "auto"
    texts = [PLAIN, "ngram", "suffix"]
    for entry in zoo.trained_for(model):
        if entry.read_by in drafters:
            more = f",dtype={form}" if entry.role == "draft" and form != "auto" else ""
            texts.append(f"{entry.read_by}:{entry.name}{more}")
    texts += [preferred] if preferred and preferred not in texts else []
    kinds = Counter(map(_kind, texts))
    # A kind that is there once is name enough.
    named = [text if text == PLAIN or kinds[_kind(text)] > 1 else f"{_kind(text)}={text}" for text in texts]
    return parse_methods(named, dtype)


def with_plain(methods: Sequence[Method]) -> list[Method]:
    """Return the methods with plain decoding before each dtype that lacks it: all speed-ups are over it."""
    ours = [m for m in methods if m.ours]
    dtypes = dict.fromkeys(m.dtype for m in ours or [Method(name=PLAIN, dtype=methods[0].dtype if methods else "auto")])
    missing = [dtype for dtype in dtypes if not any(m.plain and m.dtype == dtype for m in ours)]
    unnamed = len(missing) == 1 and not any(m.name == PLAIN for m in methods)
    names = {dtype: PLAIN if unnamed else f"{PLAIN} dtype={dtype}" for dtype in missing}
    return [*(Method(name=name, dtype=dtype) for dtype, name in names.items()), *methods]
