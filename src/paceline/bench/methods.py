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
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import Any, get_type_hints

from .. import zoo
from ..config import LLMConfig
from ..core.errors import ConfigError
from ..core.model_spec import parse_model
from ..core.options import read, suggest, type_name, written
from ..drafters import registry
from ..rounds import AUTO, ROUNDS, parse_round
from .records import PLAIN, PLAIN_MODES, Method

NONE = "none"  # the drafter of plain decoding
ANSWERS = "answers"  # the option of a drafter that looks at recorded answers
RECORDED = "recorded"  # stands for the file that the run records
# What a run decides for all its methods, or what has a place of its own in a `Method`.
_SHARED = {"model", "drafter", "round", "dtype", "device", "threads", "kv_memory", "max_model_len", "max_sequences"}
_SHARED |= {"revision", "offline", "trust_remote_code", "applications"}
_SHARED |= {"pipeline"}  # its processes serve one engine, and a run's engines share their target
SETTINGS = tuple(f.name for f in fields(LLMConfig) if f.name not in _SHARED)
_NEED_DRAFTS = {"budget", "costs", "verifier"}  # mean nothing to plain decoding
_COMMA = re.compile(r",(?![^<]*>)")  # as the registry cuts: not inside <...>
_FORM = "write [NAME=]DRAFTER[;OPTION=VALUE]..., such as 'fast=ngram,depth=4;budget=8'"


# -- reading


def parse_method(text: str, dtype: str = "auto") -> Method:
    """Read one method.

    Args:
        text: see the top of the module.
        dtype: where the text names none.

    Raises:
        ConfigError: no such drafter or option, or a value that does not fit.
    """
    head, rest = _cut(text)
    name, body = _named(head)
    if not body:
        raise ConfigError(f"--method {text!r}", "it names no drafter", _FORM)
    settings = dict(_assignment(item, text) for item in rest)
    if len(settings) < len(rest):
        raise ConfigError(f"--method {text!r}", "an option is given twice", "give it once")
    if "/" in re.split(r"[,:=]", body, maxsplit=1)[0]:
        raise ConfigError(f"--method {text!r}", "other engines are not run here", "python studies/peers.py runs them")
    return _own_method(text, name, body, settings, dtype)


def parse_methods(texts: Iterable[str], dtype: str = "auto") -> list[Method]:
    """Read several. Names that clash become the texts themselves.

    Raises:
        ConfigError: see `parse_method`, or the same method twice.
    """
    texts = list(texts)
    methods = [parse_method(text, dtype) for text in texts]
    names = [m.name for m in methods]
    renamed = [replace(m, name=t) if names.count(m.name) > 1 else m for m, t in zip(methods, texts, strict=True)]
    _refuse_twins(renamed)
    return renamed


def _cut(text: str) -> tuple[str, list[str]]:
    """A method's drafter, and its settings. Options of drafters inside of a drafter stand behind ; as well: what comes
    before the first setting and is an option of some drafter is theirs."""
    head, *rest = (part.strip() for part in text.split(";"))
    if registry.nests(_kind(_named(head)[1])):
        options = {option.name for row in registry.describe() for option in row.options} - {*SETTINGS, "round", "dtype"}
        while rest and rest[0].partition("=")[0].strip() in options:
            head += ";" + rest.pop(0)
    return head, rest


def _named(head: str) -> tuple[str | None, str]:
    """A name, where the first ``=`` stands before anything a drafter's text could hold."""
    match = re.match(r"([^=,:;/<]+)=(.*)", head, re.DOTALL)
    return (match[1].strip(), match[2].strip()) if match else (None, head)


def _assignment(item: str, text: str) -> tuple[str, str]:
    key, equals, value = (part.strip() for part in item.partition("="))
    if not key or not equals or not value:
        raise ConfigError(f"--method {text!r}", f"{item!r} is not option=value", _FORM)
    return key, value


def _own_method(text: str, name: str | None, drafter: str, settings: dict[str, str], dtype: str) -> Method:
    asked = f"--method {text!r}"
    drafter = NONE if drafter == PLAIN else drafter
    config = _parse_drafter(drafter, RECORDED)
    found = dict(settings)
    round_ = _known_round(found.pop("round", AUTO), asked)
    dtype = found.pop("dtype", dtype)
    values = {key: _setting_value(key, value, asked) for key, value in found.items()}
    if config.kind == NONE:
        useless = sorted(_NEED_DRAFTS & values.keys())
        if useless:
            raise ConfigError(asked, f"{useless[0]} means nothing without a drafter", "leave it out")
    method = Method(
        name=name or _default_name(drafter, settings),
        drafter=drafter,
        round=round_,
        settings=values,
        dtype=dtype,
        synthetic=_answers_of(config) is not None,
    )
    check(method)
    return method


def _default_name(drafter: str, settings: dict[str, str]) -> str:
    """The drafter's name and options without its model, then the settings."""
    head, *options = _COMMA.split(drafter)
    kind = _kind(head)
    return ";".join([",".join([PLAIN if kind == NONE else kind, *options]), *(f"{k}={v}" for k, v in settings.items())])


