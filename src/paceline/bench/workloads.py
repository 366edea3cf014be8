"""Benchmark prompts, their sources, and their token ids.

A workload is a list of prompts with its source and licence. Small samples of some come with the package
(``bench/data``, described in its SOURCES.md); every other one, and the full version of these, is read from a
folder. A file holds one JSON record a line, in either form:

- ``{"id", "category", "turns": [user message, ...], "reference": [accepted answer, ...]}``
- ``{"prompt", "completion"}``

Names ending in .gz are gzip-compressed. Other keys are kept as they are.
"""

from __future__ import annotations

import hashlib
import json
import random
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, StringConstraints, TypeAdapter, ValidationError

from ..core.errors import ConfigError
from ..core.options import shown, suggest
from ..train.files import read_records

FORM = 'one JSON record a line: {"id", "category", "turns": [...], "reference": [...]} or {"prompt", "completion"}'
PACKAGED = "packaged sample"  # where a workload that comes along is read from
_ANSWERS = ("reference", "references", "completion")
Text = Annotated[str, StringConstraints(pattern=r"\S")]  # not blank


def _id(value: Any) -> Any:
    """Convert an id, which may be a whole number."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value or None


# -- what a workload is


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt: a text, or the user's turns of a conversation."""

    id: Annotated[str, BeforeValidator(_id)]  # unique within the workload
    category: Annotated[str, StringConstraints(min_length=1)]
    turns: Annotated[tuple[Text, ...], Field(min_length=1)]  # the first is what is answered
    reference: tuple[str, ...] = ()  # accepted answers, where the source has any
    extra: dict[str, Any] = field(default_factory=dict)  # further keys of the record


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Prompts, and their description in a report; in the catalogue without prompts."""

    name: str
    title: str
    description: str
    source: str
    licence: str
    chat: bool  # turns go through the chat template, where the model has one; else raw text
    max_new_tokens: int
    file: str = ""  # its full version, in a folder of data
    packaged: bool = False  # a sample is in bench/data
    strata: str = "category"  # the key that a choice of prompts is spread over
    origin: str = ""  # `PACKAGED`, or the file that was read
    prompts: tuple[Prompt, ...] = ()
    total: int = 0  # prompts there were to choose from

    @property
    def fingerprint(self) -> str:
        """Hash of ids and turns, in order: two runs of the same prompts have the same one."""
        content = json.dumps([(p.id, p.turns) for p in self.prompts], ensure_ascii=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def as_dict(self) -> dict[str, Any]:
        """Return the entry of a report, ready for JSON; ``prompts`` is how many were used, of ``total``."""
        names = "title", "description", "source", "licence", "origin", "total", "chat", "max_new_tokens", "fingerprint"
        return {**{name: getattr(self, name) for name in names}, "prompts": len(self.prompts)}


_PROMPTS = TypeAdapter(Prompt)
HERE = Path(__file__).parent
_TABLE = tomllib.loads((HERE / "workloads.toml").read_text(encoding="utf-8"))
WORKLOADS = {name: Workload(name=name, **facts) for name, facts in _TABLE.items()}


# -- finding and loading


def load(
    name_or_path: str | Path,
    *,
    folder: str | Path | None = None,
    limit: int | None = None,
    seed: int = 0,
) -> Workload:
    """Return prompts by the name of a workload (of ``folder``, else of the packaged sample), or of a file.

    Records of the form prompt and completion that have the same prompt become one with several references.

    Args:
        name_or_path: a name of `WORKLOADS`, or the path of a file.
        folder: where the files of known workloads are.
        limit: prompts to choose, spread evenly over the categories (see `choose`); None: all, in their
            order. More than there are gives all of them: see ``Workload.total``.
        seed: of the choice.

    Raises:
        ConfigError: an unknown name, a missing file, a record that is not of the form, no record, two
            records of one id.
    """
    name = name_or_path.lower().replace("-", "_") if isinstance(name_or_path, str) else ""
    entry = WORKLOADS.get(name)
    if entry is None:
        file = place = Path(name_or_path).expanduser()
        if not place.is_file():
            if name and "/" not in name and "." not in name:
                wrong = "it is neither a known workload nor a file"
                raise ConfigError(f"workload {name!r}", wrong, suggest(name, WORKLOADS, "workload"))
            raise ConfigError(f"workload {place}", "there is no such file", "check the path")
        stem, origin = place.resolve().name.removesuffix(".gz").removesuffix(".jsonl"), str(place)
        facts: dict[str, Any] = {"name": stem, "title": stem, "source": origin, "file": place.name}
        facts |= {"description": "from a file", "licence": "not stated", "chat": True, "max_new_tokens": 128}
        entry = Workload(**facts)
    else:
        if folder is not None and not Path(folder).is_dir():
            raise ConfigError(f"data folder {folder}", "there is no such folder", "name a folder of .jsonl files")
        files = [Path(folder) / f"{entry.file}{packed}" for packed in ("", ".gz")] if folder is not None else []
        sample = [HERE / "data" / f"{entry.name}.jsonl"] if entry.packaged else []
        if (path := next((one for one in [*files, *sample] if one.is_file()), None)) is None:
            where = f"{folder} has no {entry.file}" if folder else "it does not come with the package"
            remedy = f"make {entry.file} from {entry.source}, {FORM}, and name its folder with --data"
            raise ConfigError(f"workload {entry.name!r}", f"{where} (licence: {entry.licence})", remedy)
        file, origin = path, PACKAGED if path in sample else str(path)
    prompts = _parse(file, origin, entry.name)
    chosen = prompts if limit is None else choose(prompts, limit, seed, entry.strata)
    return replace(entry, origin=origin, prompts=tuple(chosen), total=len(prompts))


def choose(prompts: Sequence[Prompt], limit: int, seed: int = 0, strata: str = "category") -> list[Prompt]:
    """Return a reproducible choice, spread evenly over strata.

    Strata are put in a random order, so are the prompts of each; then one prompt of each stratum is taken in
    turn until there are ``limit``. So every prefix of the result is as even as can be, and a smaller choice
    is the beginning of a larger one with the same seed.

    Args:
        strata: ``"category"``, or a key of ``Prompt.extra``; prompts without it go by their category.
    """
    groups: dict[str, list[Prompt]] = {}
    for prompt in sorted(prompts, key=lambda p: p.id):  # the choice depends on the ids, not on the file's order
        groups.setdefault(str(prompt.extra.get(strata, prompt.category)), []).append(prompt)
    draw = random.Random(seed).random  # whose sequence Python keeps the same between versions

    def shuffled(items: Iterable[Any]) -> list[Any]:
        return sorted(items, key=lambda _: draw())

    decks = [shuffled(groups[name]) for name in shuffled(sorted(groups))]
    return [prompt for turn in zip_longest(*decks) for prompt in turn if prompt is not None][:limit]


# -- records


def _parse(file: Path, origin: str, name: str) -> list[Prompt]:
    """Return the records of a file; ``name`` makes the ids and the category of records that have none."""
    by_id: dict[str, tuple[str, Prompt]] = {}  # by id: place, prompt
    by_text: dict[str, str] = {}  # text of a prompt without an id of its own -> the id it was given
    for where, record in read_records(file, origin, f"give {FORM}"):
        prompt = _prompt(record, where, default_id=f"{name}-{where.rpartition(' ')[2]}", default_category=name)
        bare = "prompt" in record and "id" not in record
        twin = by_text.setdefault(prompt.turns[0], prompt.id) if bare else prompt.id
        if twin != prompt.id:  # another reference for a prompt that is there already
            first, other = by_id[twin]
            by_id[twin] = (first, replace(other, reference=tuple(dict.fromkeys(other.reference + prompt.reference))))
            continue
        if prompt.id in by_id:
            raise ConfigError(where, f"id {prompt.id!r} is that of {by_id[prompt.id][0]}, too", "make ids unique")
        by_id[prompt.id] = (where, prompt)
    if not by_id:
        raise ConfigError(f"workload {origin}", "it holds no record", f"give {FORM}")
    return [prompt for _, prompt in by_id.values()]


def _prompt(record: dict[str, Any], where: str, default_id: str, default_category: str) -> Prompt:
    if ("turns" in record) == ("prompt" in record):
        raise ConfigError(where, "it has both 'turns' and 'prompt', or neither", f"give {FORM}")
    fields_given = dict(record)
    turns = [fields_given.pop("prompt")] if "prompt" in fields_given else fields_given.pop("turns")
    # The first of the names that is there; all of them leave the record. A list a turn is a form too (Spec-Bench's rag
    # has it); which turn an answer belongs to is not kept.
    references = [fields_given.pop(key, None) for key in _ANSWERS]
    listed = _listed(next((value for value in references if value is not None), []))
    answers = [text for item in listed for text in _listed(item)]
    values = {"id": default_id, "category": default_category, **fields_given, "turns": turns, "reference": answers}
    extra = {key: values.pop(key) for key in fields_given if key not in ("id", "category")}
    try:
        return _PROMPTS.validate_python({**values, "extra": extra})
    except ValidationError as error:
        first = error.errors()[0]
        wrong = f"{first['loc'][0]!r} cannot hold {shown(first['input'])}: {first['msg']}"
        raise ConfigError(where, wrong, f"give {FORM}") from error


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
