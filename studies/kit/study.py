"""The framework for studies: a paper's tables and figures as a list of short functions.

A study is a script. Each of its functions is a table or a figure, takes the options and returns a `Grid` (methods x
workloads x settings, measured interleaved on the same prompts), or yields a `Table` that it makes in another way. The
framework reads the command line, runs the functions named, prints the tables and writes NAME.json, NAME.md, NAME.svg
and, of a grid, its raw report in the folder NAME. docs/extending.md has a complete example.
"""

from __future__ import annotations

import sys
from argparse import SUPPRESS, ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn, Self, get_origin, get_type_hints

from paceline.core.errors import CapabilityError, ConfigError, PacelineError
from paceline.core.options import alternatives, named_values

from .figures import require_matplotlib
from .grid import Entry, Grid, GridLine, Table, measure, table_of
from .stretched import stretched

__all__ = ["Entry", "Grid", "GridLine", "Options", "Study", "Table", "asked", "measure", "numbers"]

DIFFERENT, WRONG, INTERRUPTED = 1, 2, 130  # exit status: ids differ from plain's; a mistake; 128 + SIGINT


def asked(default: Any, help: str, metavar: str | None = None) -> Any:
    """A field of `Options`: its default, help text, and the placeholder of its value."""
    metadata = {"help": help, "metavar": metavar}
    if isinstance(default, dict | list):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def numbers(flag: str, text: str) -> tuple[int, ...]:
    """``1,8`` as whole numbers of 1 or more.

    Raises:
        ConfigError: it is something else.
    """
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(f"{flag} {text}", "not whole numbers of 1 or more, with commas between", f"write {flag} 1,8")
    return tuple(map(int, parts))


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of every study, all of them command-line flags.

    A study with options of its own adds fields: text, numbers, paths, flags, ``dict`` for NAME=VALUE and ``list`` for
    text, both to be repeated.
    """

    out: Path = asked(Path(), "Tables, figures and raw reports go there.", "DIR")
    model: str = asked("paceline-small", "Embedded model, folder or hub name: the target.")
    times: int = asked(1, "Layers for each of the target's own; more add zero (tools/stretch.py).", "N")
    data: Path | None = asked(None, "Folder of workloads that do not come along.", "DIR")
    tasks: str = asked("sql", "sql, e2e, gsm8k, dialogsum, or any workload's name.", "NAME,..")
    prompts: int = asked(4, "Prompts of each task.", "N")
    repeats: int = asked(2, "Times each prompt runs.", "N")
    max_new_tokens: int | None = asked(None, "Tokens of an answer; the task's own where none is given.", "N")
    dtype: str = asked("auto", "auto (the checkpoint's), bfloat16, float32, float64 or int8.")
    device: str = asked("cpu", "cpu or cuda.")
    threads: int | None = asked(None, "CPU threads; torch's choice where none is given.", "N")
    seed: int = asked(0, "Of the choice of prompts and of sampling.", "N")
    overwrite: bool = asked(False, "Measure again where --out holds a report.")
    quick: bool = asked(False, "A small version of everything, with the models and prompts that come along.")
    command: tuple[str, ...] = ()  # that was given, for reports

    def resolved(self) -> Self:
        """Return the options with models in the place of those that are to be stretched."""
        return replace(self, model=stretched(self.model, self.times))

    @property
    def names(self) -> list[str]:
        """Of the tasks.

        Raises:
            ConfigError: no name, or one twice.
        """
        found = [name.strip() for name in self.tasks.split(",") if name.strip()]
        if not found or len({*found}) < len(found):
            raise ConfigError(f"--tasks {self.tasks!r}", "no name, or one twice", "write it like sql,e2e")
        return found

    @property
    def llm(self) -> dict[str, Any]:
        """Those of `LLM` among the options."""
        return {"dtype": self.dtype, "device": self.device, "threads": self.threads}


Made = Grid | Iterator[Table | None]  # of a generator: None as soon as all is checked, then the table
Make = Callable[[Any], Made]  # from the study's options


@dataclass(frozen=True, kw_only=True)
class Item:
    """A table or figure of a study."""

    make: Make
    draws: bool  # needs matplotlib
    needs: tuple[str, ...]  # options without which it cannot be
    takes: tuple[str, ...]  # options of the study's own that it looks at, if they are given
    defaults: Mapping[str, Any]
    quick: dict[str, Any]

    @property
    def help(self) -> str:
        """The first line of its docstring, and what it needs."""
        said = (self.make.__doc__ or "").strip().partition("\n")[0]
        return said + (f" [{', '.join(map(_flag, self.needs))}]" if self.needs else "")


class Study:
    """A script of tables and figures.

    Args:
        title: of the paper, or the question.
        options: `Options`, or a subclass of it.
        quick: options of ``--quick``, unless the user gives them.
    """

    def __init__(self, title: str, options: type[Options] = Options, quick: Mapping[str, Any] | None = None) -> None:
        self.title = title
        self.options = options
        self.quick = dict(quick or {})
        self.items: dict[str, Item] = {}

    def figure(
        self,
        *,
        needs: Sequence[str] = (),
        takes: Sequence[str] = (),
        quick: Mapping[str, Any] | None = None,
        draws: bool = True,
        **defaults: Any,
    ) -> Callable[[Make], Make]:
        """Register the decorated function under its own name; ``--help`` shows the first line of its docstring.

        Args:
            needs: options that must be given.
            takes: others of the study's own options that it uses.
            quick: options of ``--quick``, for this one alone.
            draws: whether it needs matplotlib.
            defaults: of options, if they differ from the study's.
        """

        def add(make: Make) -> Make:
            self.items[make.__name__] = Item(
                make=make,
                draws=draws,
                needs=tuple(needs),
                takes=tuple(takes),
                defaults=defaults,
                quick=dict(quick or {}),
            )
            return make

        return add

    def table(self, **given: Any) -> Callable[[Make], Make]:
        """The same for a function that draws nothing."""
        return self.figure(draws=False, **given)

    def main(self, arguments: Sequence[str] | None = None) -> NoReturn:
        """Run the figures that the command line names, and exit with the status: 0 or one of the constants above."""
        sys.exit(self.run(sys.argv[1:] if arguments is None else arguments))

    def run(self, arguments: Sequence[str]) -> int:
        """The same, returning the status. Errors and Ctrl-C end in one line on stderr; what was measured is kept."""
        try:
            same = [self._finish(*each) for each in self._begin(arguments)]
        except PacelineError as error:
            print(f"error: {error}", file=sys.stderr)
            return WRONG
        except KeyboardInterrupt:
            print("interrupted: the raw report has what was measured", file=sys.stderr)
            return INTERRUPTED
        return 0 if all(same) else DIFFERENT

    def _begin(self, arguments: Sequence[str]) -> list[tuple[str, Options, Made]]:
        """All grids and tables to be measured, so that errors are found before the first run begins."""
        given = _parse(self, arguments)
        named = given.pop("figures")
        items = {name: self._item(name) for name in named or self.items}
        self._refuse_useless(items, given)
        found = []
        for name, item in items.items():
            quick = self.quick | item.quick if given.get("quick") else {}
            options = self.options(**{**item.defaults, **quick, **given}).resolved()
            try:
                _require(item, name, options)
                made = item.make(options)
                if isinstance(made, Grid):
                    made.config(options)
                else:
                    next(made)
                found.append((name, options, made))
            except CapabilityError as error:
                if named:
                    raise
                print(f"left out: {error}", file=sys.stderr)
        if not found:
            raise ConfigError("every figure", "none can be made of what is given", "see what each needs: --help")
        return found

    def _item(self, name: str) -> Item:
        if name not in self.items:
            raise ConfigError(f"figure {name}", "there is none of that name", f"use {', '.join(self.items)}")
        return self.items[name]

    def _refuse_useless(self, items: Mapping[str, Item], given: Mapping[str, Any]) -> None:
        own = {option.name for option in fields(self.options)} - {option.name for option in fields(Options)}
        used = {option for item in items.values() for option in (*item.needs, *item.takes)}
        for name in given:
            if name in own - used:
                raise ConfigError(_flag(name), f"it means nothing to {', '.join(items)}", "leave it out")

    def _finish(self, name: str, options: Options, made: Made) -> bool:
        """Measure, show and write. Returns whether ids equal plain decoding's."""
        table = table_of(made, measure(made, options, options.out / name)) if isinstance(made, Grid) else next(made)
        assert table is not None
        if options.times > 1:  # a table shows no more of a model than its title says
            label = Path(options.model).name
            values = {**table.values, "target": label, "stretched": options.times}
            table = replace(table, title=f"{table.title} ({label})", values=values)
        table.show()
        for file in table.write(options.out, name, options.command):
            print(file, flush=True)
        return table.same