def _known_round(name: str, asked: str) -> str:
    if name.partition(",")[0].strip() not in (AUTO, *ROUNDS):
        raise ConfigError(asked, f"there is no round {name!r}", suggest(name, [AUTO, *ROUNDS], "round"))
    parse_round(name)
    return name


def _setting_value(name: str, text: str, asked: str) -> Any:
    if name not in SETTINGS:
        known = [*SETTINGS, "round", "dtype"]
        raise ConfigError(asked, f"there is no setting {name!r}", suggest(name, known, "setting"))
    hint = get_type_hints(LLMConfig)[name]
    try:
        return read(text, hint)
    except ValueError as error:
        raise ConfigError(asked, f"{text!r} is no value for {name}", f"{name} is {type_name(hint)}") from error


def show(value: Any) -> str:
    """A setting's value as a user writes it."""
    return f"{value:g}" if isinstance(value, float) else written(value)


# -- checking


def check(method: Method) -> None:
    """Refuse settings that cannot be, without loading a model.

    Raises:
        ConfigError: what `LLM` would say.
    """
    LLMConfig(model="any", drafter=drafter_config(method), round=method.round, dtype=method.dtype, **method.settings)


def drafter_config(method: Method, answers: str | None = None) -> registry.DrafterConfig | None:
    """The drafter of one of our own methods; None where there is none.

    Args:
        answers: file of recorded answers, for a drafter that looks at them and was given none.

    Raises:
        ConfigError: what the registry says.
    """
    return None if method.drafter in PLAIN_MODES else _parse_drafter(method.drafter, answers or RECORDED)


def records_answers(method: Method) -> bool:
    """Whether the run must record the target's answers for this method's drafter."""
    config = drafter_config(method) if method.own else None
    return config is not None and _answers_of(config) == RECORDED


def _answers_of(config: registry.DrafterConfig) -> str | None:
    """The file of recorded answers that a drafter looks at, which makes its acceptance a setting; None: none."""
    found: str | None = getattr(config, ANSWERS, None)
    return found


def _parse_drafter(text: str, answers: str) -> registry.DrafterConfig:
    """As the registry does; a drafter that wants recorded answers and names no file gets the run's own."""
    head, *options = _COMMA.split(text)
    known = registry.config_class(_kind(text))
    named = any(option.partition("=")[0].strip() == ANSWERS for option in options)
    if any(f.name == ANSWERS for f in fields(known)) and not named:
        text = f"{text},{ANSWERS}={answers}"
    config = registry.parse(text)
    assert config is not None
    return config


def _kind(drafter: str) -> str:
    return _COMMA.split(drafter)[0].partition(":")[0].strip()


# -- which methods


def default_methods(model: str, dtype: str = "auto") -> list[Method]:
    """Plain decoding, and every drafter that fits the model as it is.

    An embedded target brings its draft model; a random one has only synthetic acceptance, at two rates: its
    text has nothing to find.
    """
    spec = parse_model(model)
    if spec.random:
        return parse_methods([PLAIN, "synthetic,accept=0.6", "synthetic,accept=0.9"], dtype)
    texts = [PLAIN, "ngram", "suffix"]
    entry = next((e for e in zoo.available() if e.name == spec.name), None)
    if entry is not None and entry.draft:
        # The draft in the form in which the zoo uses it.
        form = getattr(registry.parse(entry.drafter), "dtype", "auto") if entry.drafter else "auto"
        texts.append(f"draft_model:{entry.draft}" + ("" if form == "auto" else f",dtype={form}"))
    texts += [entry.drafter] if entry is not None and entry.drafter else []
    kinds = [_kind(text) for text in texts]
    # A kind that is there once is name enough.
    named = [text if text == PLAIN or kinds.count(_kind(text)) > 1 else f"{_kind(text)}={text}" for text in texts]
    return parse_methods(named, dtype)


def with_plain(methods: Sequence[Method]) -> list[Method]:
    """The same, with plain decoding in front of each dtype that has none: all speed-ups are over it."""
    own = [m for m in methods if m.own]
    dtypes = dict.fromkeys(m.dtype for m in own or [Method(name=PLAIN, dtype=methods[0].dtype if methods else "auto")])
    missing = [dtype for dtype in dtypes if not any(m.plain and m.dtype == dtype for m in own)]
    unnamed = len(missing) == 1 and not any(m.name == PLAIN for m in methods)
    names = {dtype: PLAIN if unnamed else f"{PLAIN} dtype={dtype}" for dtype in missing}
    return [*(Method(name=name, dtype=dtype) for dtype, name in names.items()), *methods]


def _refuse_twins(methods: Sequence[Method]) -> None:
    names = [m.name for m in methods]
    twins = sorted({name for name in names if names.count(name) > 1})
    if twins:
        raise ConfigError(f"two methods called {twins[0]!r}", "results go by the name", "give one a name: NAME=DRAFTER")
