"""Applications in a grid: which plain decoding a trained set's answers are held against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from paceline.bench.records import PLAIN, Method
from paceline.core.errors import ConfigError
from paceline.papers.streaming.model import read_config
from paceline.weights.source import resolve_folder

OF_TARGET = ("exact", "kernels")  # settings on which an application's answers may depend


def with_plain(methods: Sequence[Method], applications: Mapping[str, str]) -> list[Method]:
    """The same, with plain decoding in front of each dtype and application that has none: all speed-ups are over it.

    An application that is adapters alone decodes plainly without a drafter. One whose main rows attend to their streams
    decodes with a budget of 0 under the drafter of its first method: the streams ride on, nothing is drafted.

    Args:
        applications: folders of the trained sets that methods name.

    Raises:
        ConfigError: a trained set that cannot be read.
    """
    own = [m for m in methods if m.ours]
    covered = {(m.dtype, m.application) for m in own if m.plain}
    firsts: dict[tuple[str, str | None], Method] = {}
    for method in own or [Method(name=PLAIN, dtype=methods[0].dtype if methods else "auto")]:
        firsts.setdefault((method.dtype, method.application), method)
    missing = [method for key, method in firsts.items() if key not in covered]
    taken = any(m.name == PLAIN for m in methods)
    dtypes = len({m.dtype for m in missing}) > 1 or (taken and any(m.application is None for m in missing))
    named = taken or len({m.application for m in missing}) > 1
    return [*(_plain_for(method, dtypes, named, applications) for method in missing), *methods]


def _plain_for(method: Method, dtypes: bool, named: bool, applications: Mapping[str, str]) -> Method:
    """Plain decoding that a method can be held against; its name says the dtype and the application where asked to."""
    parts = [PLAIN, *([f"dtype={method.dtype}"] if dtypes else [])]
    parts += [f"application={method.application}"] if named and method.application is not None else []
    plain = Method(name=" ".join(parts), dtype=method.dtype, application=method.application)
    if method.application is None:
        return plain
    kept = {key: method.settings[key] for key in OF_TARGET if key in method.settings}
    if method.application not in applications:
        known = ", ".join(applications) or "none"
        wrong = f"no folder is given for it (known: {known})"
        raise ConfigError(f"application {method.application!r}", wrong, "name its folder")
    if not read_config(Path(resolve_folder(applications[method.application]))).gamma:
        return replace(plain, settings=kept)
    return replace(plain, drafter=method.drafter, round=method.round, settings={**kept, "budget": 0})