def _require(item: Item, name: str, options: Options) -> None:
    missing = next((option for option in item.needs if not getattr(options, option)), None)
    if missing is not None:
        raise CapabilityError(name, f"{_flag(missing)} is not given", "--help shows what it takes")
    if item.draws:
        require_matplotlib()


# -- the command line


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(self.prog, message, "see --help")


def _parse(study: Study, arguments: Sequence[str]) -> dict[str, Any]:
    """What was given, by option; ``figures`` is always there.

    Raises:
        ConfigError: an unknown option, an invalid value, or no output folder.
    """
    items = "\n".join(f"  {name:<20} {item.help}" for name, item in study.items.items())
    parser = _Parser(
        description=study.title,
        epilog=f"tables and figures [and the options that each needs]:\n{items}",
        formatter_class=RawDescriptionHelpFormatter,
        argument_default=SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("figures", nargs="*", default=[], metavar="FIGURE", help="Default: all that can be made.")
    hints = get_type_hints(study.options)
    options = {option.name: option for option in fields(study.options) if option.metadata}
    for name, option in options.items():
        _add(parser, option, hints[name])
    given = vars(parser.parse_intermixed_args(arguments))
    if "out" not in given:
        raise ConfigError(parser.prog, "no folder is named for what is made", "add --out DIR")
    for name, texts in given.items():
        if name in options and get_origin(hints[name]) is dict:
            given[name] = named_values(_flag(name), texts)
    told = [a for a in arguments if a != "--overwrite"]
    return {**given, "command": ("python", sys.argv[0], *told)}


def _add(parser: ArgumentParser, option: Field[Any], hint: Any) -> None:
    """One option of the command line, from a field."""
    kind = next(kind for kind in alternatives(hint) if kind is not NoneType)
    words = str(option.metadata["help"]).replace("%", "%%")
    if kind is bool:
        parser.add_argument(_flag(option.name), action="store_true", help=words)
    elif get_origin(kind) in (dict, list):
        parser.add_argument(
            _flag(option.name), action="append", metavar=option.metadata["metavar"], help=f"{words} Repeat it."
        )
    else:
        metavar = option.metadata["metavar"] or option.name.upper()
        parser.add_argument(_flag(option.name), type=kind, metavar=metavar, help=words)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
